"""What running on a GPU adds for the host: opening its kernels, a ring that is read late, and errors as sentences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

import ling_kernels
from ling_kernels.exchange import Board
from ling_kernels.ops import KernelError, Ops
from ling_local.engine.protocol import Progress, ProgressFn
from ling_local.engine.state import RING_SLOTS, SequenceState
from ling_local.errors import EngineError, LingError, OutOfMemory, UsageError
from ling_local.paths import cache_dir

GIB = 2**30
PREFILL_CHUNK = 8192
_NO_MEMORY = ("out of memory", "out_of_memory", "not enough memory", "can't allocate memory")


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Switches for tests and measurements. run_ahead: steps granted before the oldest is read; gate_fp32: routers with
    weights in fp32, where the checkpoint has them so."""

    capture: bool = True
    pdl: bool = True
    run_ahead: int = 3
    gate_fp32: bool = False


def open_gpu_ops(
    device: str, dtype: str, options: GpuOptions, progress: ProgressFn | None, board: Board | None = None
) -> Ops:
    """The kernels of a GPU, compiled or from the cache. Raises UsageError: the CPU path is always there.

    board: what the ranks share, where there are several.
    """

    def report(unit: str, done: int, total: int) -> None:
        if progress:
            progress(Progress(f"compiling GPU kernels ({unit})", done, total, "units"))

    if device.startswith("cuda") and dtype != "bfloat16":
        raise UsageError(f"the GPU kernels compute in bfloat16, not {dtype}", "leave --dtype away, or use --device cpu")
    try:
        return ling_kernels.load(
            device,
            cache=cache_dir() / "kernels",
            progress=report,
            pdl=options.pdl,
            board=board,
            gate_fp32=options.gate_fp32,
        )
    except KernelError as error:
        raise UsageError(str(error), "use --device cpu; `ling doctor` checks torch, driver and GPU") from None


@contextmanager
def errors_in_words(doing: str, device: str) -> Iterator[None]:
    """Memory that runs out inside becomes OutOfMemory, what a kernel refuses an EngineError; others pass.

    doing: what was done, for the message ("to load the model").
    """
    try:
        yield
    except LingError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise _out_of_memory(doing, device) from error
        if isinstance(error, KernelError):
            raise EngineError(str(error), "use --device cpu") from error
        raise


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was short, anywhere in the chain: a capture that fails on it ends with another error on top."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError | KernelError) and any(word in str(error).lower() for word in _NO_MEMORY):
            return True
        error = error.__cause__ or error.__context__
    return False


def _out_of_memory(doing: str, device: str) -> OutOfMemory:
    where = ""
    if device != "cpu":
        try:
            free, total = torch.cuda.mem_get_info(device)
            held = torch.cuda.memory_reserved(device)
            where = f": GPU {device} has {total / GIB:.1f} GiB, {free / GIB:.1f} free and {held / GIB:.1f} held by ling"
            torch.cuda.empty_cache()
        except (RuntimeError, AssertionError):  # nothing can be asked after a hard failure: the sentence must do
            where = f": the memory of GPU {device} is full"
    return OutOfMemory(
        f"there is not enough memory {doing}{where}",
        "give a smaller --ctx, close what else uses the memory, or use a smaller model"
        + (" or --device cpu" if where else ""),
    )


class HostRing:
    """The ring's entries in pinned host memory: each is sent when its step is launched and read when it is wanted.

    A step is timed by the GPU's own clock between two events around it.
    """

    def __init__(self, state: SequenceState) -> None:
        self._host = torch.zeros(state.ring.shape, dtype=state.ring.dtype, pin_memory=True)
        self._begun, self._sent = ([torch.cuda.Event(enable_timing=True) for _ in range(RING_SLOTS)] for _ in range(2))

    def begin(self, number: int) -> None:
        """Step `number` is launched next."""
        self._begun[number % RING_SLOTS].record()

    def send(self, ring: Tensor, number: int) -> None:
        """Queue the copy of step `number`'s entry behind the step."""
        slot = number % RING_SLOTS
        self._host[slot].copy_(ring[slot], non_blocking=True)
        self._sent[slot].record()

    def wait(self, number: int) -> tuple[list[int], float]:
        """The entry of step `number` when it is there, and the seconds that the step took on the GPU."""
        slot = number % RING_SLOTS
        self._sent[slot].synchronize()
        return self._host[slot].tolist(), self._begun[slot].elapsed_time(self._sent[slot]) / 1000
