"""What the step asks of a drafter: propose a block, and take in what was committed.

Two exist, `dspark` and `nextn`. A drafter's own memory lives in the SequenceState like all state; it follows the
kept tokens whether or not a request wants drafts, so speculation can be switched between requests.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ling_kernels.ops import Ops, Proposal
from ling_local.engine.model import Hidden
from ling_local.engine.state import SequenceState
from ling_local.engine.weights import Weights


class Drafter(Protocol):
    """taps: target layers whose output it wants; block: most drafts it can propose at once."""

    @property
    def name(self) -> str: ...

    @property
    def block(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def attach(self, state: SequenceState, weights: Weights) -> None:
        """Give the state the tensors that this drafter keeps there."""

    def absorb(
        self,
        ops: Ops,
        weights: Weights,
        state: SequenceState,
        hidden: Hidden,
        following: Tensor,
        positions: Tensor,
        rows: int | None,
    ) -> None:
        """Take in rows that the target has run at `positions` [R]; following [R]: the token after each.

        rows None: a prefill chunk, all of it. In a window the caller may keep only the first few rows: those
        after them lie past the sequence's end and are written again before they are read.
        """

    def settle(self, state: SequenceState, count: Tensor) -> None:
        """After a window: only its first `count` [] rows were kept."""

    def propose(self, ops: Ops, weights: Weights, state: SequenceState, num: int) -> Proposal:
        """`num` drafts for the tokens after state.anchor, at most `block`."""
        ...
