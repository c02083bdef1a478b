"""The target's choice of tokens, and the verdict over a window's drafts (dspark.md section 7).

A row draws its token as argmax(log p + Gumbel noise), with noise keyed by (seed, position, token): an exact sample
of p that does not depend on the window. A draft is accepted when it is what the row drew (section 7.3b), so the
emitted ids are the same with and without drafts, greedy or sampled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ling_kernels.ops import (
    DRAFT_BEST,
    ERROR_NON_FINITE,
    RING_HEADER,
    ROW_TILE,
    STOPPED_EOS,
    STOPPED_LENGTH,
    Limits,
    Proposal,
    Sampling,
    Verdict,
)

_POSITION_KEY, _TOKEN_KEY = -7046029254386353131, -4417276706812531889  # odd 64-bit constants
_MIX = (-4658895280553007687, -7723592293110705685)  # multipliers of the splitmix64 finaliser


def _hash(x: Tensor) -> Tensor:
    """64 well-mixed bits of each int64 (the splitmix64 finaliser; torch multiplies modulo 2^64)."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = (x ^ _shifted(x, shift)) * factor
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # torch's shift of int64 keeps the sign


def gumbel(seed: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [n, vocab] fp32, a function of (seed, position, token) alone."""
    return _noise(_row_keys(seed, positions), torch.arange(vocab, device=positions.device))


def _row_keys(seed: Tensor, positions: Tensor) -> Tensor:
    return _hash(_hash(seed + _POSITION_KEY) + positions * _POSITION_KEY)


def _noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """keys [n]; tokens [m] or [n, m]."""
    bits = _hash(keys[:, None] + tokens * _TOKEN_KEY) >> 41 & ((1 << 23) - 1)
    # 23 bits and a half: fp32 holds each exactly, so the uniform is never 0 or 1
    return -torch.log(-torch.log((bits.float() + 0.5) * 2.0**-23))


def filtered_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """logits / temperature [n, V] with everything outside top-k, then outside top-p of the rest, at -inf.

    Tokens that tie with the last one kept are kept too.
    """
    scaled = logits / sampling.temperature.clamp(min=1e-5)
    ordered = scaled.sort(dim=-1, descending=True).values
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    within_k = (sampling.top_k <= 0) | (rank < sampling.top_k)
    ordered = ordered.masked_fill(~within_k, -torch.inf)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability
    keep = within_k & ((before < sampling.top_p) | (rank == 0))
    lowest = ordered.masked_fill(~keep, torch.inf).amin(-1, keepdim=True)
    return scaled.masked_fill(scaled < lowest, -torch.inf)


def choose(logits: Tensor, positions: Tensor, sampling: Sampling) -> Tensor:
    """The target's token after each row: logits [n, V] fp32, positions [n] -> [n] int64. Equal: the lower id."""
    if sampling.greedy:
        return logits.argmax(-1)
    return (filtered_logits(logits, sampling) + gumbel(sampling.seed, positions, logits.shape[-1])).argmax(-1)


class DraftRule(NamedTuple):
    """What n drafts are drawn by, made once for all of them: keys [n] of their noise; cut [C]: 0 for each of the best
    tokens that top-k keeps, -inf past them."""

    keys: Tensor
    cut: Tensor
    temperature: Tensor
    top_p: Tensor


def draft_rule(positions: Tensor, sampling: Sampling) -> DraftRule | None:
    """For `choose_draft`; None where drafts are greedy."""
    if sampling.greedy:
        return None
    best = min(DRAFT_BEST, sampling.vocab)
    cut = torch.zeros(best, device=positions.device)
    past = torch.arange(best, device=positions.device) >= sampling.top_k
    cut.masked_fill_(past & (sampling.top_k > 0), -torch.inf)
    keys = _row_keys(sampling.seed, positions)
    return DraftRule(keys, cut, sampling.temperature.clamp(min=1e-5), sampling.top_p)


def choose_draft(logits: Tensor, rule: DraftRule | None, row: slice = slice(None)) -> Tensor:
    """`choose` for drafts `row` of the rule, from the DRAFT_BEST best tokens of each at most: a draft may be anything,
    and what comes after them is seldom drawn, but costs a sort of the vocabulary and noise for all of it."""
    if rule is None:
        return logits.argmax(-1)
    values, tokens = logits.topk(rule.cut.shape[0])
    scaled = values / rule.temperature + rule.cut
    probability = scaled.softmax(-1)
    before = probability.cumsum(-1) - probability
    scaled = torch.where(before < rule.top_p, scaled, -torch.inf)  # all of them -inf: the first, which is the best
    place = (scaled + _noise(rule.keys[row], tokens)).argmax(-1, keepdim=True)
    return tokens.gather(-1, place)[:, 0]


def pick(logits: Tensor, positions: Tensor, sampling: Sampling) -> Proposal:
    logits = logits[:, : sampling.vocab]
    tokens = choose_draft(logits, draft_rule(positions, sampling))
    return Proposal(tokens, logits.softmax(-1).gather(1, tokens[:, None])[:, 0])


def verdict(
    logits: Tensor, drafts: Tensor | None, positions: Tensor, sampling: Sampling, limits: Limits, rows: int
) -> Verdict:
    logits = logits[:rows, : sampling.vocab]
    tokens = choose(logits, positions[:rows], sampling)
    place = torch.arange(rows, device=tokens.device)
    count = torch.ones((), dtype=torch.int64, device=tokens.device)
    if drafts is not None:
        count = count + (drafts == tokens[:-1]).long().cumprod(0).sum()
    ends = (tokens[:, None] == limits.stop_ids).any(-1)
    first_end = torch.where(ends, place, rows).amin()
    count = torch.minimum(torch.minimum(count, first_end + 1), limits.remaining)
    bad = (~logits.isfinite().all(-1) & (place < count)).any()
    count = torch.where(limits.done | bad, 0, count)
    eos = (count > 0) & (first_end + 1 == count)
    length = (count > 0) & ~eos & (count == limits.remaining)
    finish = eos * STOPPED_EOS + length * STOPPED_LENGTH
    anchor = tokens.index_select(0, (count - 1).clamp(min=0).view(1))[0]
    drafted = torch.full_like(count, rows - 1)
    accepted = (count - 1).clamp(min=0)
    error = (bad & ~limits.done) * ERROR_NON_FINITE
    header = torch.stack([limits.step, count, drafted, accepted, finish, error])
    entry = torch.cat([header, torch.nn.functional.pad(tokens, (0, ROW_TILE - rows))])
    return Verdict(tokens, count, anchor, limits.done | bad | (finish > 0), entry)


def advance(verdict: Verdict, ring: Tensor, positions: Tensor, anchor: Tensor, limits: Limits) -> None:
    entry = torch.nn.functional.pad(verdict.entry, (0, ROW_TILE))
    ring.index_copy_(0, (limits.step % ring.shape[0]).view(1), entry[None])
    positions += verdict.count
    limits.remaining.sub_(verdict.count)
    anchor.copy_(torch.where(verdict.count > 0, verdict.anchor, anchor))
    limits.done.copy_(verdict.done)
    limits.step.add_(1)


def expect(proposal: Proposal, drafts: Tensor, ring: Tensor, step: Tensor) -> None:
    num, column = proposal.drafts.shape[0], RING_HEADER + ROW_TILE
    drafts[:num].copy_(proposal.drafts)
    entry = (proposal.confidence * 1e6).long()[None]
    ring[:, column : column + num].index_copy_(0, ((step - 1) % ring.shape[0]).view(1), entry)
