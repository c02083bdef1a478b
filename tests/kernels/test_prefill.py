"""What a GPU's prefill does with torch's own kernels, against the reference; the same code runs on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from device_checks import Place, assert_near, moe_params
from device_mixers import make_mla
from emulator import EmulatedDevice
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
    got = prefill_mla(proj, got_cache, table, positions, params, before + rows)
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


@pytest.fixture(scope="module")
def device(built: Path) -> EmulatedDevice:
    return EmulatedDevice(built, ["prefill"])


@pytest.mark.emulated
@pytest.mark.parametrize(("experts", "chosen", "groups", "limit"), [(16, 4, 4, 0.0), (64, 8, 8, 1.0)])
def test_sorted_experts_are_the_references(
    device: EmulatedDevice, experts: int, chosen: int, groups: int, limit: float
) -> None:
    params = moe_params(PLACE, experts, 48, 24, chosen, groups, limit)
    for rows in (1, 50):
        h = PLACE.rand(rows, 48, seed=3)
        routing = moe.route(h, params)
        got, want = prefill_experts(device, h, routing, params), moe.experts(h, routing, params, None)
        assert_near(got.float(), want.float(), "experts")


@pytest.mark.emulated
@pytest.mark.parametrize("count", [1, 40, 1024, 1100, 2500])
def test_choices_are_sorted_by_expert_and_then_by_row(device: EmulatedDevice, count: int) -> None:
    experts = torch.randint(0, 5, (count,), generator=torch.Generator().manual_seed(count))
    experts[experts == 3] = 4  # one that nobody chose
    order, place = (torch.full((count,), -1, dtype=torch.int32) for _ in range(2))
    ends = torch.full((5,), -1, dtype=torch.int32)
    device.launch("prefill_sort", 5, 1024, [experts, order, place, ends, count])
    want = experts.argsort(stable=True)
    assert torch.equal(order.long(), want)
    assert torch.equal(place.long(), want.argsort())
    assert torch.equal(ends.long(), experts.bincount(minlength=5).cumsum(0))
