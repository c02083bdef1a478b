"""Held-out figures: loss, bits per byte, top-1 accuracy of the next token, and of the one after by the MTP layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ling_local.train.corpus import TokenSet
from ling_local.train.net import Net, Params, forward, logits

STEP = 512


@dataclass(frozen=True)
class Figures:
    """Teacher-forced over whole documents from an empty state; windows of `context` tokens for longer ones.

    mtp_top1: how often the MTP layer, given the true next token, names the one after.
    """

    documents: int
    predicted_tokens: int
    loss_nats: float
    bits_per_byte: float
    top1: float
    mtp_top1: float


def windows(tokens: TokenSet, context: int) -> list[np.ndarray]:
    """Documents without their end token, cut at `context`, longest first."""
    ends = np.append(tokens.starts[1:], len(tokens.tokens)) - 1
    pieces = []
    for start, end in zip(tokens.starts, ends, strict=True):
        pieces += [tokens.tokens[i : min(i + context, end)] for i in range(start, end, context)]
    return sorted((piece for piece in pieces if len(piece) > 1), key=len, reverse=True)


@torch.no_grad()
def evaluate(net: Net, params: Params, tokens: TokenSet, context: int, budget: int = 65_536) -> Figures:
    """Figures over a set. Windows of about one length run together, `budget` tokens at a time."""
    device = params["lm_head.weight"].device
    pieces = windows(tokens, context)
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    counted = after = at = 0
    while at < len(pieces):
        length = -(-len(pieces[at]) // STEP) * STEP
        batch = pieces[at : at + max(1, budget // length)]
        at += len(batch)
        ids = np.zeros((len(batch), length), dtype=np.int64)
        mask = np.zeros((len(batch), length), dtype=bool)
        for row, piece in enumerate(batch):
            ids[row, : len(piece)] = piece
            mask[row, : len(piece)] = True
        sums += _batch(net, params, torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device))
        counted += int(mask[:, 1:].sum())
        after += int(mask[:, 2:].sum())
    loss, right, drafted = sums.tolist()
    bits = loss / math.log(2) / tokens.text_bytes
    return Figures(len(tokens.starts), counted, loss / counted, bits, right / counted, drafted / after)


def _batch(net: Net, params: Params, ids: Tensor, mask: Tensor) -> Tensor:
    """[summed loss, right next tokens, right second-next tokens by the MTP layer]"""
    out = forward(net, params, ids)
    scores = logits(net, params, out.hidden).view(*ids.shape, -1)[:, :-1]
    target, real = ids[:, 1:], mask[:, 1:]
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), reduction="none")
    right = (scores.argmax(-1) == target) & real
    total = [(loss * real.flatten()).double().sum(), right.double().sum()]
    del scores
    if out.mtp is None:
        return torch.stack([*total, torch.zeros_like(total[0])])
    drafted = logits(net, params, out.mtp).view(*ids.shape, -1)[:, :-2].argmax(-1)
    return torch.stack([*total, ((drafted == ids[:, 2:]) & mask[:, 2:]).double().sum()])
