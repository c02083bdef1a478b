"""SequenceState: everything that changes while a sequence grows, in tensors that never move.

length tokens have been through the model: recurrent states and conv history stand after token length-1, latent rows
0..length-1 are valid. anchor is the next known token, which has not been through the model yet (dspark.md section 8).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ling_kernels.ops import MAX_STOP_IDS, RING_HEADER, ROW_TILE, Limits, Ops, Proposal, Sampling, Verdict
from ling_kernels.reference.mla import SPLIT, rope_table
from ling_local.engine.config import ModelConfig
from ling_local.types import SamplingParams

RING_SLOTS = 8  # more than the steps that are ever granted ahead
ALIGNMENT = 64  # bytes, as torch's own memory: a product's bits may depend on it


def is_greedy(params: SamplingParams) -> bool:
    """No draw is needed: a mode that is fixed for a request, and for a captured graph."""
    return params.temperature == 0 or params.top_k == 1


def rows_by_position(shape: tuple[int, ...], dtype: torch.dtype, device: str | torch.device) -> Tensor:
    """Zeros for as many positions as the context has. On a CPU each page is taken when it is first written: torch would
    write all of them at once, gigabytes for a long context."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8))
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).view(shape)


class Window(NamedTuple):
    """One verify step's tokens: ids, positions [ROW_TILE] int64, the first `rows` of them live; drafts [rows-1]."""

    ids: Tensor
    positions: Tensor
    drafts: Tensor | None
    rows: int


class Snapshot(NamedTuple):
    """What a prefix leaves besides rows by position: the prefix itself, and copies of what has no positions."""

    ids: list[int]
    recurrent: Tensor
    conv: Tensor
    mtp_hidden: Tensor | None


