"""Which GPUs a model gets, where their launchers run, and who has fallen silent."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from ling_local.engine import gpus
from ling_local.engine.gpus import Gpu, needed_bytes, rank_devices, visible_gpus, visible_order
from ling_local.engine.links import Link, find_links, try_exchange
from ling_local.engine.pinning import cpu_list, launcher_cpu, no_collection
from ling_local.engine.protocol import EngineSpec
from ling_local.engine.pulse import LOOK_S, Listener, Pulse, make_pulse


@pytest.mark.parametrize(
    ("variable", "order"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("", []), ("1,9,2", [1]), ("GPU-f3a", [0, 1, 2, 3]), ("-1", [])],
)
def test_gpus_are_numbered_as_cuda_does(variable: str | None, order: list[int]) -> None:
    assert visible_order(variable, 4) == order


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    folder = write_checkpoint(tmp_path / "m", num_attention_heads=4, num_key_value_heads=4)
    return EngineSpec(str(folder), device="cuda", dtype="bfloat16")


def test_a_model_gets_as_many_gpus_as_it_needs(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def have(*free: int) -> None:
        found = [Gpu(index, "GPU", amount, amount) for index, amount in enumerate(free)]
        monkeypatch.setattr(gpus, "visible_gpus", lambda: found)

    one, two = needed_bytes(spec, 1), needed_bytes(spec, 2)
    have(one, one)
    assert rank_devices(spec) == ["cuda"]
    have(two, two, two)
    assert rank_devices(spec) == ["cuda:0", "cuda:1"]
    have(one, two - 1)  # the first alone holds it
    assert rank_devices(spec) == ["cuda"]
    have(two, two - 1)  # nothing fits: the load says what is short
    assert rank_devices(spec) == ["cuda:0", "cuda:1"]
    have(*[1] * 8)
    assert rank_devices(spec) == [f"cuda:{index}" for index in range(4)]  # four heads
    have()
    assert rank_devices(spec) == ["cuda"]
    assert rank_devices(replace(spec, model="nowhere")) == ["cuda"]


def test_named_gpus_are_the_ones(spec: EngineSpec) -> None:
    assert rank_devices(replace(spec, gpus=(3, 1))) == ["cuda:3", "cuda:1"]
    assert rank_devices(replace(spec, gpus=(1,))) == ["cuda:1"]
    assert rank_devices(replace(spec, device="cpu")) == ["cpu"]
    assert rank_devices(replace(spec, engine="scripted")) == ["cuda"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there would be an answer")
def test_a_trial_without_gpus_ends_with_a_reason() -> None:
    assert find_links() == []
    trial = try_exchange((0, 1), 60)
    assert trial.kind == ""
    assert "rank" in trial.note
    assert "3 GPUs" in try_exchange((0, 1, 2)).note
    assert str(Link(0, 1, True, False)) == "GPU 0 - GPU 1: NVLink, no peer access"


def test_a_trial_whose_ranks_die_at_once_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/sleep")  # `sleep -P ...` fails at once: a rank that dies
    assert try_exchange((0, 1), 5).note.startswith("rank")


def test_the_kernels_notation_of_cpus() -> None:
    assert cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpu_list("\n") == set()


def test_every_launcher_has_a_core_of_its_own_near_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ling_local.engine.pinning._siblings", lambda cpu: {cpu % 8, cpu % 8 + 8})
    everything = set(range(16))
    chosen = [launcher_cpu(rank, 4, everything, set()) for rank in range(4)]
    assert chosen == [7, 6, 5, 4]  # first threads of cores; 0 is left to the system
    assert launcher_cpu(0, 2, everything, {0, 1, 2, 3, 8, 9}) == 3
    assert launcher_cpu(1, 2, {0, 1}, set()) is None


def test_who_stops_counting_is_silent_and_who_goes_on_is_not() -> None:
    fd = make_pulse(2)
    pulse = Pulse(fd, 2)
    os.close(fd)
    listener = Listener(pulse, 2)
    for look in range(1, 9):
        pulse.beat(0)
        assert listener.silent_for() == [0, look * LOOK_S]
    pulse.beat(1)
    assert listener.silent_for()[1] == 0


class Nvml:
    """A management library that knows three GPUs, two of them linked. It answers by reference, as the real one."""

    shut = False

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlShutdown(self) -> None:
        self.shut = True

    def nvmlDeviceGetCount_v2(self, count) -> None:
        count._obj.value = 3

    def nvmlDeviceGetHandleByIndex_v2(self, number: int, handle) -> None:
        handle._obj.value = number + 1

    def nvmlDeviceGetMemoryInfo(self, handle, memory) -> None:
        memory._obj.free, memory._obj.total = handle.value * 100, 1000

    def nvmlDeviceGetName(self, handle, name, size: int) -> None:
        name.value = b"GPU of handle %d" % handle.value

    def nvmlDeviceGetCudaComputeCapability(self, handle, major, minor) -> None:
        major._obj.value, minor._obj.value = 9, 0

    def nvmlDeviceGetP2PStatus(self, first, second, kind: int, status) -> int:
        status._obj.value = 0 if kind == 1 or {first.value, second.value} == {1, 3} else 4
        return 0


def test_the_driver_is_asked_for_the_gpus_in_cudas_order(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = Nvml()
    monkeypatch.setattr("ctypes.CDLL", lambda name: nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0,1")
    assert visible_gpus()[0] == Gpu(0, "GPU of handle 3", 300, 1000, (9, 0))
    assert nvml.shut
    nvml.shut = False
    assert find_links() == [Link(0, 1, True, True), Link(0, 2, False, True), Link(1, 2, False, True)]
    assert nvml.shut
    monkeypatch.delattr(Nvml, "nvmlDeviceGetP2PStatus")  # a library older than that question
    assert find_links() == []


def test_a_driver_that_does_not_start_leaves_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Nvml, "nvmlInit_v2", lambda self: 9)
    monkeypatch.setattr("ctypes.CDLL", lambda name: Nvml())
    assert visible_gpus() == find_links() == []


@pytest.mark.parametrize("first_out", ["first in", "last in"])
def test_collections_are_off_until_the_last_who_wants_none_has_ended(first_out: str) -> None:
    assert gc.isenabled()
    held = [no_collection(), no_collection()]
    for one in held:
        one.__enter__()
        assert not gc.isenabled()
    first, last = held if first_out == "first in" else held[::-1]
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    last.__exit__(None, None, None)
    assert gc.isenabled()


def test_collections_that_were_off_stay_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
