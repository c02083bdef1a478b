"""What running on a GPU adds for the host: opening its kernels, whether things fit, and a ring that is read late."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import ling_kernels
from ling_kernels.ops import KernelError, Ops
from ling_local.engine.drafter import Drafter
from ling_local.engine.protocol import Progress, ProgressFn
from ling_local.engine.state import RING_SLOTS, SequenceState
from ling_local.engine.weights import Weights
from ling_local.errors import OutOfMemory, UsageError
from ling_local.paths import cache_dir

GIB = 2**30
WORKING_BYTES = 2 * GIB  # scratch, graphs and the activations of a prefill chunk
LEAST_CONTEXT = 1024
PREFILL_CHUNK = 8192


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """Switches for tests and measurements. run_ahead: steps granted before the oldest is read."""

    allow_untested: bool = False
    capture: bool = True
    pdl: bool = True
    run_ahead: int = 3


def open_gpu_ops(device: str, dtype: str, options: GpuOptions, progress: ProgressFn | None) -> Ops:
    """The kernels of a GPU, compiled or from the cache. Raises UsageError: the CPU path is always there."""

    def report(unit: str, done: int, total: int) -> None:
        if progress:
            progress(Progress(f"compiling GPU kernels ({unit})", done, total))

    try:
        ops = ling_kernels.load(
            device,
            cache=cache_dir() / "kernels",
            progress=report,
            pdl=options.pdl,
            allow_untested=options.allow_untested,
        )
    except KernelError as error:
        raise UsageError(str(error), "use --device cpu") from None
    if dtype != "bfloat16":
        raise UsageError(f"the GPU kernels compute in bfloat16, not {dtype}", "add --dtype bfloat16, or --device cpu")
    return ops


def check_gpu_memory(folder: Path, device: str, needed: int) -> None:
    """OutOfMemory with both numbers if weights of `needed` bytes cannot fit, before a byte is read."""
    free, _ = torch.cuda.mem_get_info(device)
    if needed + WORKING_BYTES > free:
        raise OutOfMemory(
            f"{folder}: the weights need {needed / GIB:.1f} GiB on the GPU, and {WORKING_BYTES / GIB:.0f} GiB to work "
            f"in; {free / GIB:.1f} GiB are free",
            "close what else uses the GPU, use a smaller model, or --device cpu",
        )


def state_bytes(weights: Weights, drafter: Drafter | None, context: int) -> int:
    """Memory of a state for `context` tokens; nothing is allocated."""
    probe = SequenceState(weights.config, context, weights.dtype, "meta", 1)
    if drafter:
        drafter.attach(probe, weights)
    return sum(value.nbytes for value in vars(probe).values() if isinstance(value, Tensor))


def fitting_context(weights: Weights, drafter: Drafter | None, wanted: int, free: int, asked: bool) -> int:
    """Tokens that `free` bytes can hold, `wanted` at most. asked: the person named the number, so it is not cut.

    Raises OutOfMemory.
    """
    least = min(wanted, LEAST_CONTEXT)
    fixed, some = state_bytes(weights, drafter, 0), state_bytes(weights, drafter, LEAST_CONTEXT)
    per_token = (some - fixed) / LEAST_CONTEXT
    fits = int((free - WORKING_BYTES - fixed) / per_token)
    if fits >= wanted:
        return wanted
    if asked or fits < least:
        raise OutOfMemory(
            f"a context of {wanted if asked else least} tokens needs "
            f"{state_bytes(weights, drafter, wanted if asked else least) / GIB:.1f} GiB on the GPU and "
            f"{WORKING_BYTES / GIB:.0f} GiB to work in; {free / GIB:.1f} GiB are free beside the weights",
            f"give --ctx {max(fits, 1)} or less" if fits >= 1 else "close what else uses the GPU, or use --device cpu",
        )
    return fits


class HostRing:
    """The ring's entries in pinned host memory: each is sent when its step is launched and read when it is wanted."""

    def __init__(self, state: SequenceState) -> None:
        self._host = torch.zeros(state.ring.shape, dtype=state.ring.dtype, pin_memory=True)
        self._sent = [torch.cuda.Event() for _ in range(RING_SLOTS)]

    def send(self, ring: Tensor, number: int) -> None:
        """Queue the copy of step `number`'s entry behind the step."""
        slot = number % RING_SLOTS
        self._host[slot].copy_(ring[slot], non_blocking=True)
        self._sent[slot].record()

    def wait(self, number: int) -> list[int]:
        """The entry of step `number`, when it is there."""
        slot = number % RING_SLOTS
        self._sent[slot].synchronize()
        return self._host[slot].tolist()
