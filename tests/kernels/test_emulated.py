"""The GPU's dense kernels and their host side, run on a CPU: what a machine without a GPU can know about them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import device_checks as checks
from device_checks import Place
from emulator import ORDERS
from ling_kernels.cuda import dense
from ling_kernels.cuda.dense import DOWN_FORMS, DenseOps
from ling_kernels.cuda.lazy import Gated
from ling_kernels.cuda.tiles import router_parts
from ling_kernels.ops import ROW_TILE, KernelError, Routing
from settled import SettledDevice

pytestmark = pytest.mark.emulated

# rows of the weight, their width: whole spans of a warp, several tiles a block among them, and others
SHAPES = [(5, 8), (40, 48), (33, 136), (96, 256), (33, 640), (150, 384)]
ROWS = [1, 8, 9, 16]
UNITS = ["norm", "gemm", "part", "moe", "route"]


@pytest.fixture(scope="module")
def device(built: Path) -> Iterator[SettledDevice]:
    with SettledDevice(built, UNITS).in_order() as device:
        yield device


@pytest.fixture
def place(device: SettledDevice) -> Place:
    return Place(DenseOps(device), "cpu", device.constant)


@pytest.mark.parametrize("width", [8, 48, 256, 1544])
def test_embedding_and_norm(place: Place, width: int) -> None:
    checks.check_embed(place, width)
    for rows in (1, 16):
        checks.check_exchange_norm(place, width, rows)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("n", "width"), SHAPES)
def test_linear(place: Place, n: int, width: int, rows: int) -> None:
    checks.check_linear(place, n, width, rows)


def test_linear_with_many_warps_and_many_tiles_a_block(tmp_path: Path, place: Place) -> None:
    checks.check_linear(place, 16, 1024, 3)
    checks.check_linear(place, 20 * 16, 32, 3)
    assert "linear_8" in place.ops.device.launched


@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize(("inner", "width"), [(20 * 8, 48), (48, 256)])
def test_mlp(place: Place, inner: int, width: int, limit: float) -> None:
    for rows in (1, 11):
        checks.check_mlp(place, inner, width, limit, rows)


@pytest.mark.parametrize(("vocab", "width"), [(64, 48), (403, 136)])
def test_head(place: Place, vocab: int, width: int) -> None:
    for rows in (1, 16):
        checks.check_head(place, vocab, width, rows)


def test_head_ties_and_errors(place: Place) -> None:
    checks.check_head_ties_and_errors(place, 32)


def test_a_projection_applies_the_norm_that_kda_left(place: Place) -> None:
    heads, slices, rows = 3, 8, 5
    o, weight = place.rand(ROW_TILE, heads * 128, seed=1), place.weight(24, heads * 128, seed=2)
    sums = o.float().view(ROW_TILE, heads, slices, 16).square().sum(-1)
    place.ops.gated = Gated(o, sums, 1e-6)
    got = checks.whole(place.ops.linear_partial(o, weight, rows))
    by_head = o.float().view(ROW_TILE, heads, 128)
    normed = (by_head * torch.rsqrt(by_head.square().mean(-1, keepdim=True) + 1e-6)).flatten(1)
    checks.assert_near(got[:rows], (normed @ weight.float().t())[:rows], "normed projection")
    assert place.ops.gated is None
    plain = checks.whole(place.ops.linear_partial(o, weight, rows))
    checks.assert_near(plain[:rows], (o.float() @ weight.float().t())[:rows], "plain one")


@pytest.mark.parametrize("gate_fp32", [False, True])
@pytest.mark.parametrize(
    ("experts", "chosen", "groups"), [(16, 4, 4), (64, 8, 8), (128, 8, 8), (256, 8, 4), (512, 8, 8), (24, 2, 1)]
)
def test_router(device: SettledDevice, experts: int, chosen: int, groups: int, gate_fp32: bool) -> None:
    place = Place(DenseOps(device, gate_fp32=gate_fp32), "cpu", device.constant)
    params = checks.moe_params(place, experts, 40, 8, chosen, groups)
    for rows in (1, 16):
        checks.check_route(place, params, rows)
    checks.check_route_ties(place, params)


@pytest.mark.parametrize(
    ("experts", "chosen", "groups"),
    [(8, 2, 2), (16, 4, 4), (24, 2, 1), (128, 8, 8), (256, 8, 2), (320, 8, 8), (512, 8, 8), (512, 8, 32), (512, 8, 1)],
)
def test_selection(place: Place, experts: int, chosen: int, groups: int) -> None:
    params = checks.moe_params(place, experts, 8, 8, chosen, groups)
    for rows in (1, 2, 16):
        checks.check_selection(place, params, rows)


@pytest.mark.parametrize(("width", "gate_fp32"), [(2080, False), (704, True), (1400, True)])
def test_a_wide_router_is_shared_by_two_blocks(device: SettledDevice, width: int, gate_fp32: bool) -> None:
    """The last one takes several turns, too."""
    place = Place(DenseOps(device, gate_fp32=gate_fp32), "cpu", device.constant)
    params = checks.moe_params(place, 24, width, 8, 4, 1)
    for rows in (1, 11):
        checks.check_route(place, params, rows)
    checks.rows_alone(
        lambda x, rows: place.ops.route(x, params, rows).weights, place.rand(ROW_TILE, width, seed=9), (1, 9), ""
    )


@pytest.mark.parametrize(
    ("width", "gate_fp32"), [(8, False), (264, True), (1544, False), (2080, False), (704, True), (4096, False)]
)
def test_norms_in_the_kernels_after_leave_the_same_bits(device: SettledDevice, width: int, gate_fp32: bool) -> None:
    place = Place(DenseOps(device, gate_fp32), "cpu", device.constant)
    device.launched.clear()
    checks.check_norms_in_kernels_after(
        place, checks.moe_params(place, 24, width, 8, 4, 1), 40, DenseOps(device, gate_fp32)
    )
    count = device.launched.count
    wide = width > 2048  # than what a projection's warps have on their way at once
    parts, _ = router_parts(place.ops._gate(torch.empty(4, width)).shape[1])
    assert (count("router_normed"), count("linear_normed")) == (3 if parts == 1 else 0, 0 if wide else 3)
    assert count(f"router_row_{parts}") == (3 if parts == 1 else 6)
    assert count("exchange_norm") == 6 + 3 * wide + 3 * (parts > 1)


@pytest.mark.parametrize(
    ("experts", "chosen", "groups", "width", "inner", "shared"),
    [
        (16, 4, 4, 48, 24, 24),
        (24, 2, 1, 136, 48, 88),
        (128, 8, 8, 384, 136, 16),
        (128, 8, 8, 1544, 40, 24),
        (256, 8, 4, 136, 24, 24),
        (512, 8, 8, 2080, 24, 40),
    ],
)
def test_gate_up_can_select(
    device: SettledDevice, place: Place, experts: int, chosen: int, groups: int, width: int, inner: int, shared: int
) -> None:
    params = checks.moe_params(place, experts, width, inner, chosen, groups, 1.0, shared)
    device.launched.clear()
    checks.check_selection_in_gate_up(place, params, DenseOps(device))
    count = device.launched.count
    assert count(f"experts_choose_gate_up_{1 if experts <= 128 else 4}") == 2
    assert (count("route_select_8"), count("route_select_16")) == (2, 1)


def test_norms_that_no_kernel_after_can_do(device: SettledDevice) -> None:
    """Of several rows, of rows that are read otherwise, too wide for a router's threads, before a long projection."""
    place = Place(DenseOps(device), "cpu", device.constant)
    launched = device.launched
    x, weight = place.rand(ROW_TILE, 48, seed=1), place.weight(48, seed=2)
    for rows, lazy in ((2, True), (1, False)):
        place.ops.exchange_norm(x, x, weight, 1e-6, rows, lazy)
        assert launched.pop() == "exchange_norm"
    _, h = place.ops.exchange_norm(x, x, weight, 1e-6, 1, lazy=True)
    place.ops.linear(h, place.weight(16 * 4, 48, seed=3), 1)
    assert launched[-2:] == ["exchange_norm", "linear_8"]
    params = checks.moe_params(place, 8, 4104, 8, 2, 1)
    place.constant(place.ops._gate(params.gate))
    x, weight = place.rand(ROW_TILE, 4104, seed=4), place.weight(4104, seed=5)
    _, h = place.ops.exchange_norm(x, x, weight, 1e-6, 1, lazy=True)
    place.ops.route(h, params, 1, lazy=True)
    assert launched[-3:] == ["exchange_norm", "router_8", "route_select_8"]


