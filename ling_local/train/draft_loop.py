"""The training loop of a draft: features online, random anchors, one step on static tensors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ling_local.errors import NonFinite
from ling_local.train.draft_losses import Losses, LossWeights, combine, row_terms, row_terms_in_chunks
from ling_local.train.draft_net import W1, W2, DraftNet, balance_taps, blocks, draft_hidden
from ling_local.train.draft_sampler import Rows
from ling_local.train.draft_target import Target, features
from ling_local.train.optim import Optimizer, Recipe
from ling_local.train.sources import Say
from ling_local.train.stepping import Pace, Replayed, load_state, save_state, schedule

# the optimiser goes by names: tables are AdamW's
TABLES = {W1: "word_embeddings.markov", W2: "lm_head.markov"}


@dataclass(frozen=True)
class DraftPlan:
    """rows sequences and `anchors` blocks of each a step; minutes 0: no limit, else the schedule is squeezed into it.

    ramp   parts of the schedule between which the length term grows from nothing to its weight
    """

    steps: int = 10_000
    rows: int = 48
    anchors: int = 128
    rate: float = 8e-3
    warmup: int = 100
    flat: float = 0.3
    minutes: float = 0.0
    save_minutes: float = 4.0
    ramp: tuple[float, float] = (0.1, 0.4)
    seed: int = 1
    graph: bool = True
    losses: LossWeights = field(default_factory=LossWeights)


def ramp(plan: DraftPlan, done: float) -> float:
    """Share of the length term's weight."""
    low, high = plan.ramp
    return min(max((done - low) / max(high - low, 1e-9), 0.0), 1.0)


def valid_rows(answered: Tensor, at: Tensor, size: int) -> Tensor:
    """[B, A, size] fp32: 1 where the label of row k, the token at at + k + 1, is the target's own, for the leading
    rows of each block whose anchor is. answered [B, T] bool, at [B, A]."""
    places = at[..., None] + torch.arange(size + 1, device=at.device)
    inside = places < answered.shape[1]
    own = answered.gather(1, places.clamp(max=answered.shape[1] - 1).flatten(1)).view_as(places) & inside
    return own.long().cumprod(-1)[..., 1:].float()


def choose_anchors(answered: Tensor, noise: Tensor, count: int) -> Tensor:
    """`count` random places [B, A] of each row whose token and next token are the target's; where a row has fewer,
    the rest are others, whose blocks have no valid row. noise [B, T] in [0, 1)."""
    good = answered & torch.nn.functional.pad(answered[:, 1:], (0, 1))
    return (noise + good).topk(count, dim=1).indices


