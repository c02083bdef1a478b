"""Accept lengths of a draft on held-out prompts: greedy, full-width verification, as the engine counts them.

What speculation emits is the target's own greedy text, whatever the draft. So that text is made once, every place
of it gets a block in one batch, and the engine's walk from anchor to anchor is then only arithmetic.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ling_local.train.draft_net import (
    W1,
    W2,
    DraftNet,
    Params,
    confidence_logit,
    draft_hidden,
    make_draft_net,
    markov_input,
)
from ling_local.train.draft_prompts import Prompts
from ling_local.train.draft_sampler import Sampler
from ling_local.train.draft_target import Target, features, scores

ROWS_AT_ONCE = 32


class Traces(NamedTuple):
    """Greedy answers: tokens [N, T] int64; first, end [N]: the answer is tokens[first:end]."""

    tokens: np.ndarray
    first: np.ndarray
    end: np.ndarray


class Walk(NamedTuple):
    """One entry a verify step, all rows one after the other: accepted drafts; row it belongs to; confidence logits
    [n, block] of its drafts, NaN without that head; whole: the answer goes on past the block's end."""

    accepted: np.ndarray
    row: np.ndarray
    confidence: np.ndarray
    whole: np.ndarray


@dataclass(frozen=True)
class AcceptFigures:
    """accept_length: emitted tokens / verify steps, bonus counted, cut at the answer's end; by_position: share of
    steps that accepted at least 1, 2, ... drafts, so that 1 + their sum is the accept length."""

    prompts: int
    tokens: int
    steps: int
    accept_length: float
    by_position: tuple[float, ...]


def trace(target: Target, prompts: Prompts, answer: int) -> Traces:
    """Greedy answers of up to `answer` tokens, the stop id included; prompts without an answer are left out."""
    length = int(prompts.lengths.max()) + answer
    limited = Prompts(prompts.tokens, prompts.lengths, np.full_like(prompts.limits, answer), prompts.kinds)
    rows = len(limited)
    sampler = Sampler(target, limited, rows, length, graph=True)
    made = sampler.run(0, torch.zeros(rows), torch.zeros(rows, dtype=torch.int64))
    answered = made.answered.cpu().numpy()
    first = limited.lengths - (0 if target.end_id is None else 1)
    after = np.array([_run_end(row, start) for row, start in zip(answered, first, strict=True)])
    return Traces(made.tokens.cpu().numpy().astype(np.int64), first.astype(np.int64), after)


def _run_end(answered: np.ndarray, start: int) -> int:
    """Where the run of True that begins at start ends."""
    others = np.flatnonzero(~answered[start:])
    return start + int(others[0]) if len(others) else len(answered)


@torch.no_grad()
def greedy_blocks(
    target: Target, draft: DraftNet, params: Params, hidden: Tensor, anchor: Tensor
) -> tuple[Tensor, Tensor]:
    """Drafts [.., n] and their confidence logits [.., n] from final rows hidden [.., n, D] and anchor ids [..]."""
    head, w2 = target.head[: target.vocab], params[W2][: target.vocab].float()
    state = hidden.new_zeros(*hidden.shape[:-2], draft.config.markov_rank)
    before = anchor
    drafts, sure = [], []
    for row in range(hidden.shape[-2]):
        h, known = hidden[..., row, :], F.embedding(before, params[W1]).float()
        bias, state = markov_input(draft.config, params, h, known, state)
        logit = confidence_logit(draft.config, params, h, known)
        before = (scores(h, head) + F.linear(bias, w2)).argmax(-1)
        drafts.append(before)
        sure.append(torch.full_like(h[..., 0], torch.nan) if logit is None else logit)
    return torch.stack(drafts, -1), torch.stack(sure, -1)


@torch.no_grad()
def walk(target: Target, draft: DraftNet, params: Params, traces: Traces, blind: bool = False) -> Walk:
    """Every verify step that the engine would make over the traces.

    The first token of an answer comes from a plain step; drafting begins with it as anchor. blind: the taps are
    replaced by zeros, to see what they are worth.
    """
    steps = []
    for start in range(0, len(traces.tokens), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        first, end = traces.first[part], traces.end[part]
        length = int(end.max())
        low = int(first.min())
        ids = torch.from_numpy(traces.tokens[part, :length]).to(target.device)
        taps, _ = features(target, ids, draft.config.target_layers)
        if blind:
            taps = torch.zeros_like(taps)
        at = torch.arange(low, length, device=target.device).expand(len(ids), -1).contiguous()
        hidden = draft_hidden(draft, params, target.embedding, taps, ids, at)
        drafts, sure = (x.cpu().numpy() for x in greedy_blocks(target, draft, params, hidden, ids.gather(1, at)))
        for row, tokens in enumerate(traces.tokens[part]):
            place = int(first[row])
            while place < end[row] - 1:
                block = drafts[row, place - low]
                accepted = _accepted(block, tokens[place + 1 : end[row]])
                whole = place + len(block) < end[row] - 1
                steps.append((accepted, start + row, sure[row, place - low], whole))
                place += accepted + 1
    accepted, rows, sures, wholes = zip(*steps, strict=True) if steps else ((), (), (), ())
    return Walk(np.array(accepted, dtype=np.int64), np.array(rows), np.array(sures), np.array(wholes, dtype=bool))


def _accepted(drafts: np.ndarray, following: np.ndarray) -> int:
    """Leading drafts that are the text; the step's last token is the target's own, also where the text ends."""
    size = min(len(drafts), len(following))
    wrong = np.flatnonzero(drafts[:size] != following[:size])
    return min(int(wrong[0]) if len(wrong) else size, len(following) - 1)


def figures(steps: Walk, prompts: int, block: int) -> AcceptFigures:
    """Figures of a walk."""
    number = max(len(steps.accepted), 1)
    emitted = int((steps.accepted + 1).sum())
    marginal = tuple(float((steps.accepted >= k).sum() / number) for k in range(1, block + 1))
    return AcceptFigures(prompts, emitted, len(steps.accepted), emitted / number, marginal)


def evaluate_draft(target: Target, draft: DraftNet, params: Params, traces: dict[str, Traces]) -> dict[str, Any]:
    """AcceptFigures by set, as a dict for JSON."""
    result = {}
    for name, each in traces.items():
        fitted = make_draft_net(draft.config, each.tokens.shape[1], target.device, draft.dtype)
        steps = walk(target, fitted, params, each)
        result[name] = asdict(figures(steps, len(each.tokens), draft.config.block_size))
    return result
