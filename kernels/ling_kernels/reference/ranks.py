"""The ops of one rank among several: each sums or chooses over what all ranks computed.

A rank holds its share of heads, of every expert's width, and of the vocabulary's rows (embedding, head, Markov head);
ids are always those of the whole vocabulary. Sums are taken in fp32 in rank order, so that all ranks hold the same
bits, and every decision after them falls alike without a word between the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ling_kernels.exchange import Exchange
from ling_kernels.ops import DraftParams, Limits, Proposal, Sampling, Verdict
from ling_kernels.reference import ReferenceOps, dense, draft, sample


class RankOps(ReferenceOps):
    """The contracts of `ling_kernels.ops.Ops` for one rank."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def embed(self, ids: Tensor, table: Tensor, lazy: bool = False) -> Tensor:
        first, count = self.exchange.rank * table.shape[0], table.shape[0]
        mine = (ids >= first) & (ids < first + count)
        rows = table.index_select(0, (ids - first).clamp(0, count - 1))
        # of each row one rank's part is not zero: the sum is exact
        return self._sum(torch.where(mine[:, None], rows, torch.zeros_like(rows))).to(table.dtype)

    def draft_embed(self, anchor: Tensor, length: Tensor, table: Tensor, mask: int, num: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(num, device=anchor.device)
        return self.embed(torch.where(places == 0, anchor, mask), table), length + places

    def exchange_norm(
        self,
        partial: Tensor | None,
        x: Tensor,
        weight: Tensor,
        eps: float,
        rows: int | None = None,
        lazy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        return dense.exchange_norm(None if partial is None else self._sum(partial), x, weight, eps, rows)

    def verdict(
        self,
        logits: Tensor,
        drafts: Tensor | None,
        positions: Tensor,
        sampling: Sampling,
        limits: Limits,
        rows: int,
    ) -> Verdict:
        return sample.verdict(self.whole(logits), drafts, positions, sampling, limits, rows)

    def pick(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Proposal:
        return sample.pick(self.whole(logits), positions, sampling)

    def draft_block(
        self, x: Tensor, params: DraftParams, cache: Tensor, rope: Tensor, length: Tensor, extent: int
    ) -> Tensor:
        return draft.block(x, params, cache, rope, length, extent, self._sum)

    def markov_pick(
        self, base: Tensor, h: Tensor, anchor: Tensor, params: DraftParams, positions: Tensor, sampling: Sampling
    ) -> Proposal:
        return draft.pick(base, h, anchor, params, positions, sampling, self.whole)

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [n, V / N] of this rank's rows of the vocabulary to those of all, [n, V]."""
        return self.exchange.gather(logits).transpose(0, 1).flatten(1)

    def _sum(self, partial: Tensor) -> Tensor:
        """Over ranks, in fp32, in rank order."""
        total = torch.zeros(partial.shape, dtype=torch.float32, device=partial.device)
        for part in self.exchange.gather(partial):
            total = total + part.float()
        return total
