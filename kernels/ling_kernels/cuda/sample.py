"""Choosing tokens on a GPU: the verdict over a window, and drafts picked by the target's own rule (sample.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Device
from ling_kernels.ops import RING_HEADER, ROW_TILE, KernelError, Limits, Proposal, Sampling, Verdict

BLOCKS, THREADS, DIGITS, BINS = 64, 256, 3, 2048  # as in sample.cuh
FOUND_WORDS = 4  # sizeof(Found) / 8


class SampleOps:
    """Contracts in `ling_kernels.ops.Ops`."""

    device: Device

    def verdict(
        self,
        logits: Tensor,
        drafts: Tensor | None,
        positions: Tensor,
        sampling: Sampling,
        limits: Limits,
        rows: int,
    ) -> Verdict:
        if not 1 <= rows <= ROW_TILE:
            raise KernelError(f"{rows} rows: a window has 1 to {ROW_TILE}")
        drawn, bad, *_ = self.draw(logits, positions, sampling, rows)
        where = logits.device
        tokens = torch.empty(rows, dtype=torch.int64, device=where)
        entry = torch.empty(RING_HEADER + ROW_TILE, dtype=torch.int64, device=where)
        count, anchor = (torch.empty((), dtype=torch.int64, device=where) for _ in range(2))
        done = torch.empty((), dtype=torch.bool, device=where)
        args = [drawn, bad, drafts, limits.remaining, limits.stop_ids, limits.done, limits.step]
        self.device.launch("sample_verdict", 1, ROW_TILE * 32, [*args, tokens, count, anchor, done, entry, rows])
        return Verdict(tokens, count, anchor, done, entry)

    def advance(self, verdict: Verdict, ring: Tensor, length: Tensor, anchor: Tensor, limits: Limits) -> None:
        words = [length, anchor, limits.remaining, limits.done, limits.step]
        args = [verdict.count, verdict.anchor, verdict.done, verdict.entry, ring, *ring.shape, *words]
        self.device.launch("sample_advance", 1, 64, args)

    def pick(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Proposal:
        rows = positions.shape[0]
        drawn, _, best, sums = self.draw(logits, positions, sampling, rows, with_sums=True)
        tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
        confidence = torch.empty(rows, dtype=torch.float32, device=logits.device)
        args = [logits, logits.shape[1], best, drawn, sums, tokens, confidence]
        self.device.launch("sample_picked", rows, 32, args)
        return Proposal(tokens, confidence)

    def draw(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: Sampling,
        rows: int,
        with_sums: bool = False,
        drawn: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Each row's candidates [rows, BLOCKS], the best of which is its token (in `drawn`, where given); whether parts
        of it are not finite; candidates before noise, and sums of exp(logit - the part's maximum)."""
        _check(logits, sampling)
        where, stride, vocab = logits.device, logits.shape[1], sampling.vocab
        parts = (rows, BLOCKS)
        best = torch.empty(parts, dtype=torch.int64, device=where)
        bad = torch.empty(parts, dtype=torch.int32, device=where)
        sums = torch.empty(parts, dtype=torch.float32, device=where) if with_sums else None
        grid, source = (BLOCKS, rows), [logits, stride, vocab, best]
        if sampling.greedy and drawn is None:
            self.device.launch("sample_first", grid, THREADS, [*source, bad, sums, None, None, None])
            return best, bad, best, sums
        bins = torch.empty(rows, 2, DIGITS, BINS, dtype=torch.int64, device=where)
        found = torch.empty(rows, 2 * DIGITS + 1, FOUND_WORDS, dtype=torch.int64, device=where)
        if drawn is None:
            drawn = torch.empty(parts, dtype=torch.int64, device=where)
        words = [sampling.temperature, sampling.top_k, sampling.top_p]
        self.device.launch("sample_first", grid, THREADS, [*source, bad, sums, bins, found, sampling.top_k])
        for number in range(2 * DIGITS):
            self.device.launch("sample_pass", grid, THREADS, [*source, bins, found, *words, number])
        args = [*source, bins, found, *words, sampling.seed, positions, drawn]
        self.device.launch("sample_draw", grid, THREADS, args)
        return drawn, bad, best, sums


def _check(logits: Tensor, sampling: Sampling) -> None:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise KernelError(f"logits must be contiguous fp32, not {logits.dtype}")
    if not 0 < sampling.vocab <= logits.shape[1]:
        raise KernelError(f"a vocabulary of {sampling.vocab} in rows of {logits.shape[1]}")
