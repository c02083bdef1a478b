"""Modules on the device, and launches on torch's current stream with the attributes that torch does not set."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ling_kernels.cuda.compile import ProgressFn, build
from ling_kernels.ops import KernelError


@dataclass(frozen=True, slots=True)
class Int64:
    """A launch argument of 64 bits; a plain int has 32."""

    value: int


Argument = Tensor | Int64 | int | float | None

# How much of a multiprocessor's memory some kernels want as shared memory, the rest as L1, in percent. The others take
# the split that they find, and while launches overlap, none changes it: a multiprocessor has to be empty for that. So
# attention of several rows, which leaves 28 KB of L1, is followed by one that wants another: gate_up reads more than
# that of activations again and again (some multiprocessors took twice the time, and everything waits for the last).
SHARED_PERCENT = {"mla_merge": 25}


@dataclass(frozen=True, slots=True)
class Properties:
    """What tile choices depend on. shared_bytes: the most that one block may ask for."""

    arch: str
    num_sms: int
    shared_bytes: int


class Device:
    """The kernels of one GPU, loaded; `launch` is the only way in. pdl: programmatic dependent launch, on by default.

    Raises KernelError where the compiler or the driver does not work.
    """

    def __init__(
        self, index: int = 0, cache: Path | None = None, progress: ProgressFn | None = None, pdl: bool = True
    ) -> None:
        self.index = index
        self.properties = read_properties(index)
        # before sm_90 there is no such launch, and the device half compiles to nothing
        self.pdl = pdl and int(self.properties.arch.removeprefix("sm_")) >= 90
        self._driver = _driver()
        torch.cuda.current_stream(index)  # makes torch's context, which the modules are loaded into
        with torch.cuda.device(index):
            torch.cuda.synchronize()
            cubins = build(self.properties.arch, cache, progress)
            self._modules = [self._load(unit, cubin) for unit, cubin in cubins.items()]
        self._functions: dict[str, object] = {}
        self._granted: dict[str, int] = {}
        self._resident: dict[tuple[str, int, int], int] = {}
        self._attributes = [self._serialization()]

    def launch(
        self, name: str, grid: int | Sequence[int], block: int, args: Sequence[Argument], shared: int = 0
    ) -> None:
        """Launch kernel `name` on torch's current stream: grid up to three numbers, `block` threads, `shared` bytes.

        Nothing is checked about args but their kinds: a Tensor is passed as its address, None as a null pointer.
        """
        driver = self._driver
        dims = (grid,) if isinstance(grid, int) else tuple(grid)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*dims, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
        config.sharedMemBytes = shared
        config.hStream = torch.cuda.current_stream(self.index).cuda_stream
        config.attrs = self._attributes if self.pdl else []
        config.numAttrs = len(config.attrs)
        (status,) = driver.cuLaunchKernelEx(config, self._function(name, shared), packed(args), 0)
        self._check(status, f"kernel {name} was not launched")

    @property
    def driver(self):
        """The driver's functions."""
        return self._driver

    def check(self, status: object, what: str) -> None:
        """KernelError where the driver did not do what it was asked for."""
        self._check(status, what)

    def resident(self, name: str, block: int, shared: int = 0) -> int:
        """How many blocks of kernel `name` the whole GPU holds at once; at least one a multiprocessor is assumed."""
        key = (name, block, shared)
        if key not in self._resident:
            occupancy = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
            status, blocks = occupancy(self._function(name, shared), block, shared)
            self._check(status, f"kernel {name} cannot be placed")
            self._resident[key] = max(blocks, 1) * self.properties.num_sms
        return self._resident[key]

    def _function(self, name: str, shared: int) -> object:
        if name not in self._functions:
            self._functions[name] = self._find(name)
            if name in SHARED_PERCENT:
                self._set(name, "PREFERRED_SHARED_MEMORY_CARVEOUT", SHARED_PERCENT[name])
        if shared > self._granted.get(name, 48 * 1024):  # above this a kernel must ask, once for the most it will have
            if shared > self.properties.shared_bytes:
                limit = self.properties.shared_bytes
                raise KernelError(f"kernel {name} needs {shared} bytes of shared memory, this GPU gives {limit}")
            self._set(name, "MAX_DYNAMIC_SHARED_SIZE_BYTES", shared)
            self._granted[name] = shared
        return self._functions[name]

    def _set(self, name: str, attribute: str, value: int) -> None:
        kind = getattr(self._driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{attribute}")
        (status,) = self._driver.cuFuncSetAttribute(self._functions[name], kind, value)
        self._check(status, f"kernel {name} cannot have {value} as {attribute.lower()}")

    def _find(self, name: str) -> object:
        for module in self._modules:
            status, function = self._driver.cuModuleGetFunction(module, name.encode())
            if status == self._driver.CUresult.CUDA_SUCCESS:
                return function
        raise KernelError(f"there is no kernel named {name}")

    def _load(self, unit: str, cubin: bytes) -> object:
        status, module = self._driver.cuModuleLoadData(cubin)
        self._check(status, f"the driver refused the compiled kernels of {unit}.cu")
        return module

    def _serialization(self) -> object:
        driver = self._driver
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        return attribute

    def _check(self, status: object, what: str) -> None:
        if status != self._driver.CUresult.CUDA_SUCCESS:
            _, text = self._driver.cuGetErrorString(status)
            raise KernelError(f"{what}: {text.decode() if text else status}")


def packed(args: Sequence[Argument]) -> tuple[tuple[int | float, ...], tuple[type, ...]]:
    """Values and C types of launch arguments."""
    pairs = [_pair(arg) for arg in args]
    return tuple(value for value, _ in pairs), tuple(kind for _, kind in pairs)


def _pair(arg: Argument) -> tuple[int | float, type]:
    if arg is None:
        return 0, ctypes.c_void_p
    if isinstance(arg, Tensor):
        return arg.data_ptr(), ctypes.c_void_p
    if isinstance(arg, Int64):
        return arg.value, ctypes.c_longlong
    if isinstance(arg, bool):
        return int(arg), ctypes.c_int
    return arg, ctypes.c_int if isinstance(arg, int) else ctypes.c_float


def read_properties(index: int) -> Properties:
    """What this GPU offers. KernelError where there is none, or one older than sm_80."""
    try:
        found = torch.cuda.get_device_properties(index)
    except (AssertionError, RuntimeError) as error:
        raise KernelError(f"no usable CUDA device: {str(error).strip().splitlines()[0]}") from None
    if found.major < 8:
        raise KernelError(f"{found.name} is sm_{found.major}{found.minor}: the kernels need sm_80 or newer")
    shared = getattr(found, "shared_memory_per_block_optin", 99 * 1024)
    arch = f"sm_{found.major}{found.minor}"
    return Properties(arch, found.multi_processor_count, shared)


def _driver():
    try:
        from cuda.bindings import driver

        driver.cuInit(0)
    except Exception as error:  # a missing package or library: each version raises its own kind
        text = str(error).strip().splitlines()
        raise KernelError(
            f"the CUDA driver (package cuda-bindings) cannot be used: {text[0] if text else error!r}"
        ) from None
    return driver
