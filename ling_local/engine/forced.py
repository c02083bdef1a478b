"""Accept counts by decree, for measurements and tests: a drafter that knows what the target will say.

The drafter inside does its work in full and its drafts are then replaced on the device: the first few by the tokens
that the target is going to choose, the rest by tokens that it is not. So each step drafts, verifies, accepts and
commits at its real cost, and ids and states are those of decoding without drafts, to the bit. The tokens are known
from a run of the same request before it (without drafts); where none is known, acceptance is left to chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ling_kernels.ops import Ops, Proposal
from ling_local.engine.drafter import Drafter
from ling_local.engine.model import Hidden
from ling_local.engine.state import SequenceState
from ling_local.engine.weights import Weights
from ling_local.errors import UsageError


@dataclass(frozen=True, slots=True)
class Forced:
    """A drafter around another. pattern [n] int64 on the device: drafts that are accepted in the first drafted step,
    the second, ..., and from the beginning again."""

    inner: Drafter
    pattern: Tensor

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def block(self) -> int:
        return self.inner.block

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps

    def attach(self, state: SequenceState, weights: Weights) -> None:
        self.inner.attach(state, weights)
        state.truth = torch.zeros(state.latent.shape[1], dtype=torch.int64, device=state.latent.device)

    def learn(self, state: SequenceState, ids: Sequence[int]) -> None:
        """Remember what the target says: ids from position 0 on, all that are known."""
        known = torch.tensor(ids, dtype=torch.int64)[: state.truth.shape[0]]
        state.truth[: known.shape[0]].copy_(known)

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
        self.inner.absorb(ops, weights, state, hidden, following, positions, rows)

    def settle(self, state: SequenceState, count: Tensor) -> None:
        self.inner.settle(state, count)

    def propose(self, ops: Ops, weights: Weights, state: SequenceState, num: int) -> Proposal:
        proposal = self.inner.propose(ops, weights, state, num)
        place = torch.arange(num, device=state.truth.device)
        # the anchor is the token at `length`; a window may reach past the last position that is ever committed
        at = (state.length + 1 + place).clamp(max=state.truth.shape[0] - 1)
        right = state.truth.index_select(0, at)
        wrong = (right + 1) % state.sampling.vocab
        # step 0 verifies no drafts and is the one that makes the first: by now `step` counts it
        turn = ((state.step - 1) % self.pattern.shape[0]).view(1)
        wanted = self.pattern.index_select(0, turn)
        drafts = torch.where(place < wanted, right, wrong)
        return Proposal(drafts, torch.ones_like(proposal.confidence))


def force(drafter: Drafter | None, accept: Sequence[int], device: str) -> Drafter | None:
    """The drafter with forced accept counts, or as it is where none are asked for. Raises UsageError."""
    if not accept:
        return drafter
    if drafter is None:
        raise UsageError("accept counts are forced, but there is no drafter", "use --speculation dspark or mtp")
    if not 0 <= min(accept) <= max(accept) <= drafter.block:
        raise UsageError(
            f"accept counts {', '.join(map(str, accept))}: {drafter.name} makes {drafter.block} drafts a step",
            f"give numbers from 0 to {drafter.block}",
        )
    return Forced(drafter, torch.tensor(list(accept), dtype=torch.int64, device=device))
