"""What a draft is trained on (dspark.md sections 14.3 and 14.4): four losses over blocks, from four figures a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ling_local.train.draft_target import scores

CHUNK_ELEMENTS = 2**29  # logits held at once, 2 GiB in fp32; above that they are made again in the backward pass


@dataclass(frozen=True)
class LossWeights:
    """Weights of the losses, and their shape.

    decay       g of the position weights exp(-(k-1)/g); 0: the block size
    reach       weigh the confidence loss by the chance that a position is reached, not by the fixed decay
    smoothing   added to acceptances in the accept length's product, so that one zero does not silence the rest
    coolest     acceptance is learned at the temperature a row was made with, at least this one and at most 1; 1: as
                published, all rows at temperature 1
    """

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    length: float = 0.1
    decay: float = 0.0
    reach: bool = False
    smoothing: float = 1e-3
    coolest: float = 1.0


class RowTerms(NamedTuple):
    """By row: cross-entropy against the label; acceptance, the overlap of draft's and target's distributions
    (1 - TV); hit: both have the same likeliest token."""

    ce: Tensor
    alpha: Tensor
    hit: Tensor


def row_terms(
    hidden: Tensor, markov: Tensor, w2: Tensor, head: Tensor, wanted: Tensor, labels: Tensor, temperature: Tensor
) -> RowTerms:
    """Terms of N rows. hidden, wanted [N, D]: the draft's and the target's final rows; markov [N, r]; w2 [V, r];
    head [V, D]; labels [N]; temperature [N]."""
    drafted = torch.addmm(scores(hidden, head), markov.float(), w2.float().t())
    with torch.no_grad():
        logits = scores(wanted, head)
        target = (logits / temperature[:, None]).softmax(-1)
        hit = (drafted.argmax(-1) == logits.argmax(-1)).float()
    ce = F.cross_entropy(drafted, labels, reduction="none")
    alpha = torch.minimum((drafted / temperature[:, None]).softmax(-1), target).sum(-1)
    return RowTerms(ce, alpha, hit)


def row_terms_in_chunks(
    hidden: Tensor,
    markov: Tensor,
    w2: Tensor,
    head: Tensor,
    wanted: Tensor,
    labels: Tensor,
    temperature: Tensor,
    function: Callable[..., RowTerms] = row_terms,
    elements: int = CHUNK_ELEMENTS,
) -> RowTerms:
    """`function` over all rows, in parts of at most `elements` logits that are not kept for the backward pass."""
    rows = max(elements // head.shape[0], 1)
    if hidden.shape[0] <= rows:
        return function(hidden, markov, w2, head, wanted, labels, temperature)
    parts = []
    for start in range(0, hidden.shape[0], rows):
        h, m, t, label, heat = (x[start : start + rows] for x in (hidden, markov, wanted, labels, temperature))
        parts.append(
            checkpoint(function, h, m, w2, head, t, label, heat, use_reentrant=False, preserve_rng_state=False)
        )
    return RowTerms(*(torch.cat(each) for each in zip(*parts, strict=True)))


class Losses(NamedTuple):
    """total is what is minimised; the rest is for the log, without gradients.

    accept_length   of a block at the rows' temperatures: 1 + sum over k of the product of the first k acceptances
    greedy_length   the same with hits, after the true tokens: what greedy decoding accepts while it is right
    alpha, count    [n] summed acceptance and number of valid rows by position; blocks: how many there were
    """

    total: Tensor
    ce: Tensor
    tv: Tensor
    confidence: Tensor
    accept_length: Tensor
    greedy_length: Tensor
    alpha: Tensor
    count: Tensor
    blocks: Tensor


def combine(
    terms: RowTerms, confidence: Tensor | None, valid: Tensor, weights: LossWeights, ramp: Tensor | float
) -> Losses:
    """Losses of blocks [N, n]. valid [N, n] fp32: 1 for the leading rows that have a label; ramp scales the length
    term from 0 to 1. A block counts if its first row is valid."""
    ce, alpha, hit = terms
    size = valid.shape[-1]
    place = torch.arange(size, device=valid.device, dtype=torch.float32)
    share = valid * torch.exp(-place / (weights.decay or size))
    whole = share.sum().clamp(min=1e-6)
    blocks = valid[:, 0].sum()
    number = blocks.clamp(min=1.0)
    mean_ce = (share * ce).sum() / whole
    mean_tv = (share * 2 * (1 - alpha)).sum() / whole
    reached = (valid * reach(alpha, weights.smoothing)).sum() / number
    total = weights.ce * mean_ce + weights.tv * mean_tv - weights.length * ramp * reached
    sure = torch.zeros_like(mean_ce)
    if confidence is not None:
        likely = F.pad(reach(alpha.detach(), 0.0)[:, :-1], (1, 0), value=1.0)
        counted = valid * likely if weights.reach else share
        error = F.binary_cross_entropy_with_logits(confidence, alpha.detach().clamp(0, 1), reduction="none")
        sure = (counted * error).sum() / counted.sum().clamp(min=1e-6)
        total = total + weights.confidence * sure
    with torch.no_grad():
        length = 1 + (valid * reach(alpha, 0.0)).sum() / number
        greedy = 1 + (valid * hit.cumprod(-1)).sum() / number
        by_place = (valid * alpha).sum(0)
    figures = (mean_ce, mean_tv, sure, length, greedy, by_place, valid.sum(0), blocks)
    return Losses(total, *(figure.detach() for figure in figures))


def reach(alpha: Tensor, smoothing: float) -> Tensor:
    """Chance that the first k drafts are all accepted, for every k along the last axis. Sums of logarithms: torch's
    gradient of cumprod looks at its values on the host, which a graph cannot hold."""
    return ((alpha + smoothing).clamp(min=1e-20) / (1 + smoothing)).log().cumsum(-1).exp()