class DraftStep:
    """One training step; `run` sets the inputs and works on tensors that stay where they are.

    params: fp32 leaves on the target's device, updated in place. pool: what the target wrote.
    """

    def __init__(self, target: Target, draft: DraftNet, params: dict[str, Tensor], pool: Rows, plan: DraftPlan) -> None:
        device, length = target.device, pool.tokens.shape[1]
        self.target, self.draft, self.params, self.plan = target, draft, params, plan
        self.pool = pool.to(device)
        self.optimizer = Optimizer({TABLES.get(name, name): p for name, p in params.items()}, Recipe(decay=0.02))
        for value in self.optimizer.all:
            value.grad = torch.zeros_like(value)
        self.rate, self.ramp = torch.zeros(2, device=device)
        self.index = torch.zeros(plan.rows, dtype=torch.int64, device=device)
        self.noise = torch.zeros(plan.rows, length, device=device)
        self.sums = torch.zeros(6, device=device)  # ce, tv, confidence, accept length, greedy length, steps
        self.alpha, self.count = torch.zeros(2, draft.config.block_size, device=device)
        self.replayed = Replayed(self._body, device, plan.graph)

    def losses(self, ids: Tensor, answered: Tensor, temperature: Tensor, at: Tensor) -> Losses:
        """Losses of the blocks anchored at `at` [B, A] in rows ids [B, T]."""
        target, draft, size = self.target, self.draft, self.draft.config.block_size
        taps, final = features(target, ids, draft.config.target_layers)
        hidden = draft_hidden(draft, self.params, target.embedding, taps, ids, at)
        places = (at[..., None] + torch.arange(size + 1, device=at.device)).clamp(max=ids.shape[1] - 1)
        tokens = ids.gather(1, places.flatten(1)).view_as(places)
        tail = blocks(draft, self.params, hidden, tokens[..., :-1])
        wanted = final[torch.arange(len(ids), device=at.device)[:, None, None], places[..., :-1]]
        heat = temperature.clamp(self.plan.losses.coolest, 1.0)[:, None, None].expand_as(places[..., 1:])
        function = target.net.wrap(row_terms)
        terms = row_terms_in_chunks(
            tail.hidden.flatten(0, 2),
            tail.markov.flatten(0, 2),
            self.params[W2][: target.vocab],
            target.head[: target.vocab],
            wanted.flatten(0, 2),
            tokens[..., 1:].flatten(),
            heat.flatten(),
            function,
        )
        shaped = type(terms)(*(term.view(-1, size) for term in terms))
        sure = None if tail.confidence is None else tail.confidence.flatten(0, 1)
        return combine(shaped, sure, valid_rows(answered, at, size).flatten(0, 1), self.plan.losses, self.ramp)

    def _body(self) -> None:
        ids, answered = self.pool.tokens[self.index].long(), self.pool.answered[self.index]
        at = choose_anchors(answered, self.noise, self.plan.anchors)
        found = self.losses(ids, answered, self.pool.temperature[self.index], at)
        torch._foreach_zero_([value.grad for value in self.optimizer.all])
        found.total.backward()
        self.optimizer.step(self.rate)
        figures = (found.ce, found.tv, found.confidence, found.accept_length, found.greedy_length)
        self.sums += torch.stack((*figures, torch.ones_like(found.ce)))
        self.alpha += found.alpha
        self.count += found.count

    def run(self, number: int, done: float) -> None:
        """Step `number` of the plan; the same number takes the same rows and anchors."""
        plan = self.plan
        rng = np.random.default_rng((plan.seed, number))
        self.rate.fill_(schedule(plan, number, done))
        self.ramp.fill_(ramp(plan, done))
        self.index.copy_(torch.from_numpy(self._rows(number)))
        self.noise.copy_(torch.from_numpy(rng.random(self.noise.shape, dtype=np.float32)))
        self.replayed()

    def _rows(self, number: int) -> np.ndarray:
        """Row numbers of a step: all rows once, in a new order each time round."""
        size, rows = len(self.pool.tokens), self.plan.rows
        wanted = np.arange(number * rows, (number + 1) * rows)
        orders = {e: np.random.default_rng((self.plan.seed, 7, int(e))).permutation(size) for e in set(wanted // size)}
        return np.array([orders[w // size][w % size] for w in wanted])

    def warm_start(self) -> None:
        """Fit fc to the loudness of the taps: before the first step, not after a resume."""
        ids = self.pool.tokens[: min(8, len(self.pool.tokens))].long()
        taps, _ = features(self.target.eager(), ids, self.draft.config.target_layers)
        balance_taps(self.params, taps, self.draft.config.hidden_size)


def train_draft(step: DraftStep, folder: Path, say: Say, resume: bool = False) -> Iterator[dict[str, Any]]:
    """Run the plan, yielding a line of figures about every five seconds. Saves folder/state.pt now and then.

    Raises NonFinite if a loss is no number, EngineError if a saved state is missing or of another plan.
    """
    plan, device = step.plan, step.target.device
    state = load_state(step, plan, folder, ("seed", "steps", "rows", "anchors"), device) if resume else {}
    first, spent = state.get("step", 0), state.get("spent_s", 0.0)
    if not resume:
        step.warm_start()
    begun = time.monotonic() - spent
    said = saved = time.monotonic()
    number = last = first
    pace = Pace(device)
    while number < plan.steps:
        elapsed = time.monotonic() - begun
        done = max(number / plan.steps, elapsed / (plan.minutes * 60) if plan.minutes else 0.0)
        if done >= 1.0:
            break
        pace.wait()
        step.run(number, done)
        pace.mark()
        number += 1
        now = time.monotonic()
        if now - said >= 5 or number == plan.steps:
            yield _figures(step, number, done, now - begun, (number - last) / max(now - said, 1e-9))
            said, last = time.monotonic(), number
        if now - saved >= plan.save_minutes * 60:
            save_state(step, plan, folder, number, now - begun)
            saved = now
            say(f"saved {folder / 'state.pt'}")
    save_state(step, plan, folder, number, time.monotonic() - begun)


def _figures(step: DraftStep, number: int, done: float, elapsed: float, speed: float) -> dict[str, Any]:
    ce, tv, sure, length, greedy, count = step.sums.tolist()
    alpha = (step.alpha / step.count.clamp(min=1)).tolist()
    for tensor in (step.sums, step.alpha, step.count):
        tensor.zero_()
    norm = float(step.optimizer.norm)
    if not (ce == ce and norm == norm):
        raise NonFinite(f"a loss is no number at step {number}", "resume from the last state with a lower --rate")
    count = max(count, 1.0)
    return {
        "step": number,
        "done": round(done, 4),
        "tau": round(length / count, 3),
        "greedy_tau": round(greedy / count, 3),
        "ce": round(ce / count, 4),
        "tv": round(tv / count, 4),
        "confidence": round(sure / count, 4),
        "alpha": [round(a, 3) for a in alpha],
        "rate": round(float(step.rate), 6),
        "grad_norm": round(norm, 3),
        "tok_s": round(speed * step.noise.numel()),
        "blocks_s": round(speed * step.plan.rows * step.plan.anchors),
        "elapsed_s": round(elapsed, 1),
    }
