"""The ops of one GPU among several: what each rank computed is summed, or chosen from, on all of them (exchange.cuh).

Greedy rows exchange one candidate a rank. Drawn rows exchange their logits: top-k and top-p need the whole row, a
distributed selection needs six rounds of histograms of 16 KB a row, and the logits of nine rows are 2.8 MB a rank at
two ranks, some 10 us over NVLink, once a step. Afterwards every rank draws by itself from the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ling_kernels.cuda import CudaOps
from ling_kernels.cuda.dense import parts_of
from ling_kernels.cuda.driver import Argument, Device, Int64
from ling_kernels.cuda.exchange import BLOCKS, MAX_VOCAB, MAX_WIDTH, ROWS_BLOCKS, ROWS_THREADS, CudaExchange
from ling_kernels.ops import DRAFT_BEST, ROW_TILE, KernelError, Proposal, Sampling


class CudaRankOps(CudaOps):
    """The contracts of `ling_kernels.ops.Ops` for one rank. note: why the fallback is in use, "" where it is not."""

    def __init__(self, device: Device, exchange: CudaExchange, note: str = "", gate_fp32: bool = False) -> None:
        super().__init__(device, gate_fp32)
        self.exchange = exchange
        self.note = note

    def embed(self, ids: Tensor, table: Tensor, lazy: bool = False) -> Tensor:
        x = table.new_empty(ids.shape[0], table.shape[1])
        if self.exchange.narrow is None:
            return self._embed([ids, None, None, Int64(0), None], table, x)
        for start in range(0, ids.shape[0], BLOCKS):
            part = slice(start, start + BLOCKS)
            self._embed([ids[part], None, None, Int64(0), None], table, x[part])
        return x

    def draft_embed(self, anchor: Tensor, length: Tensor, table: Tensor, mask: int, num: int) -> tuple[Tensor, Tensor]:
        positions = torch.empty(num, dtype=torch.int64, device=table.device)
        x = table.new_empty(num, table.shape[1])
        return self._embed([None, anchor, length, Int64(mask), positions], table, x), positions

    def _embed(self, named: list[Argument], table: Tensor, x: Tensor) -> Tensor:
        """Rows of the embedding into x; named: ids, or what a draft's come from."""
        count, width = table.shape
        self._check_width(width)
        args = [*named, table, self.exchange.rank * count, count, x, width]
        if self.exchange.narrow is None:
            self.device.launch("embed_part", x.shape[0], _threads(width), args)
            return self._gathered(x, None, None, 0.0)[0]
        self._exchange("exchange_embed", x.shape[0], _threads(width), args)
        return x

    def exchange_norm(
        self,
        partial: Tensor | None,
        x: Tensor,
        weight: Tensor,
        eps: float,
        rows: int | None = None,
        lazy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        if partial is None:
            return super().exchange_norm(None, x, weight, eps, rows)
        self._check_width(x.shape[1])
        live = x.shape[0] if rows is None else rows
        if self.exchange.narrow is None:
            return self._gathered(_whole(partial)[:live], x, weight, eps)
        width, (_, parts, pitch) = x.shape[1], parts_of(partial)
        total, h = torch.empty_like(x), torch.empty_like(x)
        for start in range(0, live, BLOCKS):
            args = [
                partial[..., start:, :],
                parts,
                pitch,
                x[start:],
                weight,
                total[start:],
                h[start:],
                width,
                float(eps),
            ]
            args.append(int(self.early_norm))
            self._exchange("exchange_norm", min(BLOCKS, live - start), _threads(width), args)
        return total, h

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [n, V / N] fp32 of this rank's rows of the vocabulary to those of all, [n, V]."""
        rows, n = logits.shape
        if self.exchange.narrow is None:
            return self.exchange.gather(logits).transpose(0, 1).flatten(1)
        if n % 4 or n * self.exchange.size > MAX_VOCAB:
            raise KernelError(f"{n} rows of the vocabulary a rank: a multiple of 4, {MAX_VOCAB} over all ranks")
        whole = torch.empty(rows, self.exchange.size * n, dtype=torch.float32, device=logits.device)
        for start in range(0, rows, ROW_TILE):
            some = min(ROW_TILE, rows - start)
            blocks = min(ROWS_BLOCKS, -(-some * n // 4 // ROWS_THREADS))
            args = [Int64(self.exchange.wide), logits[start:], whole[start:], some, n]
            self.device.launch(f"exchange_rows_{self.exchange.size}", blocks, ROWS_THREADS, args)
        return whole

    def draw(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: Sampling,
        rows: int,
        with_sums: bool = False,
        drawn: Tensor | None = None,
        most: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """As on one GPU; greedy, each row's candidates are then one a rank."""
        if not sampling.greedy:
            return super().draw(self.whole(logits[:rows]), positions, sampling, rows, with_sums, drawn, most)
        local = sampling._replace(vocab=self.local_vocab(sampling, logits.shape[1]))
        best, bad, _, sums = super().draw(logits, positions, local, rows, with_sums)
        self._best(best, bad, sums, logits.shape[1])
        return best, bad, best, sums

    def pick(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Proposal:
        rows = positions.shape[0]
        if sampling.greedy:
            drawn, _, best, sums = self.draw(logits, positions, sampling, rows, with_sums=True)
            return self._picked(None, best, drawn, sums)
        whole = self.whole(logits[:rows])
        drawn, _, best, sums = super().draw(whole, positions, sampling, rows, with_sums=True, most=DRAFT_BEST)
        return self._picked(whole, best, drawn, sums)

    def local_vocab(self, sampling: Sampling, count: int) -> int:
        return min(sampling.vocab - self.exchange.rank * count, count)

    def settle_pick(self, drawn: Tensor, count: int) -> None:
        self._best(drawn[None], None, None, count)

    def _best(self, best: Tensor, bad: Tensor | None, sums: Tensor | None, count: int) -> None:
        """Candidates [rows, n] of this rank's `count` rows of the vocabulary to one a rank, in place."""
        rows, stride = best.shape
        first = self.exchange.rank * count
        if self.exchange.narrow is not None:
            self._exchange("exchange_best", rows, 32, [best, bad, sums, stride, first, best, bad, sums, stride])
            return
        part = torch.empty(rows, 2, dtype=torch.int64, device=best.device)
        self.device.launch("best_part", rows, 32, [best, bad, sums, stride, first, part])
        parts = self.exchange.gather(part)
        self.device.launch("gathered_best", rows, 32, [parts, self.exchange.size, best, bad, sums, stride])

    def _gathered(self, partial: Tensor, x: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
        parts = self.exchange.gather(partial)
        like = partial if x is None else x
        total, h, width = torch.empty_like(like), torch.empty_like(like), like.shape[1]
        args = [parts, self.exchange.size, Int64(partial.numel()), x, weight, total, h, width, float(eps)]
        self.device.launch("gathered_norm", partial.shape[0], _threads(width), args)
        return total, h

    def _exchange(self, name: str, rows: int, threads: int, args: Sequence[Argument]) -> None:
        self.device.launch(f"{name}_{self.exchange.size}", rows, threads, [Int64(self.exchange.narrow), *args])

    def _check_width(self, width: int) -> None:
        if width > MAX_WIDTH or width % 8:
            raise KernelError(f"hidden size {width}: an exchange needs a multiple of 8 up to {MAX_WIDTH}")


def _whole(partial: Tensor) -> Tensor:
    """[R, D] bf16 of a sum that may still be in parts, added in their order."""
    if partial.ndim == 2:
        return partial
    total = partial[0]
    for part in partial[1:]:
        total = total + part
    return total.bfloat16()


def _threads(width: int) -> int:
    return -(-width // 256) * 32
