"""Choosing tokens and judging drafts: exact distributions, and cuts at every place in a window."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ling_kernels.ops import (
    DRAFT_BEST,
    MAX_STOP_IDS,
    RING_HEADER,
    ROW_TILE,
    STOPPED_EOS,
    STOPPED_LENGTH,
    Limits,
    Sampling,
)
from ling_kernels.reference import sample

VOCAB = 12


def sampling(temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Sampling:
    words = torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(seed)
    return Sampling(temperature == 0, *words, VOCAB)


def limits(remaining: int = 99, stops: tuple[int, ...] = (), done: bool = False) -> Limits:
    padded = torch.tensor([*stops, *[-1] * (MAX_STOP_IDS - len(stops))])
    return Limits(torch.tensor(remaining), padded, torch.tensor(done), torch.tensor(5))


def logits_for(tokens: list[int]) -> Tensor:
    """ROW_TILE rows whose argmax are `tokens`, then rubbish."""
    rows = torch.randn(ROW_TILE, VOCAB + 4, generator=torch.Generator().manual_seed(1))
    for row, token in enumerate(tokens):
        rows[row, token] = 10.0
    rows[:, VOCAB:] = 50.0  # padding of the vocabulary must never be chosen
    return rows


def judge(target: list[int], drafts: list[int], **kw) -> sample.Verdict:
    rows = len(target)
    known = torch.tensor(drafts) if drafts else None
    return sample.verdict(logits_for(target), known, torch.arange(ROW_TILE), sampling(), limits(**kw), rows)


def kept(verdict: sample.Verdict) -> list[int]:
    return verdict.tokens[: int(verdict.count)].tolist()


@pytest.mark.parametrize("agree", range(5))
def test_drafts_are_accepted_up_to_the_first_that_differs(agree: int) -> None:
    target = [3, 1, 4, 1, 5]
    drafts = [*target[:agree], *[9] * (4 - agree)][:4]
    verdict = judge(target, drafts)
    count = min(agree, 4) + 1
    assert kept(verdict) == target[:count]
    assert int(verdict.anchor) == target[count - 1]
    assert verdict.entry[:RING_HEADER].tolist() == [5, count, 4, count - 1, 0, 0]
    assert verdict.entry[RING_HEADER : RING_HEADER + count].tolist() == target[:count]
    assert not verdict.done


@pytest.mark.parametrize("place", range(5))
def test_a_stop_inside_a_block_is_cut_there(place: int) -> None:
    target = [3, 1, 4, 2, 5]
    verdict = judge(target, target[:4], stops=(target[place], 11))
    assert kept(verdict) == target[: place + 1]
    assert verdict.done
    assert int(verdict.entry[4]) == STOPPED_EOS


@pytest.mark.parametrize("remaining", range(1, 6))
def test_the_length_limit_inside_a_block_is_cut_there(remaining: int) -> None:
    target = [3, 1, 4, 2, 5]
    verdict = judge(target, target[:4], remaining=remaining)
    assert kept(verdict) == target[:remaining]
    assert verdict.done
    assert int(verdict.entry[4]) == STOPPED_LENGTH


def test_a_stop_at_the_limit_is_a_stop_and_one_past_it_is_not_seen() -> None:
    assert int(judge([1, 2, 3], [1, 2], stops=(2,), remaining=2).entry[4]) == STOPPED_EOS
    assert int(judge([1, 2, 3], [1, 2], stops=(3,), remaining=2).entry[4]) == STOPPED_LENGTH


def test_a_stop_among_rejected_rows_is_not_seen() -> None:
    verdict = judge([1, 2, 3], [1, 9], stops=(3,))
    assert kept(verdict) == [1, 2]
    assert not verdict.done


def test_after_done_nothing_is_kept() -> None:
    verdict = judge([1, 2], [1], done=True)
    assert int(verdict.count) == 0
    assert verdict.done
    assert verdict.entry[1:RING_HEADER].tolist() == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_committed_row_that_is_not_finite_is_an_error(bad: float) -> None:
    logits = logits_for([1, 2, 3])
    logits[0, 0] = bad
    verdict = sample.verdict(logits, torch.tensor([1, 2]), torch.arange(ROW_TILE), sampling(), limits(), 3)
    assert (int(verdict.count), int(verdict.entry[5])) == (0, 1)
    assert verdict.done


def test_a_rejected_row_that_is_not_finite_is_no_error() -> None:
    logits = logits_for([1, 2, 3])
    logits[2] = torch.nan
    verdict = sample.verdict(logits, torch.tensor([1, 9]), torch.arange(ROW_TILE), sampling(), limits(), 3)
    assert kept(verdict) == [1, 2]
    assert int(verdict.entry[5]) == 0


def test_equal_logits_go_to_the_lower_id() -> None:
    assert sample.choose(torch.zeros(4, VOCAB), torch.arange(4), sampling()).tolist() == [0] * 4


FILTERS = {
    "temperature": {"temperature": 0.7},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 1.3, "top_p": 0.8},
    "both": {"temperature": 0.9, "top_k": 6, "top_p": 0.7},
    "top-k over the vocabulary": {"temperature": 1.0, "top_k": 500},
    "nearly no top-p": {"temperature": 1.0, "top_p": 1e-9},
}


def expected_distribution(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """dspark.md section 7.2 in float64: temperature, then top-k, then top-p on what is left."""
    p = (logits.double() / temperature).softmax(0)
    order = p.argsort(descending=True).tolist()
    if top_k:
        order = order[:top_k]
    p = p / p[order].sum()
    kept, mass = [], 0.0
    for token in order:
        if kept and mass >= top_p:
            break
        kept.append(token)
        mass += float(p[token])
    out = torch.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize("name", FILTERS)
def test_sampled_tokens_follow_the_distribution(name: str) -> None:
    draws = 40_000
    row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    params = sampling(**FILTERS[name], seed=11)
    made = sample.choose(row.expand(draws, VOCAB), torch.arange(draws), params)
    counts = torch.bincount(made, minlength=VOCAB).double()
    want = expected_distribution(row, **FILTERS[name]) * draws
    assert counts[want == 0].sum() == 0
    used = want > 0
    chi_squared = ((counts - want)[used] ** 2 / want[used]).sum().item()
    # 99.9 % quantile of chi-squared with up to 11 degrees of freedom is 31.3
    assert chi_squared < 31.3


@pytest.mark.parametrize("name", FILTERS)
def test_a_draft_is_what_the_target_draws_from_the_same_logits(name: str) -> None:
    rows = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    positions, params = torch.arange(200), sampling(**FILTERS[name], seed=11)
    drafts = sample.choose_draft(rows, sample.draft_rule(positions, params))
    assert torch.equal(drafts, sample.choose(rows, positions, params))


def test_a_draft_comes_from_the_best_tokens() -> None:
    vocab = 40 * DRAFT_BEST
    rows = torch.randn(300, vocab, generator=torch.Generator().manual_seed(5)) * 0.1
    params = sampling(temperature=1.0)._replace(vocab=vocab)
    rule = sample.draft_rule(torch.arange(300), params)
    drafts = sample.choose_draft(rows, rule)
    assert (rows > rows.gather(1, drafts[:, None])).sum(-1).max() < DRAFT_BEST
    alone = [sample.choose_draft(rows[i : i + 1], rule, slice(i, i + 1)) for i in range(20)]
    assert torch.equal(torch.cat(alone), drafts[:20])


def test_noise_of_neighbours_is_independent() -> None:
    noise = sample.gumbel(torch.tensor(5), torch.arange(4000), 8)
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)
    assert noise.var().item() == pytest.approx(1.645, abs=0.06)
    centred = noise - noise.mean()
    for other in (centred.roll(1, 0), centred.roll(1, 1)):
        assert abs((centred * other).mean().item()) < 0.05
    seeds = torch.stack([sample.gumbel(torch.tensor(seed), torch.arange(2000), 2)[:, 0] for seed in range(4)])
    assert torch.corrcoef(seeds).fill_diagonal_(0).abs().max() < 0.1


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS)
def test_a_row_draws_the_same_token_in_any_window(params: dict) -> None:
    rows = torch.randn(ROW_TILE, VOCAB, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(ROW_TILE) + 1000
    whole = sample.choose(rows, positions, sampling(**params, seed=2))
    for width in range(1, ROW_TILE):
        for start in range(0, ROW_TILE - width, 3):
            part = slice(start, start + width)
            got = sample.choose(rows[part], positions[part], sampling(**params, seed=2))
            assert got.tolist() == whole[part].tolist()
