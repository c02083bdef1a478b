"""Dense ops, router and experts on a GPU at the published shapes: against the reference, bits by width, with launches
one by one or overlapped, alone or in a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import device_checks as checks
from device_checks import Place
from ling_kernels.cuda import CudaOps
from ling_kernels.cuda.lazy import Gated
from ling_kernels.ops import ROW_TILE, MoeParams
from parity import assert_bits

pytestmark = pytest.mark.gpu

ROWS = [1, 2, 8, 9, 16]
# rows and width of a weight: tiny's in_proj, out_proj and dense down, a rank of four of flash, the demo, odd ones
PROJECTIONS = [(10256, 1536), (1536, 2048), (1536, 4608), (5128, 2560), (2560, 1024), (522, 256), (7, 8), (403, 136)]
# experts, hidden, expert width, chosen, groups, limit: tiny, flash on one and on four ranks, the demo
MODELS = {
    "tiny": (128, 1536, 512, 8, 8, 0.0),
    "flash": (64, 2560, 768, 8, 8, 4.0),
    "flash of four": (512, 2560, 192, 8, 8, 0.0),
    "demo": (16, 256, 48, 4, 4, 0.0),
}
WIDTHS = tuple(range(1, ROW_TILE))


@pytest.fixture(params=MODELS)
def params(place: Place, request: pytest.FixtureRequest) -> MoeParams:
    experts, width, inner, chosen, groups, limit = MODELS[request.param]
    return checks.moe_params(place, experts, width, inner, chosen, groups, limit)


@pytest.mark.parametrize("width", [8, 256, 1536, 2560])
def test_embedding_and_norm(place: Place, width: int) -> None:
    checks.check_embed(place, width)
    for rows in ROWS:
        checks.check_exchange_norm(place, width, rows)


@pytest.mark.parametrize(("n", "width"), PROJECTIONS)
def test_linear(place: Place, n: int, width: int) -> None:
    for rows in ROWS:
        checks.check_linear(place, n, width, rows)


@pytest.mark.parametrize(("inner", "width", "limit"), [(4608, 1536, 0.0), (512, 1536, 2.0), (48, 256, 0.0)])
def test_mlp(place: Place, inner: int, width: int, limit: float) -> None:
    for rows in ROWS:
        checks.check_mlp(place, inner, width, limit, rows)


@pytest.mark.parametrize(("vocab", "width"), [(157184, 1536), (39296, 2560), (403, 136)])
def test_head(place: Place, vocab: int, width: int) -> None:
    for rows in (1, 9, 16):
        checks.check_head(place, vocab, width, rows)
    checks.check_head_ties_and_errors(place, width)


def test_a_projection_applies_the_norm_that_kda_left(place: Place) -> None:
    heads, slices = 16, 8
    o, weight = place.rand(ROW_TILE, heads * 128, seed=1), place.weight(1536, heads * 128, seed=2)
    sums = o.float().view(ROW_TILE, heads, slices, -1).square().sum(-1)
    by_head = o.float().view(ROW_TILE, heads, 128)
    normed = (by_head * torch.rsqrt(by_head.square().mean(-1, keepdim=True) + 1e-6)).flatten(1)
    for rows in ROWS:
        place.ops.gated = Gated(o, sums, 1e-6)
        got = checks.whole(place.ops.linear_partial(o, weight, rows))
        checks.assert_near(got[:rows], (normed @ weight.float().t())[:rows], "normed projection")


@pytest.mark.parametrize("gate_fp32", [False, True])
def test_router(place: Place, params: MoeParams, gate_fp32: bool) -> None:
    ops = CudaOps(place.ops.device, gate_fp32=gate_fp32)
    for rows in ROWS:
        checks.check_route(replace(place, ops=ops), params, rows)
        checks.check_selection(replace(place, ops=ops), params, rows)
    checks.check_route_ties(replace(place, ops=ops), params)
    alone = CudaOps(place.ops.device, gate_fp32=gate_fp32)
    checks.check_norms_in_kernels_after(replace(place, ops=ops), params, 848, alone)


def test_experts(place: Place, params: MoeParams) -> None:
    for rows in ROWS:
        checks.check_experts(place, params, rows)
    checks.check_unchosen_experts_are_dropped(place, params)


def test_gate_up_can_select(place: Place, params: MoeParams) -> None:
    for _ in range(20):
        checks.check_selection_in_gate_up(place, params, CudaOps(place.ops.device))


def layer(ops: CudaOps, params: MoeParams, norm: Tensor, proj: Tensor, out: Tensor, vocabulary: Tensor) -> Callable:
    """A chain of all dense ops over x [ROW_TILE, D]: rows' logits."""

    def run(x: Tensor, rows: int) -> Tensor:
        x, h = ops.exchange_norm(None, x, norm, 1e-6, rows)
        partial = ops.linear_partial(ops.linear(h, proj, rows), out, rows)
        x, h = ops.exchange_norm(partial, x, norm, 1e-6, rows, lazy=True)
        partial = ops.experts(h, ops.route(h, params, rows, lazy=True), params, rows)
        x, h = ops.exchange_norm(partial, x, norm, 1e-6, rows)
        x, h = ops.exchange_norm(ops.mlp(h, params.shared, rows), x, norm, 1e-6, rows)
        return ops.head(h, vocabulary, rows)

    return run


@pytest.fixture
def chain(place: Place, params: MoeParams) -> tuple[Callable[[CudaOps], Callable], Tensor]:
    width = params.gate.shape[1]
    tensors = place.weight(width, seed=1), place.weight(1000, width, seed=2), place.weight(width, 1000, seed=3)
    vocabulary = place.weight(4000, width, seed=4)
    return lambda ops: layer(ops, params, *tensors, vocabulary), place.rand(ROW_TILE, width, seed=5)


@pytest.fixture(params=[False, True], ids=["norms alone", "norms in the kernels after"])
def ops(cuda_ops: CudaOps, request: pytest.FixtureRequest) -> CudaOps:
    ops = CudaOps(cuda_ops.device)
    ops.norm_in_next = request.param
    return ops


def test_a_row_has_its_bits_to_itself(ops: CudaOps, chain: tuple[Callable, Tensor]) -> None:
    build, x = chain
    checks.rows_alone(build(ops), x, WIDTHS, "a layer")


def test_overlapped_launches_give_the_same_bits(
    ops: CudaOps, plain_ops: CudaOps, chain: tuple[Callable, Tensor]
) -> None:
    build, x = chain
    assert not plain_ops.device.pdl
    for rows in (1, 9):
        want = build(plain_ops)(x, rows)[:rows].clone()
        for _ in range(20):
            assert_bits(build(ops)(x, rows)[:rows], want, "logits")


def test_a_graph_gives_the_same_bits(ops: CudaOps, chain: tuple[Callable, Tensor]) -> None:
    build, x = chain
    run, fresh = build(ops), x.flip(0)
    for rows in (1, 9):
        want, want_fresh = run(x, rows)[:rows].clone(), run(fresh, rows)[:rows].clone()
        given, graph = x.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(given, rows)
        for source, expected in ((x, want), (fresh, want_fresh), (x, want)):
            given.copy_(source)
            graph.replay()
            assert_bits(got[:rows], expected, "logits of a replay")
