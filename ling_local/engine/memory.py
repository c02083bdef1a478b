"""What a model needs and what is free, said before a byte is loaded, and the context that fits on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ling_kernels.ops import ROW_TILE
from ling_kernels.reference.mla import SPLIT
from ling_local.engine.drafter import Drafter
from ling_local.engine.protocol import Progress, ProgressFn
from ling_local.engine.shard import rank_config
from ling_local.engine.state import SequenceState
from ling_local.engine.weights import Weights, host_free_bytes
from ling_local.errors import OutOfMemory

GIB = 2**30
WORKING_BYTES = 2 * GIB  # scratch, graphs and the activations of a prefill chunk
LEAST_CONTEXT = 1024
WORTH_SAYING = 2**30  # bytes: below this nobody wonders


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device: weights (the drafter's apart), the state for `context` tokens, room to work in; and what is
    free before all that. wanted: the context that was asked for, or the model's own."""

    weights: int
    draft: int
    state: int
    working: int
    free: int
    context: int
    wanted: int

    @property
    def needed(self) -> int:
        return self.weights + self.draft + self.state + self.working

    def sentence(self) -> str:
        """One line for a person: what is needed, for what, and what is free."""
        parts = [f"{self.weights / GIB:.1f} weights"]
        if self.draft:
            parts.append(f"{self.draft / GIB:.1f} draft")
        parts.append(f"{self.state / GIB:.1f} for {self.context:,} tokens of context")
        if self.working:
            parts.append(f"{self.working / GIB:.1f} to work in")
        return f"memory: {self.needed / GIB:.1f} GiB needed ({', '.join(parts)}), {self.free / GIB:.1f} GiB free"

    def tell(self, progress: ProgressFn | None) -> None:
        """Say it before the load; that the context was cut is worth a warning."""
        if progress and self.needed >= WORTH_SAYING:
            progress(Progress(self.sentence(), say="note"))
        if progress and self.context < self.wanted:
            text = f"the context is {self.context:,} tokens of the model's {self.wanted:,}: that is what the GPU holds"
            progress(Progress(text, say="warning"))


def plan_gpu(name: str, ghost: Weights, drafter: Drafter | None, wanted: int, free: int, asked: bool) -> MemoryPlan:
    """Fit a model into `free` bytes of a GPU. ghost and drafter are on the meta device: nothing is allocated.

    wanted: tokens of context; asked: the person named that number, so it is not cut. Raises OutOfMemory.
    """
    weights, draft = bytes_of(ghost), bytes_of(drafter)
    if weights + draft + WORKING_BYTES > free:
        with_draft = f" and {draft / GIB:.1f} GiB for the draft" if draft else ""
        raise OutOfMemory(
            f"{name}: the weights need {weights / GIB:.1f} GiB on the GPU{with_draft}, and "
            f"{WORKING_BYTES / GIB:.0f} GiB to work in; {free / GIB:.1f} GiB are free",
            "close what else uses the GPU, use a smaller model, or --device cpu",
        )
    context = fitting_context(ghost, drafter, wanted, free - weights - draft, asked)
    return MemoryPlan(weights, draft, state_bytes(ghost, drafter, context), WORKING_BYTES, free, context, wanted)


def plan_cpu(ghost: Weights, drafter: Drafter | None, context: int, free: int) -> MemoryPlan:
    """The same for host memory, where a state's pages are taken as they are written: nothing is cut."""
    state = state_bytes(ghost, drafter, context)
    return MemoryPlan(bytes_of(ghost), bytes_of(drafter), state, 0, free, context, context)


def bytes_of(holder: object) -> int:
    """Bytes of all different tensors that weights or a drafter hold, at any depth."""
    seen: dict[tuple[int, int], int] = {}
    _collect(holder, seen)
    return sum(seen.values())


def _collect(holder: object, seen: dict[tuple[int, int], int]) -> None:
    if isinstance(holder, Tensor):
        storage = holder.untyped_storage()
        seen[(storage._cdata, storage.nbytes())] = storage.nbytes()  # views of one tensor count once
    elif isinstance(holder, tuple | list):
        for item in holder:
            _collect(item, seen)
    elif hasattr(holder, "__dataclass_fields__"):
        for name in holder.__dataclass_fields__:
            _collect(getattr(holder, name), seen)


def state_bytes(weights: Weights, drafter: Drafter | None, context: int) -> int:
    """Memory of a state for `context` tokens, from two small ones on the CPU: it grows by rows."""
    small, larger = (_probe(weights, drafter, rows - ROW_TILE) for rows in (SPLIT, 2 * SPLIT))
    return small + (larger - small) * (_splits(context) - 1)


def _splits(context: int) -> int:
    """Splits of rows by position that a state for `context` tokens has."""
    return -(-(context + ROW_TILE) // SPLIT)


def _probe(weights: Weights, drafter: Drafter | None, context: int) -> int:
    # not on the meta device: it computes the rope table by way of torch's compiler, whose import takes a second
    config = rank_config(weights.config, weights.shard.size)
    probe = SequenceState(config, context, weights.dtype, "cpu", 1)
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
    # a state has whole splits of rows, and one window past its end
    fits = int((free - WORKING_BYTES - fixed) / per_token) // SPLIT * SPLIT - ROW_TILE
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


def free_bytes(device: str) -> int:
    """What can be had there now: of a GPU, or of host memory (0 where nobody can tell)."""
    return host_free_bytes() if device == "cpu" else torch.cuda.mem_get_info(device)[0]
