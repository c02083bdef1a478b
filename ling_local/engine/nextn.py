"""NEXTN: the target's own MTP layer as a drafter (ling3-model.md section 5)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ling_kernels.ops import ROW_TILE, Ops, Proposal
from ling_local.engine.model import Hidden, feed_forward
from ling_local.engine.state import SequenceState, rows_by_position
from ling_local.engine.weights import Weights

MAX_DEPTH = 8


def mtp_forward(
    ops: Ops,
    weights: Weights,
    state: SequenceState,
    hidden: Tensor,
    following: Tensor,
    positions: Tensor,
    rows: int | None,
) -> Tensor:
    """The MTP layer over rows: hidden [R, D] after the main norm (or an earlier pass), following [R] the token after
    each, positions [R]. Writes its latent rows. -> [R, D] after the layer's own final norm, the head's input.
    """
    mtp, eps = weights.mtp, weights.config.rms_norm_eps
    embedded = ops.embed(following, weights.embedding)
    _, first = ops.exchange_norm(None, embedded, mtp.embedding_norm, eps, rows)
    _, second = ops.exchange_norm(None, hidden, mtp.hidden_norm, eps, rows)
    x = ops.linear(torch.cat([first, second], dim=-1), mtp.eh_proj, rows)
    layer = mtp.layer
    x, h = ops.exchange_norm(None, x, layer.attention_norm, eps, rows)
    proj = ops.linear(h, layer.attention.in_proj, rows)
    live = positions.shape[0] if rows is None else rows
    o = ops.mla(proj, state.mtp_latent, state.rope, positions, layer.attention, live, state.extent)
    partial = ops.linear_partial(o, layer.attention.out_proj, rows)
    x, partial = feed_forward(ops, partial, x, layer, eps, rows)
    _, last = ops.exchange_norm(partial, x, mtp.norm, eps, rows)
    return last


@dataclass(frozen=True, slots=True)
class Nextn:
    """Drafts one token from the layer's row at the last kept position, and more by feeding it its own output."""

    block: int = 1

    @property
    def name(self) -> str:
        return "mtp"

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def attach(self, state: SequenceState, weights: Weights) -> None:
        state.mtp_latent = rows_by_position(state.latent.shape[1:], state.latent.dtype, state.latent.device)
        # every row of the last window: which of them counts is known only after the verdict
        state.mtp_rows = torch.zeros(
            ROW_TILE, weights.embedding.shape[1], dtype=weights.dtype, device=state.latent.device
        )
        state.mtp_hidden = torch.zeros_like(state.mtp_rows[:1])

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
        last = mtp_forward(ops, weights, state, hidden.last, following, positions, rows)
        if rows is None:
            state.mtp_hidden.copy_(last[-1:])
        else:
            state.mtp_rows.copy_(last)

    def settle(self, state: SequenceState, count: Tensor) -> None:
        kept = state.mtp_rows.index_select(0, (count - 1).clamp(min=0).view(1))
        state.mtp_hidden.copy_(torch.where(count > 0, kept, state.mtp_hidden))

    def propose(self, ops: Ops, weights: Weights, state: SequenceState, num: int) -> Proposal:
        tile = torch.arange(ROW_TILE, device=state.latent.device)
        hidden, drafts, confidence = state.mtp_hidden, [], []
        for depth in range(num):
            logits = ops.head(hidden, weights.lm_head, 1)
            position = (state.length + depth).view(1)
            pick = ops.pick(logits, position, state.sampling)
            drafts.append(pick.drafts)
            confidence.append(pick.confidence)
            if depth + 1 < num:
                ids = torch.nn.functional.pad(pick.drafts, (0, ROW_TILE - 1))
                rows = torch.nn.functional.pad(hidden, (0, 0, 0, ROW_TILE - 1))
                hidden = mtp_forward(ops, weights, state, rows, ids, position + tile, 1)[:1]
        return Proposal(torch.cat(drafts), torch.cat(confidence))
