"""DSpark: a block drafter whose memory is the target's tapped hidden states (dspark.md sections 0 to 6)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ling_kernels.ops import DraftParams, Ops, Proposal
from ling_kernels.reference.mla import rope_table
from ling_local.engine.config import DraftConfig
from ling_local.engine.model import Hidden
from ling_local.engine.state import SequenceState, rows_by_position
from ling_local.engine.weights import Weights


@dataclass(frozen=True, slots=True)
class DSpark:
    """A loaded draft for one target."""

    config: DraftConfig
    params: DraftParams
    block: int

    @property
    def name(self) -> str:
        return "dspark"

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layers

    def limited(self, block: int) -> DSpark:
        """The same draft, asked for fewer tokens."""
        return replace(self, block=block)

    def attach(self, state: SequenceState, weights: Weights) -> None:
        config, rows = self.config, state.latent.shape[1]
        shape = (config.num_layers, 2, rows, self.params.num_kv_heads, config.head_dim)
        state.draft_context = rows_by_position(shape, weights.dtype, state.latent.device)
        state.draft_rope = rope_table(rows, config.rope_dim, config.rope_theta, state.latent.device)

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
        taps = torch.cat(hidden.taps, dim=-1)
        live = positions.shape[0] if rows is None else rows
        ops.draft_context(taps, self.params, state.draft_context, state.draft_rope, positions, live)

    def settle(self, state: SequenceState, count: Tensor) -> None:
        """Nothing to do: context rows past the kept ones are never visible."""

    def propose(self, ops: Ops, weights: Weights, state: SequenceState, num: int) -> Proposal:
        params = self.params
        first = 0 if params.from_anchor else 1
        # always the trained layout: fewer masks would change every row (dspark.md section 13)
        rows = params.block_size + first
        x, positions = ops.draft_embed(state.anchor, state.length, weights.embedding, params.mask_id, rows)
        h = ops.draft_block(x, params, state.draft_context, state.draft_rope, state.length, state.extent)
        h = h[first : first + num]
        base = ops.head(h, weights.lm_head, num)
        return ops.markov_pick(base, h, state.anchor, params, positions[:num], state.sampling)
