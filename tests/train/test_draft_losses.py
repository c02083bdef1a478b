"""The losses by hand, the optimised figures, and calibration on data whose truth is known."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from ling_local.train.draft_calibrate import GRID, calibrate, calibration_error, fit, write_calibration
from ling_local.train.draft_evaluate import Walk, _accepted
from ling_local.train.draft_loop import DraftPlan, choose_anchors, ramp, schedule, valid_rows
from ling_local.train.draft_losses import LossWeights, RowTerms, combine, reach

ALPHA = torch.tensor([[0.9, 0.5, 0.2], [0.6, 0.0, 1.0]])
TERMS = RowTerms(torch.tensor([[1.0, 2.0, 3.0], [0.5, 4.0, 9.0]]), ALPHA, torch.tensor([[1.0, 1.0, 0.0]] * 2))
VALID = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]])


def test_accept_length_is_the_expectation_over_all_outcomes() -> None:
    found = combine(TERMS, None, VALID, LossWeights(), 1.0)
    expected = 0.0
    for alpha, valid in zip(ALPHA.tolist(), VALID.tolist(), strict=True):
        chances = [a for a, v in zip(alpha, valid, strict=True) if v]
        for outcome in itertools.product((0, 1), repeat=len(chances)):
            chance = math.prod(a if hit else 1 - a for a, hit in zip(chances, outcome, strict=True))
            expected += chance * (1 + next((i for i, hit in enumerate(outcome) if not hit), len(chances))) / 2
    assert found.accept_length.item() == pytest.approx(expected, abs=1e-5)
    assert found.greedy_length.item() == pytest.approx(3.0)
    assert found.alpha.tolist() == pytest.approx([1.5, 0.5, 0.2])
    assert found.count.tolist() == [2, 2, 1]


def test_losses_are_weighted_by_position_and_cut_where_labels_end() -> None:
    weights = LossWeights(ce=0.3, tv=0.7, length=0.0, decay=2.0)
    found = combine(TERMS, None, VALID, weights, 1.0)
    share = [math.exp(-k / 2) for k in range(3)]
    whole = 2 * share[0] + 2 * share[1] + share[2]
    ce = (share[0] * 1.5 + share[1] * 6.0 + share[2] * 3.0) / whole
    tv = 2 * (share[0] * 0.5 + share[1] * 1.5 + share[2] * 0.8) / whole
    assert found.ce.item() == pytest.approx(ce, rel=1e-5)
    assert found.tv.item() == pytest.approx(tv, rel=1e-5)
    assert found.total.item() == pytest.approx(0.3 * ce + 0.7 * tv, rel=1e-5)


def test_confidence_learns_acceptance_and_does_not_push_it() -> None:
    logits = torch.zeros(2, 3, requires_grad=True)
    alpha = ALPHA.clone().requires_grad_()
    terms = TERMS._replace(alpha=alpha)
    only = LossWeights(ce=0.0, tv=0.0, length=0.0)
    for reached in (False, True):
        logits.grad = None
        combine(terms, logits, VALID, replace(only, reach=reached), 1.0).total.backward()
        assert alpha.grad is None or not alpha.grad.any()
        push = -logits.grad * 2
        # at 0 the estimate is one half: pushed up where acceptance is above, and nothing past the labels
        assert torch.equal(torch.sign(push[:, 0]), torch.tensor([1.0, 1.0]))
        assert push[0, 2] < 0
        assert push[1, 2] == 0
    # row 0 is reached surely, row 2 with 0.45: weighed like that
    assert (push[0, 2] / push[0, 0]).item() == pytest.approx(0.45 * (0.2 - 0.5) / (0.9 - 0.5), rel=1e-4)


def test_the_length_term_pushes_each_acceptance_by_what_hangs_on_it() -> None:
    alpha = ALPHA.clone().requires_grad_()
    weights = LossWeights(ce=0.0, tv=0.0, confidence=0.0, length=0.5, smoothing=1e-6)
    combine(TERMS._replace(alpha=alpha), None, VALID, weights, 0.5).total.backward()
    first = alpha.detach()[0].tolist()
    tails = [math.prod(first[:1]) + math.prod(first[:2]) + math.prod(first), math.prod(first[:2]) + math.prod(first)]
    assert alpha.grad[0, 0].item() == pytest.approx(-0.25 / 2 * tails[0] / first[0], rel=1e-3)
    assert alpha.grad[0, 1].item() == pytest.approx(-0.25 / 2 * tails[1] / first[1], rel=1e-3)
    assert alpha.grad[1, 1] < -0.05  # an acceptance of zero still learns
    assert alpha.grad[1, 2] == 0


def test_reach_is_the_running_product() -> None:
    assert torch.allclose(reach(ALPHA, 0.0), ALPHA.cumprod(-1), atol=1e-6)
    assert reach(ALPHA, 1e-3).isfinite().all()


def test_labels_end_with_the_answer_and_with_the_row() -> None:
    answered = torch.tensor([[False, False, True, True, True, False, True, True]])
    got = valid_rows(answered, torch.tensor([[2, 3, 6, 7, 1]]), 3)[0].tolist()
    assert got == [[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_anchors_are_answer_tokens_with_a_label_all_equally_often() -> None:
    answered = torch.rand(4, 50, generator=torch.Generator().manual_seed(1)) < 0.6
    good = answered & torch.nn.functional.pad(answered[:, 1:], (0, 1))
    seen = torch.zeros(4, 50)
    for seed in range(300):
        noise = torch.rand(4, 50, generator=torch.Generator().manual_seed(seed))
        at = choose_anchors(answered, noise, 5)
        assert good.gather(1, at).all()
        seen.scatter_add_(1, at, torch.ones(4, 5))
    for row in range(4):
        counts = seen[row][good[row]]
        assert counts.min() > 0.6 * counts.mean()


def test_schedules_begin_and_end_where_they_should() -> None:
    plan = DraftPlan(steps=100, rate=1.0, warmup=10, flat=0.5, ramp=(0.2, 0.6))
    assert schedule(plan, 0, 0.0) == pytest.approx(0.1)
    assert schedule(plan, 50, 0.5) == 1.0
    assert schedule(plan, 99, 0.99) == pytest.approx(0.02)
    assert [ramp(plan, done) for done in (0.0, 0.4, 0.9)] == pytest.approx([0.0, 0.5, 1.0])


@pytest.mark.parametrize(
    ("drafts", "following", "accepted"),
    [
        ([1, 2, 3], [1, 2, 3, 4], 3),
        ([1, 2, 3], [1, 9, 3, 4], 1),
        ([9, 2, 3], [1, 2, 3], 0),
        ([1, 2, 3], [1, 2], 1),  # the text ends with 2: it is the step's last token, whoever said it
        ([1, 2, 3], [1], 0),
    ],
)
def test_accepted_drafts_are_counted_as_the_engine_does(drafts, following, accepted) -> None:
    assert _accepted(np.array(drafts), np.array(following)) == accepted


def _walk(scale: float, number: int = 12_000) -> Walk:
    """Blocks of 4 whose true chances are known; the head's logits are too bold by `scale`."""
    rng = np.random.default_rng(3)
    truth = rng.normal(0.8, 1.0, (number, 4))
    accepted = (rng.random((number, 4)) < 1 / (1 + np.exp(-truth))).cumprod(1).sum(1)
    return Walk(accepted, np.arange(number), truth * scale, np.ones(number, dtype=bool))


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_calibration_finds_how_bold_the_head_is(scale: float, tmp_path) -> None:
    steps = _walk(scale)
    found = calibrate(steps, "made up")
    assert np.abs(np.log(np.array(found.temperatures) / scale)).max() < 0.25
    assert found.ece_after < 0.02
    if scale != 1.0:
        assert found.ece_after < 0.5 * found.ece_before
    assert found.num_samples == 6000
    written = json.loads(write_calibration(found, tmp_path).read_text())
    assert written.keys() == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert written["temperatures"] == list(found.temperatures)


def test_calibration_leaves_out_blocks_that_were_cut() -> None:
    steps = _walk(1.0, 4000)
    cut = steps.accepted == 0
    spoiled = steps._replace(whole=~cut)
    assert calibrate(spoiled, "").num_samples == int((~cut[::2]).sum())
    assert len(GRID) == 41
    assert GRID[0] == pytest.approx(0.1)
    assert GRID[-1] == pytest.approx(10)


def test_calibration_error_of_a_known_table() -> None:
    chance = np.array([0.1, 0.1, 0.9, 0.9])
    assert calibration_error(chance, np.array([0, 0, 1, 1])) == pytest.approx(0.1)
    assert calibration_error(chance, np.array([1, 1, 0, 0])) == pytest.approx(0.9)
    assert fit(np.zeros((4, 1)), np.array([0, 1, 0, 1])).tolist() == [pytest.approx(1.0)]
