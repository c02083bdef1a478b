"""The host's side of a GPU, without one: captured steps with a stand-in for graphs, and whether a context fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import write_checkpoint
from ling_local.engine.capture import CapturedStep
from ling_local.engine.gpu import GpuOptions, HostRing, open_gpu_ops
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import Progress
from ling_local.engine.state import SequenceState
from ling_local.engine.step import step
from ling_local.errors import UsageError
from ling_local.types import SamplingParams, TokenRequest
from parity import assert_bits

PROMPT = (5, 9, 2, 7)


@pytest.mark.parametrize("options", [GpuOptions(), GpuOptions(pdl=False), GpuOptions(gate_fp32=True)])
def test_the_kernels_are_opened_with_the_options(monkeypatch: pytest.MonkeyPatch, options: GpuOptions) -> None:
    asked = {}
    monkeypatch.setattr("ling_kernels.load", lambda device, **given: asked.update(given, device=device))
    open_gpu_ops("cuda:1", "bfloat16", options, None)
    assert (asked["device"], asked["pdl"], asked["gate_fp32"]) == ("cuda:1", options.pdl, options.gate_fp32)


class FakeGraph:
    """Replays by running again what was run while it was captured."""

    def __init__(self) -> None:
        self.run: Callable[[], None] | None = None

    def replay(self) -> None:
        self.run()


class FakeCuda:
    """torch.cuda for CapturedStep: a capture leaves no trace in the state, as a real one computes nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: Callable[[], None] | None = None
        self.captures = 0
        self.state: SequenceState | None = None
        stream = type("Stream", (), {"wait_stream": lambda self, other: None})
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream())
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    def step(self, *args) -> None:
        self.last = lambda: step(*args)
        step(*args)

    @contextmanager
    def graph(self, graph: FakeGraph, pool: object, capture_error_mode: str = "") -> Iterator[None]:
        assert pool == (0, 1)
        tensors = [value for value in vars(self.state).values() if isinstance(value, Tensor)]
        kept = [value.clone() for value in tensors]
        yield
        for value, before in zip(tensors, kept, strict=True):
            value.copy_(before)
        graph.run = self.last
        self.captures += 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", seed=8)


def texts(engine: NativeEngine, params: SamplingParams) -> list[int]:
    request = TokenRequest(PROMPT, sampling=params, max_tokens=12)
    return [token for result in engine.generate(request) for token in result.ids]


def test_a_captured_step_gives_the_text_and_state_of_the_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, captured = NativeEngine.load(folder, draft="mtp"), NativeEngine.load(folder, draft="mtp")
    fake = FakeCuda(monkeypatch)
    fake.state = captured._state
    captured.step = CapturedStep(fake.step)
    for params in (SamplingParams(temperature=0.0), SamplingParams(1.0, 20, 0.9, 4), SamplingParams(temperature=0.0)):
        assert texts(captured, params) == texts(plain, params)
        for name in ("recurrent", "conv", "length", "anchor", "mtp_hidden"):
            assert_bits(getattr(captured._state, name), getattr(plain._state, name), name)
    first = fake.captures
    assert 2 <= first <= 8  # greedy and sampled, with and without drafts, each width once
    texts(captured, SamplingParams(temperature=0.0))
    assert fake.captures <= first + 2


def test_another_state_gets_graphs_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NativeEngine.load(folder)
    fake = FakeCuda(monkeypatch)
    captured = CapturedStep(fake.step)
    for state in (engine._state, engine.new_state(32), engine._state):
        fake.state = state
        with torch.inference_mode():
            captured(engine.ops, engine.weights, state, None, 1, 0)
            captured(engine.ops, engine.weights, state, None, 1, 0)
    assert fake.captures == 3


@pytest.mark.parametrize("draft", ["off", "mtp"])
def test_graphs_captured_at_the_load_leave_a_new_state(
    folder: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, captured = NativeEngine.load(folder, draft=draft), NativeEngine.load(folder, draft=draft)
    fake = FakeCuda(monkeypatch)
    fake.state = captured._state
    captured.step = CapturedStep(fake.step)
    seen: list[Progress] = []
    captured.capture_steps(seen.append)
    assert fake.captures == (6 if draft == "mtp" else 2)  # greedy and sampled; with drafts three kinds of step
    assert [(p.done, p.total) for p in seen] == [(n, fake.captures) for n in range(fake.captures)]
    for name in ("recurrent", "conv", "length", "done", "ring"):
        assert_bits(getattr(captured._state, name).float(), getattr(plain._state, name).float(), name)
    params = SamplingParams(temperature=0.0)
    assert texts(captured, params) == texts(plain, params)
    assert fake.captures <= (8 if draft == "mtp" else 2)


def test_a_ring_entry_comes_with_the_time_of_its_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))

    class FakeEvent:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            self.at = 0

        def record(self) -> None:
            self.at = next(clock)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: FakeEvent) -> float:
            return 2.5 * (later.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    engine = NativeEngine.load(folder)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, pin_memory=False, **more: zeros(*args, **more))
    engine._host_ring = HostRing(engine._state)
    engine.run_ahead = 3
    steps = list(engine.generate(TokenRequest(PROMPT, max_tokens=6)))
    assert [i for step in steps for i in step.ids] == texts(NativeEngine.load(folder), SamplingParams())[:6]
    assert {step.gpu_s for step in steps} == {0.0025}


def test_without_a_gpu_one_message_offers_the_cpu(folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageError, match=r"CUDA|GPU") as caught:
        NativeEngine.load(folder, "cuda", "bfloat16")
    assert "use --device cpu" in caught.value.hint
    assert "\n" not in caught.value.message


def test_the_wrong_dtype_is_said_before_kernels_are_compiled(folder: Path) -> None:
    with pytest.raises(UsageError, match="bfloat16, not float32"):
        NativeEngine.load(folder, "cuda", "float32")
