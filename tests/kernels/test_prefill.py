"""What a GPU's prefill does with torch's own kernels, against the reference; the same code runs on a CPU."""

from __future__ import annotations

import pytest
import torch

from device_checks import Place, assert_near, moe_params
from device_mixers import make_mla
from ling_kernels.cuda.prefill import attention, prefill_experts, prefill_mla
from ling_kernels.reference import mla, moe

PLACE = Place(None, "cpu")


@pytest.mark.parametrize("rank", [0, 48])
@pytest.mark.parametrize(("rows", "before"), [(1, 0), (40, 0), (33, 90), (17, 1)])
def test_expanded_attention_is_the_absorbed_form(rows: int, before: int, rank: int) -> None:
    heads, capacity = 3, 256
    params = make_mla(PLACE, heads, rank)
    table = mla.rope_table(capacity, 64, 6e6)
    got_cache = PLACE.rand(capacity, 576, seed=1)
    want_cache = got_cache.clone()
    proj = PLACE.rand(rows, (rank or heads * 192) + 576 + heads, seed=2)
    positions = before + torch.arange(rows)
    got = prefill_mla(proj, got_cache, table, positions, params)
    want = mla.mla(proj, want_cache, table, positions, params, rows, capacity)
    assert_near(got.float(), want.float(), "attention", 2e-2)  # keys and values are rounded on the way
    assert torch.equal(got_cache, want_cache)


def test_attention_sees_nothing_ahead() -> None:
    q, k, v = (torch.randn(n, 2, size) for n, size in ((5, 24), (9, 24), (9, 16)))
    full = attention(q, k, v)
    assert full.shape == (5, 2, 16)
    k[8], v[8] = 1e3, 1e3
    assert torch.equal(attention(q, k, v)[:4], full[:4])
    assert not torch.equal(attention(q, k, v)[4], full[4])


@pytest.mark.parametrize(("experts", "chosen", "groups", "limit"), [(16, 4, 4, 0.0), (64, 8, 8, 1.0)])
def test_sorted_experts_are_the_references(experts: int, chosen: int, groups: int, limit: float) -> None:
    params = moe_params(PLACE, experts, 48, 24, chosen, groups, limit)
    h = PLACE.rand(50, 48, seed=3)
    routing = moe.route(h, params)
    got, want = prefill_experts(h, routing, params), moe.experts(h, routing, params, None)
    assert_near(got.float(), want.float(), "experts")