@pytest.mark.parametrize(
    ("width", "inner", "shared", "limit"),
    [(48, 24, 24, 0.0), (48, 48, 88, 1.0), (48, 136, 16, 0.0), (384, 40, 24, 1.0)],
)
def test_experts(place: Place, width: int, inner: int, shared: int, limit: float) -> None:
    params = checks.moe_params(place, 16, width, inner, 4, 4, limit, shared)
    for rows in (1, 3, 16):
        checks.check_experts(place, params, rows)
    checks.check_unchosen_experts_are_dropped(place, params)


def test_every_form_of_down_leaves_the_same_bits(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in how many experts they ask for at once; 9 rows of 4 experts each are more than any of them."""
    params = checks.moe_params(place, 64, 136, 40, 4, 8)
    place.constant(place.ops._gate(params.gate))
    x = place.rand(ROW_TILE, 136, seed=33)
    for rows, forms, tiles in ((1, DOWN_FORMS[0], (1,)), (9, DOWN_FORMS[1], (1, 2, 4))):
        routing, found = place.ops.route(x, params, rows), []
        for ahead, together in itertools.product(forms, tiles):
            name = f"experts_down_{8 if rows <= 8 else 16}_{ahead}"
            monkeypatch.setattr(DenseOps, "_down_name", lambda *_, name=name: name)
            monkeypatch.setattr(dense, "tiles_together", lambda *_, together=together: together)
            found.append(checks.whole(place.ops.experts(x, routing, params, rows))[:rows].clone())
            assert place.ops.device.launched[-1] == name
        for other in found[1:]:
            checks.assert_bits(other, found[0], f"down of {rows} rows")


@pytest.mark.parametrize("width", [136, 384])
def test_a_row_has_its_bits_to_itself(place: Place, width: int) -> None:
    x = place.rand(ROW_TILE, width, seed=30)
    weight, norm = place.weight(50, width, seed=31), place.weight(width, seed=32)
    params = checks.moe_params(place, 16, width, 24, 4, 4)
    place.constant(place.ops._gate(params.gate))
    widths = (1, 7, 8, 9, 15)
    checks.rows_alone(lambda x, rows: place.ops.linear(x, weight, rows), x, widths, "linear")
    checks.rows_alone(lambda x, rows: place.ops.head(x, weight, rows), x, widths, "head")
    checks.rows_alone(lambda x, rows: place.ops.exchange_norm(x, x, norm, 1e-6, rows)[1], x, widths, "norm")
    checks.rows_alone(lambda x, rows: checks.whole(place.ops.mlp(x, params.shared, rows)), x, widths, "mlp")
    checks.rows_alone(lambda x, rows: place.ops.route(x, params, rows).weights, x, widths, "router weights")

    def through_experts(x: torch.Tensor, rows: int) -> torch.Tensor:
        return checks.whole(place.ops.experts(x, place.ops.route(x, params, rows), params, rows))

    checks.rows_alone(through_experts, x, widths, "experts")


def all_results(machine: SettledDevice) -> list[torch.Tensor]:
    """What every kernel of this file leaves, for 11 rows, and what those do that norm one."""
    ops = DenseOps(machine)
    place, rows = Place(ops, "cpu", machine.constant), 11
    params = checks.moe_params(place, 64, 384, 40, 8, 8)
    place.constant(place.ops._gate(params.gate))
    x, norm, weight = place.rand(ROW_TILE, 384, seed=40), place.weight(384, seed=41), place.weight(300, 384, seed=42)
    total, h = place.ops.exchange_norm(x, x, norm, 1e-6, rows)
    routing = place.ops.route(h, params, rows)
    out, mlp = (
        checks.whole(t) for t in (place.ops.experts(h, routing, params, rows), place.ops.mlp(h, params.shared, rows))
    )
    projected, logits = place.ops.linear(h, weight, rows), place.ops.head(h, weight, rows)
    _, values, ids, _ = place.ops.candidates
    rowwise = (total, h, routing.experts, routing.weights, out, mlp, projected, logits)
    one, normed = ops.exchange_norm(x, x, norm, 1e-6, 1, lazy=True)
    first = ops.route(normed, params, 1, lazy=True)
    alone = (one, normed, checks.whole(ops.experts(normed, first, params, 1)), first.experts, first.weights)
    one, normed = ops.exchange_norm(x, x, norm, 1e-6, 1, lazy=True)
    alone = (*alone, one, normed, ops.linear(normed, weight[:16], 1))
    first = ops.route(h, params, 1, lazy=True)
    alone = (*alone, checks.whole(ops.experts(h, first, params, 1)), first.experts, first.weights)
    return [*(t[:rows] for t in rowwise), values[:, :rows], ids[:, :rows], *(t[:1] for t in alone)]


@pytest.mark.parametrize("order", ORDERS[1:])
def test_the_order_of_threads_changes_nothing(built: Path, order: str) -> None:
    """What a missing barrier would change."""
    # few multiprocessors: blocks go from tile to tile
    wanted = all_results(SettledDevice(built, UNITS, num_sms=1))
    for got, want in zip(all_results(SettledDevice(built, UNITS, num_sms=1, order=order)), wanted, strict=True):
        checks.assert_bits(got.float(), want.float(), "results")


def test_unsupported_sizes_are_named(place: Place) -> None:
    with pytest.raises(KernelError, match="width of a projection 12"):
        place.ops.linear(place.rand(ROW_TILE, 12, seed=1), place.rand(5, 12, seed=2), 1)
    with pytest.raises(KernelError, match="17 rows"):
        place.ops.linear(place.rand(32, 16, seed=1), place.rand(5, 16, seed=2), 17)
    routing = Routing(torch.zeros(ROW_TILE, 9, dtype=torch.int64), torch.zeros(ROW_TILE, 9))
    with pytest.raises(KernelError, match="9 experts for a token"):
        place.ops._plan(place.rand(ROW_TILE, 16, seed=3), routing, checks.moe_params(place, 16, 16, 8, 9, 1), 1)


def test_the_emulator_sees_an_early_touch(device: SettledDevice, place: Place) -> None:
    """The guard itself: a weight that was not declared one is an activation, and it is loaded before the wait."""
    with pytest.raises(AssertionError, match="touched before the wait"):
        place.ops.linear(place.rand(ROW_TILE, 128, seed=1), place.rand(5, 128, seed=2), 1)


@pytest.mark.parametrize("between", [False, True])
def test_the_emulator_sees_an_early_read_of_what_may_not_be_there(
    device: SettledDevice, place: Place, between: bool
) -> None:
    """The residual stream is read early, which takes a kernel behind its writer that lets the next one start late."""
    x, norm, weight = place.rand(1, 384, seed=1), place.weight(384, seed=2), place.weight(300, 384, seed=3)
    device.settle()
    total, h = place.ops.exchange_norm(x, x, norm, 1e-6, 1)
    if between:
        place.ops.linear(h, weight, 1)
    twice, _ = place.ops.exchange_norm(x, total, norm, 1e-6, 1)
    assert torch.equal(twice, total + x) == between
