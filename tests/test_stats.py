"""Figures: definitions at known times, and identities that hold for any run."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_local.stats import Tally
from ling_local.types import FinishReason, Stats, StepResult


def fold(steps: list[StepResult], taken_s: float = 0.0) -> Stats:
    tally = Tally(taken_s, prompt_tokens=7, context_limit=100)
    for step in steps:
        tally.add(step)
    return tally.stats()


def block(size: int, time_s: float, drafted: int | None = None) -> StepResult:
    return StepResult(tuple(range(size)), drafted if drafted is not None else size - 1, size - 1, time_s)


@pytest.mark.parametrize("num_steps", [2, 3, 50])
def test_four_tokens_every_20_ms_are_5_ms_a_token_at_every_length(num_steps: int) -> None:
    """C091."""
    stats = fold([block(4, 1 + 0.02 * i) for i in range(num_steps)])
    assert stats.tpot_s == pytest.approx(0.005)
    assert stats.step_s == pytest.approx(0.020)
    assert stats.tok_s == pytest.approx(200)
    assert stats.accept_length == 4


def test_single_tokens_read_as_t_last_minus_t_first_over_n_minus_1() -> None:
    stats = fold([block(1, t) for t in (1.0, 1.5, 2.5, 4.0)], taken_s=0.25)
    assert stats.tpot_s == pytest.approx((4.0 - 1.0) / 3)
    assert stats.ttft_s == pytest.approx(0.75)
    assert stats.wall_s == pytest.approx(3.75)


def test_one_token_and_one_step_leave_times_between_tokens_undefined() -> None:
    """C103."""
    for size in (1, 4):
        stats = fold([block(size, 1.0)])
        assert stats.tpot_s is stats.tok_s is stats.step_s is None
        assert stats.tokens == size
        assert stats.ttft_s == 1.0


def test_nothing_at_all_is_undefined_and_not_zero() -> None:
    stats = fold([])
    assert stats.ttft_s is stats.ttfa_s is stats.tpot_s is stats.accept_length is stats.prefill_s is None
    assert (stats.tokens, stats.steps, stats.prompt_tokens, stats.context_limit) == (0, 0, 7, 100)


def test_a_last_step_without_ids_counts_no_step() -> None:
    stats = fold([block(2, 1.0), StepResult((), 0, 0, 1.5, FinishReason.CANCELLED)])
    assert (stats.steps, stats.tokens, stats.accept_length) == (1, 2, 2.0)
    assert stats.wall_s == 1.5


def test_prefill_counts_come_from_the_first_step() -> None:
    stats = fold([StepResult((1,), cached=3, prefilled=4, prefill_s=0.5, time_s=1.0), block(1, 2.0)])
    assert (stats.cached_tokens, stats.prefill_s) == (3, 0.5)


def test_a_stop_inside_a_block_counts_what_was_kept() -> None:
    """C087 for stops that the host finds: five accepted, the stop is complete with the third id."""
    tally = Tally(0.0, 1, 10)
    tally.add(StepResult(tuple(range(6)), 5, 5, 1.0), 3)
    stats = tally.stats()
    assert (stats.tokens, stats.accepted, stats.accepted_by_position) == (3, 2, (1, 1))
    assert stats.accept_length == 3


def test_thinking_is_counted_and_the_answer_is_timed_apart() -> None:
    tally = Tally(0.0, 1, 10)
    tally.add(block(3, 1.0), num_thinking=3)
    tally.add(block(3, 2.0), num_thinking=1, has_answer=True)
    tally.add(block(3, 3.0), has_answer=True)
    stats = tally.stats()
    assert (stats.tokens, stats.thinking_tokens) == (9, 4)
    assert (stats.ttft_s, stats.ttfa_s) == (1.0, 2.0)


def test_no_drafts_is_accept_length_one() -> None:
    stats = fold([block(1, float(i)) for i in range(5)])
    assert (stats.accept_length, stats.drafted, stats.accepted_by_position) == (1.0, 0, ())


@st.composite
def runs(draw: st.DrawFn) -> list[StepResult]:
    now, steps = 0.0, []
    for _ in range(draw(st.integers(1, 30))):
        now += draw(st.floats(1e-4, 1.0))
        drafted = draw(st.integers(0, 8))
        steps.append(block(1 + draw(st.integers(0, drafted)), now, drafted))
    return steps


@given(steps=runs(), cut=st.integers(0, 8))
def test_identities(steps: list[StepResult], cut: int) -> None:
    whole = fold(steps)
    assert whole.accept_length is not None
    assert whole.tokens == sum(len(step.ids) for step in steps)
    assert whole.accept_length == pytest.approx(1 + sum(whole.accepted_by_position) / whole.steps)
    last = steps[-1]
    kept = last.ids[: max(1, len(last.ids) - cut)]
    stats = fold([*steps[:-1], StepResult(kept, last.drafted, min(last.accepted, len(kept) - 1), last.time_s)])
    assert stats.accept_length is not None
    assert stats.tokens == pytest.approx(stats.steps * stats.accept_length)
    assert stats.accepted == sum(stats.accepted_by_position) <= stats.drafted
    assert list(stats.accepted_by_position) == sorted(stats.accepted_by_position, reverse=True)
    assert stats.tokens == stats.steps + stats.accepted
    if stats.tpot_s is not None:
        assert stats.tok_s is not None
        assert stats.tpot_s * stats.tok_s == pytest.approx(1)
        later = stats.tokens - len(steps[0].ids)
        assert stats.step_s is not None
        assert math.isclose(stats.step_s * (stats.steps - 1), stats.tpot_s * later)


def test_folding_is_linear() -> None:
    def cost(num_steps: int) -> float:
        tally = Tally(0.0, 1, 10)
        begun = time.process_time()
        for i in range(num_steps):
            tally.add(block(4, float(i)))
            tally.stats()
        return time.process_time() - begun

    cost(1000)
    assert cost(20_000) < 20 * max(cost(2000), 0.002)


def test_the_gpus_own_time_leaves_out_the_first_step_like_the_callers() -> None:
    tally = Tally(0.0, 3, 100)
    for number in range(4):
        tally.add(StepResult((1,), time_s=1 + 0.5 * number, gpu_s=9.0 if number == 0 else 0.4))
    stats = tally.stats()
    assert stats.step_s == pytest.approx(0.5)
    assert stats.gpu_step_s == pytest.approx(0.4)
    tally = Tally(0.0, 3, 100)
    tally.add(StepResult((1,), time_s=1.0))
    tally.add(StepResult((1,), time_s=2.0))
    assert tally.stats().gpu_step_s is None
