"""Choosing tokens on a GPU: the verdict over a window, and drafts by the same rule (sample.cu)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Argument, Device
from ling_kernels.cuda.lazy import Candidates
from ling_kernels.ops import DRAFT_BEST, RING_HEADER, ROW_TILE, KernelError, Limits, Proposal, Sampling, Verdict

BLOCKS, THREADS, OWN_SPANS = 64, 256, 512  # as in sample.cuh
BINS, CHOOSERS, MAX_LISTED, CUT_WORDS = 2048, 512, 2048, 5  # as in choose.cuh
MAX_A_BLOCK = 4095  # as in sample.cu
ADVANCERS = 64  # as in verdict.cuh


class Scratch(NamedTuple):
    """Of the kernels that draw, by row. masses, counts and listed are zero whenever no such kernel is under way."""

    masses: Tensor
    counts: Tensor
    listed: Tensor
    list: Tensor
    cuts: Tensor


class SampleOps:
    """Contracts in `ling_kernels.ops.Ops`. listed: values that may be unsure before a slower way is taken."""

    device: Device
    candidates: Candidates | None
    _commit_and_advance: Callable[[Tensor, list[Argument]], bool]
    listed = MAX_LISTED
    _scratch: Scratch | None = None

    def verdict(
        self,
        logits: Tensor,
        drafts: Tensor | None,
        positions: Tensor,
        sampling: Sampling,
        limits: Limits,
        rows: int,
    ) -> Verdict:
        _check_rows(rows)
        where = logits.device
        tokens = torch.empty(rows, dtype=torch.int64, device=where)
        entry = torch.empty(RING_HEADER + ROW_TILE, dtype=torch.int64, device=where)
        count, anchor = (torch.empty((), dtype=torch.int64, device=where) for _ in range(2))
        done = torch.empty((), dtype=torch.bool, device=where)
        # a rank's part of the vocabulary holds fewer rows than may be chosen: there `draw` asks the others
        known = self._known(logits) if sampling.greedy and sampling.vocab <= logits.shape[1] else None
        if known:
            _check(logits, sampling)
            name = "sample_verdict_best"
            args = [logits, logits.shape[1], sampling.vocab, known.values, known.ids, known.span]
        else:
            drawn, bad, *_ = self.draw(logits, positions, sampling, rows)
            name, args = "sample_verdict", [drawn, bad]
        args += [drafts, limits.remaining, limits.stop_ids, limits.done, limits.step]
        args += [tokens, count, anchor, done, entry, rows]
        self.device.launch(name, 1, ROW_TILE * 32, args)
        return Verdict(tokens, count, anchor, done, entry)

    def advance(self, verdict: Verdict, ring: Tensor, positions: Tensor, anchor: Tensor, limits: Limits) -> None:
        words = [positions, anchor, limits.remaining, limits.done, limits.step]
        args = [verdict.count, verdict.anchor, verdict.done, verdict.entry, ring, *ring.shape, *words]
        if not self._commit_and_advance(verdict.count, args):
            self.device.launch("sample_advance", 1, ADVANCERS, args)

    def expect(self, proposal: Proposal, drafts: Tensor, ring: Tensor, step: Tensor) -> None:
        count = proposal.drafts.shape[0]
        args = [proposal.drafts, proposal.confidence, count, drafts, ring, *ring.shape, step]
        self.device.launch("sample_expect", 1, 32, args)

    def pick(self, logits: Tensor, positions: Tensor, sampling: Sampling) -> Proposal:
        rows = positions.shape[0]
        drawn, _, best, sums = self.draw(logits, positions, sampling, rows, with_sums=True, most=DRAFT_BEST)
        return self._picked(logits, best, drawn, sums)

    def _picked(self, logits: Tensor | None, best: Tensor | None, drawn: Tensor, sums: Tensor | None) -> Proposal:
        """Each row's token and its chance, from what `draw` gave. logits: of the whole vocabulary, None where `drawn`
        is `best`."""
        rows, where = drawn.shape[0], drawn.device
        tokens = torch.empty(rows, dtype=torch.int64, device=where)
        confidence = torch.empty(rows, dtype=torch.float32, device=where)
        args = [logits, 0 if logits is None else logits.shape[1], best, drawn, sums, tokens, confidence]
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
        most: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Each row's candidates [rows, BLOCKS], the best of which is its token (in `drawn`, where given); whether parts
        of it are not finite; candidates before noise, and sums of exp(logit - the part's maximum), both where there
        are sums. most: draw from so many best ones at most, 0 for no such bound."""
        _check(logits, sampling)
        _check_rows(rows)
        where, source = logits.device, [logits, logits.shape[1], sampling.vocab]
        bad = torch.empty(rows, BLOCKS, dtype=torch.int32, device=where)
        known = None if with_sums or (sampling.greedy and drawn is None) else self._known(logits)
        best = sums = None
        if known:
            spans: list[Argument] = [known.values, None, known.span]
        else:
            own = None if sampling.greedy else torch.empty(rows, OWN_SPANS, dtype=torch.int64, device=where)
            best = torch.empty(rows, BLOCKS, dtype=torch.int64, device=where)
            sums = torch.empty(rows, BLOCKS, dtype=torch.float32, device=where) if with_sums else None
            self.device.launch("sample_first", (BLOCKS, rows), THREADS, [*source, own, best, bad, sums])
            spans = [None, own, 0]
        if sampling.greedy:
            return best, bad, best, sums
        if drawn is None:
            drawn = torch.empty(rows, BLOCKS, dtype=torch.int64, device=where)
        row = [*source, *spans, sampling.temperature, sampling.top_k, sampling.top_p, most]
        noise, kept = [sampling.seed, positions], self._kept(where)
        bins, look = [kept.masses, kept.counts], [kept.cuts, kept.list, kept.listed, self.listed, drawn]
        grid = (max(BLOCKS, -(-sampling.vocab // MAX_A_BLOCK)), rows)
        self.device.launch("sample_bins", grid, THREADS, [*row, *bins])
        self.device.launch("sample_draw", (BLOCKS, rows), THREADS, [*row, *bins, *noise, *look])
        self.device.launch("sample_choose", (1, rows), CHOOSERS, [*row, *bins, *noise, *look, bad if known else None])
        return drawn, bad, best, sums

    def _known(self, logits: Tensor) -> Candidates | None:
        """The head's best ones of these very logits."""
        found = self.candidates
        return found if found is not None and found.logits is logits else None

    def _kept(self, where: torch.device) -> Scratch:
        if self._scratch is None:
            masses = torch.zeros(ROW_TILE, BINS, dtype=torch.int64, device=where)
            counts = torch.zeros(ROW_TILE, BINS, dtype=torch.int32, device=where)
            listed = torch.zeros(ROW_TILE, dtype=torch.int32, device=where)
            values = torch.zeros(ROW_TILE, MAX_LISTED, dtype=torch.int64, device=where)
            cuts = torch.zeros(ROW_TILE, CUT_WORDS, dtype=torch.int64, device=where)
            self._scratch = Scratch(masses, counts, listed, values, cuts)
        return self._scratch


def _check_rows(rows: int) -> None:
    if not 1 <= rows <= ROW_TILE:
        raise KernelError(f"{rows} rows: a window has 1 to {ROW_TILE}")


def _check(logits: Tensor, sampling: Sampling) -> None:
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise KernelError(f"logits must be contiguous fp32, not {logits.dtype}")
    if not 0 < sampling.vocab <= logits.shape[1]:
        raise KernelError(f"a vocabulary of {sampling.vocab} in rows of {logits.shape[1]}")
