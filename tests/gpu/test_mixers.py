"""KDA, MLA, sampling and draft ops on a GPU at the published shapes: against the reference, bits by width, launches
overlapped or not, and inside a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import device_mixers as checks
from device_checks import Place, assert_near
from ling_kernels.cuda import CudaOps
from ling_kernels.cuda.prefill import prefill_experts
from ling_kernels.ops import ROW_TILE, Sampling
from ling_kernels.reference import mla, moe
from parity import assert_bits

pytestmark = pytest.mark.gpu

SAMPLINGS = [
    (0.0, 0, 1.0),
    (1.0, 0, 1.0),
    (0.7, 20, 1.0),
    (1.3, 0, 0.8),
    (0.9, 40, 0.6),
    (1.0, 1, 1.0),
    (2.0, 9, 0.0),
    (8.0, 3, 0.95),
]
VOCAB, PADDED = 157100, 157184


@pytest.mark.parametrize("heads", [2, 8, 16, 32])
@pytest.mark.parametrize("rows", [1, 2, 9, 16])
def test_kda_window_and_commit(place: Place, heads: int, rows: int) -> None:
    checks.check_kda_window(place, heads, rows)


@pytest.mark.parametrize("heads", [2, 16])
def test_kda_keeps_a_steps_only_row(place: Place, heads: int) -> None:
    checks.check_kda_keeps_one_row(place, heads)


def test_kda_bits_at_any_width(place: Place) -> None:
    checks.check_kda_bits(place, 16, tuple(range(2, ROW_TILE + 1)), length=48)
    checks.check_kda_bits(place, 2, (5, 16), length=48)


@pytest.mark.parametrize(("heads", "rows"), [(16, 1), (16, 2), (16, 300), (32, 2500)])
def test_kda_prefill(place: Place, heads: int, rows: int) -> None:
    checks.check_kda_prefill(place, heads, rows)


RANKS = pytest.mark.parametrize("rank", [0, 256])  # of the queries


@RANKS
@pytest.mark.parametrize(("heads", "length"), [(16, 0), (16, 8000), (32, 4090), (8, 60), (2, 1000), (16, 20000)])
@pytest.mark.parametrize("rows", [1, 9, 16])
def test_mla(place: Place, heads: int, rank: int, length: int, rows: int) -> None:
    checks.check_mla(place, heads, rank, length, rows)


def test_mla_of_a_gpu_with_little_shared_memory(place: Place) -> None:
    """The form for it sums keys in smaller chunks, so its bits are its own, at any width."""
    properties = place.ops.device.properties
    place.ops.device.properties = replace(properties, shared_bytes=99 * 1024)
    try:
        checks.check_mla(place, 16, 256, 3000, 9)
        checks.check_mla_bits(place, 16, 2108, (3, 8))
    finally:
        place.ops.device.properties = properties


@pytest.mark.parametrize("rank", [0, 8, 200, 256])
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("length", [100, 2107, 4219, 8188])
def test_mla_bits_at_any_width(place: Place, heads: int, rank: int, length: int) -> None:
    checks.check_mla_bits(place, heads, length, (2, 3, 4, 5, 8, 9, 16), rank)


@pytest.mark.parametrize("rows", [1, 9])
def test_mla_in_a_graph(place: Place, rows: int) -> None:
    params, capacity = checks.make_mla(place, 16, 256), 1280
    table = mla.rope_table(capacity, 64, 6e6, place.device)
    proj = place.rand(ROW_TILE, 256 + 576 + 16, seed=4)
    positions, cache = torch.arange(ROW_TILE, device=place.device), place.rand(capacity, 576, seed=5)

    def run() -> Tensor:
        return place.ops.mla(proj, cache, table, positions, params, rows, capacity)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for length in (0, 600, 1200):
        positions.copy_(length + torch.arange(ROW_TILE, device=place.device))
        proj.copy_(place.rand(*proj.shape, seed=length))
        graph.replay()
        got, kept = out[:rows].clone(), cache.clone()
        assert_bits(run()[:rows], got, f"attention after {length}")
        assert_bits(cache, kept, f"cache after {length}")


@pytest.mark.parametrize(("rows", "before"), [(17, 0), (700, 0), (300, 500)])
def test_mla_prefill_is_the_absorbed_form(place: Place, rows: int, before: int) -> None:
    params, capacity = checks.make_mla(place, 16), 1280
    table = mla.rope_table(capacity, 64, 6e6, place.device)
    got_cache = place.rand(capacity, 576, seed=1)
    want_cache = got_cache.clone()
    proj = place.rand(rows, 16 * 193 + 576, seed=2)
    positions = before + torch.arange(rows, device=place.device)
    got = place.ops.mla(proj, got_cache, table, positions, params, rows, capacity)
    want = mla.mla(proj, want_cache, table, positions, params, rows, capacity)
    assert_near(got.float(), want.float(), "prefill attention", 2e-2)  # keys and values are rounded on the way
    assert_near(got_cache.float(), want_cache.float(), "cache rows")


def test_prefill_experts(place: Place) -> None:
    from device_checks import moe_params

    params = moe_params(place, 128, 1536, 512, 8, 8, 2.0)
    h = place.rand(900, 1536, seed=3)
    routing = moe.route(h, params)
    got = prefill_experts(place.ops.device, h, routing, params)
    assert_near(got.float(), moe.experts(h, routing, params, None).float(), "experts of a chunk")
    assert_bits(prefill_experts(place.ops.device, h, routing, params), got, "the same again")


def sampling_of(place: Place, words: tuple[float, int, float], vocab: int = VOCAB) -> Sampling:
    return checks.make_sampling(place, vocab, *words)


@pytest.mark.parametrize("words", SAMPLINGS)
@pytest.mark.parametrize("rows", [1, 9, 16])
@pytest.mark.parametrize("span", [0, 304])
def test_verdict(place: Place, words: tuple[float, int, float], rows: int, span: int) -> None:
    checks.check_verdict(place, VOCAB, PADDED, sampling_of(place, words), rows, span=span)


@pytest.mark.parametrize("words", [(1.0, 1000, 0.95), (1.0, 1000, 1.0), (1.0, 0, 0.95)])
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_ways_to_find_the_lowest_kept(place: Place, words: tuple[float, int, float], scale: float) -> None:
    sampling = sampling_of(place, words)
    for listed in (2048, 4):
        place.ops.listed = listed
        checks.check_verdict(place, VOCAB, PADDED, sampling, 3, thorough=False, span=304, scale=scale)
    place.ops.listed = 2048


def test_the_words_move_on(place: Place) -> None:
    checks.check_advance(place)


@pytest.mark.parametrize("words", SAMPLINGS)
def test_pick(place: Place, words: tuple[float, int, float]) -> None:
    checks.check_pick(place, VOCAB, sampling_of(place, words))


@pytest.mark.parametrize(
    ("width", "heads", "kv_heads", "length"),
    [(1536, 16, 16, 4000), (2560, 32, 8, 300), (256, 2, 2, 20), (256, 6, 1, 9)],
)
@pytest.mark.parametrize(("neox", "rope_dim"), [(True, 128), (False, 64)])
def test_draft(place: Place, width: int, heads: int, kv_heads: int, length: int, neox: bool, rope_dim: int) -> None:
    params = checks.make_draft(place, width, heads, kv_heads, 64, 1000, "vanilla", neox, rope_dim)
    for rows, block in ((1, 8), (9, 9)):
        checks.check_draft(place, params, length, rows, block)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(("rank", "vocab"), [(64, 4096), (256, 157184), (512, 157184)])
def test_markov_picks(place: Place, head: str, rank: int, vocab: int) -> None:
    params = checks.make_draft(place, 1536, 2, 2, rank, vocab, head, True, 128)
    for words in SAMPLINGS[:4]:
        checks.check_markov(place, params, checks.make_sampling(place, vocab, *words), 7)


def mixed(ops: CudaOps, at: checks.Kda, cache: Tensor, latent: checks.MlaParams, rows: int) -> list[Tensor]:
    """A chain of KDA and MLA launches, each reading what the one before wrote: outputs and what is left in memory."""
    place, width = Place(ops, "cuda"), 576 + 16 + (16 * 192 if latent.q_norm is None else latent.q_norm.shape[0])
    table = mla.rope_table(cache.shape[0], 64, 6e6, "cuda")
    positions = 500 + torch.arange(ROW_TILE, device="cuda")
    results = []
    for _ in range(3):
        o, staged = checks.run_window(place, at, at.proj, rows)
        ops.kda_commit(staged, at.conv, at.state, torch.tensor(rows, device="cuda"))
        proj = torch.cat([o, o.new_zeros(ROW_TILE - rows, o.shape[1])]).repeat(1, 2)[:, :width]
        out = ops.mla(proj.bfloat16().contiguous(), cache, table, positions, latent, rows, cache.shape[0])
        results += [o, out[:rows].clone()]
        positions = positions + rows
    return [*results, at.state, at.conv, cache]


@RANKS
def test_overlapped_launches_give_the_same_bits(cuda_ops: CudaOps, plain_ops: CudaOps, rank: int) -> None:
    place = Place(cuda_ops, "cuda")
    start, cache, latent = (
        checks.make_kda(place, 16, ROW_TILE),
        place.rand(640, 576, seed=3),
        checks.make_mla(place, 16, rank),
    )
    for rows in (1, 9):
        want = mixed(plain_ops, start.copy(), cache.clone(), latent, rows)
        for _ in range(10):
            got = mixed(cuda_ops, start.copy(), cache.clone(), latent, rows)
            for number, (a, b) in enumerate(zip(got, want, strict=True)):
                assert_bits(a, b, f"result {number} at {rows} rows")
