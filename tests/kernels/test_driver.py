"""What reaches the driver when a kernel is launched: the library's own types, with its calls recorded."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as bindings

from ling_kernels import KernelError
from ling_kernels.cuda import driver as driving
from ling_kernels.cuda.driver import Device, Int64, Properties

OK = bindings.CUresult.CUDA_SUCCESS
KERNELS = {"linear_8": 11, "embed": 12}


class Recorder:
    """The driver's module, with the calls that need a GPU answered here."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, Any, Any]] = []
        self.shared: list[int] = []
        self.status = OK

    def __getattr__(self, name: str) -> Any:
        return getattr(bindings, name)

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, Any]:
        return OK, bindings.CUmodule(int.from_bytes(image, "little"))

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, Any]:
        if name.decode() not in KERNELS or int(module) != 2:
            return bindings.CUresult.CUDA_ERROR_NOT_FOUND, bindings.CUfunction(0)
        return OK, bindings.CUfunction(KERNELS[name.decode()])

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: int) -> tuple[Any]:
        self.launches.append((config, int(function), arguments))
        return (self.status,)

    def cuFuncSetAttribute(self, function: Any, attribute: Any, value: int) -> tuple[Any]:
        self.shared.append(value)
        return (OK,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function: Any, block: int, shared: int) -> tuple[Any, int]:
        return OK, 4

    def cuGetErrorString(self, status: Any) -> tuple[Any, bytes]:
        return OK, b"too many resources requested for launch"


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(driving, "_driver", lambda: recorder)
    monkeypatch.setattr(driving, "build", lambda arch, cache, progress: {"a": b"\x01", "b": b"\x02"})
    monkeypatch.setattr(driving, "read_properties", lambda index: Properties("sm_90", 132, 227 * 1024))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return recorder


@pytest.mark.parametrize("pdl", [True, False])
def test_a_launch_carries_stream_shape_arguments_and_attribute(recorder: Recorder, pdl: bool) -> None:
    device, tensor = Device(pdl=pdl), torch.zeros(4)
    device.launch("linear_8", (3, 2), 128, [tensor, None, 5, 0.5, Int64(1 << 40)], shared=2048)
    config, function, (values, kinds) = recorder.launches[0]
    assert function == KERNELS["linear_8"]
    assert (config.gridDimX, config.gridDimY, config.gridDimZ) == (3, 2, 1)
    assert (config.blockDimX, config.blockDimY, config.blockDimZ) == (128, 1, 1)
    assert (config.sharedMemBytes, int(config.hStream)) == (2048, 77)
    assert values == (tensor.data_ptr(), 0, 5, 0.5, 1 << 40)
    assert len(kinds) == 5
    assert config.numAttrs == int(pdl)
    if pdl:
        kind = bindings.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert config.attrs[0].id == kind
        assert config.attrs[0].value.programmaticStreamSerializationAllowed == 1
    assert not recorder.shared


def test_much_shared_memory_is_asked_for_once(recorder: Recorder) -> None:
    device = Device(cache=Path("unused"))
    for _ in range(2):
        device.launch("embed", 1, 32, [], shared=100 * 1024)
    assert recorder.shared == [100 * 1024]
    with pytest.raises(KernelError, match="embed needs 262144 bytes of shared memory"):
        device.launch("embed", 1, 32, [], shared=256 * 1024)


def test_a_kernel_keeps_the_most_shared_memory_that_it_was_granted(recorder: Recorder) -> None:
    device = Device()
    for shared in (100 * 1024, 60 * 1024, 120 * 1024, 100 * 1024):
        device.launch("embed", 1, 32, [], shared=shared)
    assert recorder.shared == [100 * 1024, 120 * 1024]


def test_residency_counts_the_whole_gpu(recorder: Recorder) -> None:
    assert Device().resident("linear_8", 128, 1024) == 4 * 132


def test_what_the_driver_refuses_is_one_sentence(recorder: Recorder) -> None:
    device = Device()
    with pytest.raises(KernelError, match="no kernel named nothing"):
        device.launch("nothing", 1, 32, [])
    recorder.status = bindings.CUresult.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES
    with pytest.raises(KernelError, match="kernel embed was not launched: too many resources"):
        device.launch("embed", 1, 32, [])
