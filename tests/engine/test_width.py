"""The width rule: fast where drafts hit, plain where they do not, and lossless whatever it looks at."""

from __future__ import annotations

import random

import pytest
import torch

from ling_kernels.ops import MAX_STOP_IDS, ROW_TILE, Limits, Sampling
from ling_kernels.reference import sample
from ling_local.engine.width import StepTimes, WidthRule


def simulate(rule: WidthRule, hit: float, cost: dict[str, float], steps: int = 3000, seed: int = 0) -> float:
    """Seconds per token over many steps; each draft holds with chance `hit` and says so with its confidence."""
    chance = random.Random(seed)
    drafts, tokens, seconds = 0, 0, 0.0
    for _ in range(steps):
        following = rule.following()
        width = rule.width([hit] * drafts, following) if drafts else 1
        count = 1
        while count < width and chance.random() < hit:
            count += 1
        took = cost["base"] + cost["row"] * width + cost["draft"] * following
        rule.note(width, following, count, took)
        drafts, tokens, seconds = following, tokens + count, seconds + took
    return seconds / tokens


CPU = {"base": 6.0, "row": 0.15, "draft": 0.4}  # ms: a step, each row, each draft


@pytest.mark.parametrize("block", [1, 4, 8])
@pytest.mark.parametrize("hit", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("steps", [200, 500, 3000])
def test_drafts_that_never_hit_cost_at_most_five_percent(block: int, hit: float, steps: int) -> None:
    plain = CPU["base"] + CPU["row"]
    assert simulate(WidthRule(block), hit, CPU, steps) < 1.05 * plain


@pytest.mark.parametrize(("hit", "gain"), [(0.6, 1.35), (0.8, 2.4), (0.95, 4.0)])
def test_drafts_that_hit_pay(hit: float, gain: float) -> None:
    plain = CPU["base"] + CPU["row"]
    assert simulate(WidthRule(8), hit, CPU) < plain / gain


def test_dear_rows_are_cut_where_confidence_is_low() -> None:
    times = StepTimes()
    for width in (1, 8, 9) * 2:  # what lies between is interpolated
        times.note(width, True, 1.0 + 0.5 * width)
    rule = WidthRule(8, times)
    assert rule.width([0.99] * 8, 8) == 9
    assert rule.width([0.9, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9], 8) == 3
    assert rule.width([0.01] * 8, 8) == 1


def test_the_first_step_of_a_kind_is_not_counted() -> None:
    times = StepTimes()
    times.note(9, True, 80.0)
    assert times.seconds(9, True) is None
    for _ in range(40):
        times.note(9, True, 8.0)
    assert times.seconds(9, True) == 8.0
    assert times.samples(9, True) == 15


def test_a_piece_of_rows_is_measured_before_it_is_judged() -> None:
    """Nine rows cost two pieces, eight one: the rule finds out and stays with eight."""
    rule = WidthRule(8)
    rule.times.note(1, True, 6.0)
    rule.times.note(1, True, 6.0)
    assert rule.width([0.8] * 8, 8) == 8
    for _ in range(2):
        rule.times.note(8, True, 6.5)
    assert rule.width([0.8] * 8, 8) == 9
    for _ in range(2):
        rule.times.note(9, True, 9.0)
    assert rule.width([0.8] * 8, 8) == 8


def test_free_rows_are_all_verified() -> None:
    rule = WidthRule(4)
    for width in (*range(1, 6), *range(1, 6)):
        rule.times.note(width, True, 5.0)
    assert rule.width([0.2, 0.1, 0.1, 0.1], 4) == 5


def test_a_change_of_text_is_noticed() -> None:
    """After a stretch without hits, drafting is tried again and pays."""
    rule = WidthRule(8)
    simulate(rule, 0.0, CPU, steps=400)
    plain = CPU["base"] + CPU["row"]
    assert simulate(rule, 0.9, CPU, steps=1500) < plain / 2


def test_a_machine_that_becomes_faster_is_noticed() -> None:
    """Plain steps are timed again while drafts hit, so their old time does not flatter drafting for ever."""
    slow = {"base": 60.0, "row": 1.5, "draft": 0.1}
    rule = WidthRule(8)
    simulate(rule, 0.5, slow, steps=200)
    before = rule.times.seconds(1, False)
    simulate(rule, 0.5, {"base": 1.0, "row": 0.1, "draft": 0.1}, steps=3000)
    assert rule.times.seconds(1, False) < before / 20


def test_an_interruption_does_not_mislead() -> None:
    rule = WidthRule(8)
    simulate(rule, 0.8, CPU, steps=50)
    rule.note(9, 8, 4, 500.0)
    assert rule.following() == 8
    assert rule.width([0.8] * 8, 8) > 4


# dspark.md section 6.4: p = (0.7, 0.3), q = (0.5, 0.5), a_1 = 0.8; steps per second of widths 1, 2, 3: 1, 0.5, 0.45.
P, Q, DRAWS = (0.7, 0.3), (0.5, 0.5), 40_000


def anticipating_length(second_is_sure: bool) -> int:
    """The wrong rule: the best of 1 + a_1 + a_1 a_2 over cost, where a_2 is known from the first draft itself."""
    first, second = 0.8, 1.0 if second_is_sure else 0.0
    rates = [1.0, 0.5 * (1 + first), 0.45 * (1 + first + first * second)]
    return rates.index(max(rates))


def test_an_anticipating_length_biases_rejection_sampling() -> None:
    """The published counterexample: the emitted token follows (0.85, 0.15) instead of (0.7, 0.3)."""
    chance = random.Random(1)
    zeros = 0
    for _ in range(DRAWS):
        draft = 0 if chance.random() < Q[0] else 1
        if anticipating_length(second_is_sure=draft == 0) == 0:
            token = 0 if chance.random() < P[0] else 1  # the draft is not tested: a plain draw
        elif chance.random() * Q[draft] < P[draft]:
            token = draft
        else:
            token = 0  # residual of p - q
        zeros += token == 0
    assert zeros / DRAWS == pytest.approx(0.85, abs=0.01)


def test_the_same_length_rule_leaves_our_draws_unbiased() -> None:
    """A row draws its own token with noise of its position, so what is tested beside it cannot bias it."""
    logits = torch.tensor(P).log().expand(ROW_TILE, 2).contiguous()
    stops = torch.full((MAX_STOP_IDS,), -1)
    limits = Limits(torch.tensor(9), stops, torch.tensor(False), torch.tensor(0))
    zeros, draws = 0, 4000
    chance = random.Random(2)
    for seed in range(draws):
        sampling = Sampling(False, torch.tensor(1.0), torch.tensor(0), torch.tensor(1.0), torch.tensor(seed), 2)
        draft = 0 if chance.random() < Q[0] else 1
        width = anticipating_length(second_is_sure=draft == 0) + 1
        drafts = torch.tensor([draft, 0])[: width - 1] if width > 1 else None
        verdict = sample.verdict(logits, drafts, torch.arange(ROW_TILE) + 7, sampling, limits, width)
        zeros += int(verdict.tokens[0]) == 0
    assert zeros / draws == pytest.approx(0.7, abs=0.025)