class SequenceState:
    """State of the one sequence on one rank.

    recurrent [kda layers, H, head, head] fp32 as [value, key]; conv [kda layers, 3, 3P]; latent [mla layers, C, L+r];
    rope [C, r] fp32; remaining, step [] int64; done [] bool; stop_ids [MAX_STOP_IDS]; ring [RING_SLOTS, RING_HEADER +
    2 * ROW_TILE] int64; sampling. extent: host bound of the positions in use, a multiple of the attention's split; how
    large it is changes time, never bits. touched: the largest that it was.

    ids, positions [ROW_TILE] int64 are the next window's rows, so that nothing is launched to make it. length [],
    anchor [] and drafts [ROW_TILE - 1] are views of them: positions are set by `stand_at` and `advance` only.

    A drafter adds its own: draft_context [layers, 2, C, Hkv, head] and draft_rope [C, dim] (DSpark), mtp_latent
    [C, L+r], mtp_rows [ROW_TILE, D] and mtp_hidden [1, D] (NEXTN), truth [C] int64 (forced accepts).
    """

    draft_context: Tensor | None = None
    draft_rope: Tensor | None = None
    mtp_latent: Tensor | None = None
    mtp_rows: Tensor | None = None
    mtp_hidden: Tensor | None = None
    truth: Tensor | None = None

    def __init__(self, config: ModelConfig, context: int, dtype: torch.dtype, device: str, vocab: int) -> None:
        heads, head = config.num_heads, config.head_dim
        # one window may reach past the last position that is ever committed
        rows = -(-(context + ROW_TILE) // SPLIT) * SPLIT
        num_kda = len(config.kda_layers)
        self.context = context
        self.recurrent = torch.zeros(num_kda, heads, head, head, dtype=torch.float32, device=device)
        self.conv = torch.zeros(num_kda, 3, 3 * heads * head, dtype=dtype, device=device)
        self.latent = rows_by_position((len(config.mla_layers), rows, config.latent_dim), dtype, device)
        self.rope = rope_table(rows, config.qk_rope_head_dim, config.rope_theta, device)
        self.ids = torch.zeros(ROW_TILE, dtype=torch.int64, device=device)
        self.positions = torch.arange(ROW_TILE, device=device)
        self.length, self.anchor, self.drafts = self.positions[0], self.ids[0], self.ids[1:]
        self.remaining, self.step = torch.zeros(2, dtype=torch.int64, device=device)
        self.done = torch.ones((), dtype=torch.bool, device=device)
        self.stop_ids = torch.full((MAX_STOP_IDS,), -1, dtype=torch.int64, device=device)
        self.ring = torch.zeros(RING_SLOTS, RING_HEADER + 2 * ROW_TILE, dtype=torch.int64, device=device)
        words = torch.zeros(2, dtype=torch.int64, device=device)
        reals = torch.ones(2, dtype=torch.float32, device=device)
        self.sampling = Sampling(True, reals[0], words[0], reals[1], words[1], vocab)
        self.extent = self.touched = SPLIT

    @property
    def limits(self) -> Limits:
        return Limits(self.remaining, self.stop_ids, self.done, self.step)

    def reserve(self, length: int) -> None:
        """Say on the host that positions up to `length` + ROW_TILE may be in use from now on."""
        self.extent = min(-(-(length + ROW_TILE) // SPLIT) * SPLIT, self.latent.shape[1])
        self.touched = max(self.touched, self.extent)

    def stand_at(self, length: int) -> None:
        """Say that `length` tokens have been through the model."""
        torch.arange(length, length + ROW_TILE, out=self.positions)

    def begin(self, length: int, anchor: int, remaining: int, stop_ids: list[int], params: SamplingParams) -> None:
        """Set the device words for a request. The host wrote `length` tokens by prefill; sampling is its mode."""
        self.stand_at(length)
        self.anchor.fill_(anchor)
        self.remaining.fill_(remaining)
        self.step.zero_()
        self.done.fill_(False)
        padded = stop_ids + [-1] * (MAX_STOP_IDS - len(stop_ids))
        self.stop_ids.copy_(torch.tensor(padded, dtype=torch.int64))
        self.sampling.temperature.fill_(params.temperature)
        self.sampling.top_k.fill_(min(params.top_k, self.sampling.vocab))  # more than all is all, and fits 64 bits
        self.sampling.top_p.fill_(params.top_p)
        self.sampling.seed.fill_(params.seed)
        self.sampling = self.sampling._replace(greedy=is_greedy(params))

    def window(self, width: int) -> Window:
        """The anchor and the first width - 1 drafts as rows of a tile. The rows past them are never looked at."""
        return Window(self.ids, self.positions, self.drafts[: width - 1] if width > 1 else None, width)

    def expect(self, ops: Ops, proposal: Proposal) -> None:
        """Keep what the next window verifies; its confidences go into the last step's ring entry. Device only."""
        ops.expect(proposal, self.drafts, self.ring, self.step)

    def advance(self, ops: Ops, verdict: Verdict) -> None:
        """Move the words past what a step committed and write its ring entry. Device only."""
        ops.advance(verdict, self.ring, self.positions, self.anchor, self.limits)

    def clear(self) -> None:
        """As new: nothing of any earlier sequence is left, not even rubbish past its end."""
        for tensor in (self.recurrent, self.conv, self.ring, self.mtp_rows, self.mtp_hidden):
            if tensor is not None:
                tensor.zero_()
        for rows, dim in ((self.latent, 1), (self.mtp_latent, 0), (self.draft_context, 2)):
            if rows is not None:
                rows.narrow(dim, 0, self.touched).zero_()
        self.stand_at(0)
        self.done.fill_(True)

    def rewind(self) -> None:
        """Before the first token. Rows by position need no clearing: they are written before they are read."""
        self.recurrent.zero_()
        self.conv.zero_()
        if self.mtp_hidden is not None:
            self.mtp_hidden.zero_()

    def snapshot(self, ids: list[int]) -> Snapshot:
        hidden = None if self.mtp_hidden is None else self.mtp_hidden.clone()
        return Snapshot(ids, self.recurrent.clone(), self.conv.clone(), hidden)

    def restore(self, snapshot: Snapshot) -> None:
        self.recurrent.copy_(snapshot.recurrent)
        self.conv.copy_(snapshot.conv)
        if self.mtp_hidden is not None:
            self.mtp_hidden.copy_(snapshot.mtp_hidden)
