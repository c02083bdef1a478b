"""What every device's ops must fulfil, against the reference: the same checks run on a GPU and on the emulated one.

`Place` says where: ops, torch device, and how a tensor is declared a weight (only the emulated device wants to know).
Sizes are given by the caller: an emulated block takes milliseconds, a GPU runs the published shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ling_kernels.cuda.dense import PLAN_IDS, PLAN_MASKS, PLAN_WEIGHTS
from ling_kernels.cuda.prefill import prefill_choose
from ling_kernels.ops import ROW_TILE, MlpParams, MoeParams, Routing
from ling_kernels.reference import dense, moe
from parity import assert_bits

# fp32-accumulated bf16 against fp32: inputs and outputs are rounded to 8 bits, so 2^-9 is what rounding alone costs
RELATIVE = 1e-2
# results that stay in fp32: a tensor core truncates each of its sums, which 2^-9 would hide
KEPT = 1e-4


@dataclass(frozen=True)
class Place:
    ops: Any
    device: str
    constant: Callable[..., None] = lambda *tensors: None

    def rand(self, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale
        return made.to(self.device, torch.bfloat16)

    def weight(self, *shape: int, seed: int) -> Tensor:
        """bf16 values, scaled so that a product keeps the size of its input."""
        made = self.rand(*shape, seed=seed, scale=shape[-1] ** -0.5)
        self.constant(made)
        return made


def whole(partial: Tensor) -> Tensor:
    """What a partial adds to the residual stream, [R, D]: parts are added in their order."""
    total = partial if partial.ndim == 2 else partial[0]
    for part in partial[1:] if partial.ndim == 3 else ():
        total = total + part
    return total


def assert_near(got: Tensor, want: Tensor, what: str, bound: float = RELATIVE) -> None:
    """Relative error in norm below the bound, row by row; anything that is not finite fails."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert got.isfinite().all(), f"{what}: not finite"
    error = (got.double() - want.double()).norm(dim=-1) / want.double().norm(dim=-1).clamp(min=1e-30)
    worst = int(error.argmax())
    assert error.max() < bound, f"{what}: relative error {error.max():.2e} in row {worst}"


def rows_alone(run: Callable[[Tensor, int], Tensor], x: Tensor, widths: Sequence[int], what: str) -> None:
    """run(x, rows) gives a row the same bits at every width, at every place, whatever the other rows hold."""
    full = run(x, ROW_TILE)[:ROW_TILE].clone()
    for rows in widths:
        rubbish = x.clone()
        rubbish[rows:] = torch.nan
        assert_bits(run(rubbish, rows)[:rows], full[:rows], f"{what} at {rows} rows")
    turned = run(x.roll(5, 0), ROW_TILE)[:ROW_TILE]
    assert_bits(turned.roll(-5, 0), full, f"{what} at other places")


def check_embed(place: Place, width: int) -> None:
    table = place.weight(50, width, seed=1)
    ids = torch.randint(0, 50, (ROW_TILE,), generator=torch.Generator().manual_seed(2)).to(place.device)
    plain = place.ops.embed(ids, table)
    assert_bits(plain, table[ids], "embedding")
    weight = place.weight(width, seed=3)
    want = place.ops.exchange_norm(None, plain, weight, 1e-6, 5)[1]
    x, h = place.ops.exchange_norm(None, place.ops.embed(ids, table, lazy=True), weight, 1e-6, 5)
    assert_bits(x[:5], plain[:5], "embedding with its norm")
    assert_bits(h[:5], want[:5], "norm of an embedding")


def check_exchange_norm(place: Place, width: int, rows: int) -> None:
    x, partial = place.rand(ROW_TILE, width, seed=3, scale=3.0), place.rand(ROW_TILE, width, seed=4)
    weight = place.weight(width, seed=5)
    several = torch.stack([place.rand(ROW_TILE, width, seed=seed).float() / 3 for seed in range(40, 45)])
    for part in (partial, None, several):
        total, h = place.ops.exchange_norm(part, x, weight, 1e-6, rows)
        want_total, want = dense.exchange_norm(None if part is None else whole(part), x, weight, 1e-6)
        assert_bits(total[:rows], want_total[:rows], "residual stream")
        assert_near(h[:rows], want[:rows], "norm")


def check_linear(place: Place, n: int, width: int, rows: int) -> None:
    x, weight = place.rand(ROW_TILE, width, seed=6), place.weight(n, width, seed=7)
    got = place.ops.linear(x, weight, rows)
    want = (x.float() @ weight.float().t())[:rows]
    assert_near(got[:rows], want, f"linear {n} x {width}")
    assert_near(whole(place.ops.linear_partial(x, weight, rows))[:rows], want, f"parts of {n} x {width}", KEPT)


def check_mlp(place: Place, inner: int, width: int, limit: float, rows: int) -> None:
    x = place.rand(ROW_TILE, width, seed=8, scale=3.0)
    params = MlpParams(place.weight(2 * inner, width, seed=9), place.weight(width, inner, seed=10), limit)
    wide = MlpParams(params.gate_up.float(), params.down.float(), limit)
    got = whole(place.ops.mlp(x, params, rows))
    assert_near(got[:rows], dense.mlp(x.float(), wide)[:rows], f"mlp {inner} x {width}")


def check_head(place: Place, vocab: int, width: int, rows: int) -> None:
    x, weight = place.rand(ROW_TILE, width, seed=11), place.weight(vocab, width, seed=12)
    logits = place.ops.head(x, weight, rows)
    assert logits.dtype == torch.float32
    assert_near(logits[:rows], (x.float() @ weight.float().t())[:rows], "logits", KEPT)
    _, values, ids, span = place.ops.candidates
    parts = logits[:rows].split(span, dim=-1)
    assert len(parts) == values.shape[0]
    for part, (value, id_) in enumerate(zip(values, ids, strict=True)):
        best = parts[part].max(dim=-1)
        assert_bits(value[:rows], best.values, "best logit")
        assert_bits(id_[:rows], (part * span + parts[part].argmax(-1)).int(), "best id")


def check_head_ties_and_errors(place: Place, width: int) -> None:
    """Equal logits: the lower id; a row with a logit that is not finite has NaN for its best where that logit is."""
    x, weight = place.rand(ROW_TILE, width, seed=13), place.weight(64, width, seed=14)
    weight[:] = weight[0]
    x[1, 0] = torch.inf
    place.ops.head(x, weight, 3)
    _, values, ids, span = place.ops.candidates
    starts = torch.arange(0, 64, span, dtype=torch.int32, device=ids.device)
    assert ids[:, 0].equal(starts)
    assert ids[:, 2].equal(starts)
    assert values[:, 1].isnan().all()


def moe_params(
    place: Place, experts: int, width: int, inner: int, chosen: int, groups: int, limit: float = 0.0, shared: int = 0
) -> MoeParams:
    shared = shared or inner
    gate = place.rand(experts, width, seed=15).float() * width**-0.5
    bias = place.rand(experts, seed=16).float() * 0.1
    place.constant(gate, bias)
    mlp = MlpParams(place.weight(2 * shared, width, seed=17), place.weight(width, shared, seed=18), limit / 2)
    return MoeParams(
        gate=gate,
        bias=bias,
        gate_up=place.weight(experts, 2 * inner, width, seed=19),
        down=place.weight(experts, width, inner, seed=20),
        shared=mlp,
        experts_per_token=chosen,
        n_group=groups,
        topk_group=max(1, groups // 2),
        scale=2.5,
        limit=limit,
    )


def check_route(place: Place, params: MoeParams, rows: int) -> Routing:
    x = place.rand(ROW_TILE, params.gate.shape[1], seed=21, scale=2.0)
    place.constant(place.ops._gate(params.gate))
    got = place.ops.route(x, params, rows)
    gate = params.gate if place.ops.gate_fp32 else params.gate.bfloat16().float()
    want = moe.route(x, replace(params, gate=gate))
    scores = torch.sigmoid(x.float() @ gate.t())[:rows]
    # by value: of two scores that tie up to rounding either may be chosen
    chosen, best = ((scores + params.bias).gather(1, r.experts[:rows]) for r in (got, want))
    assert (chosen - best).abs().max() < 1e-5, "chosen experts"
    assert all(len(set(row)) == params.experts_per_token for row in got.experts[:rows].tolist())
    weights = scores.gather(1, got.experts[:rows])
    assert_near(got.weights[:rows], weights / weights.sum(-1, keepdim=True) * params.scale, "router weights", KEPT)
    return got


def check_norms_in_kernels_after(place: Place, params: MoeParams, n: int, alone: Any) -> None:
    """alone: the same ops, whose router and projection to n values leave the norm before them alone: the same bits."""
    alone.norm_in_next = False
    width = params.gate.shape[1]
    projection = place.weight(n, width, seed=28)
    x, weight = place.rand(ROW_TILE, width, seed=26, scale=3.0), place.weight(width, seed=27)
    several = torch.stack([place.rand(ROW_TILE, width, seed=seed).float() for seed in range(50, 55)])
    place.constant(place.ops._gate(params.gate), alone._gate(params.gate))
    for partial in (several, several[:4], several[0].bfloat16()):
        found = []
        for ops in (place.ops, alone):
            total, h = ops.exchange_norm(partial, x, weight, 1e-6, 1, lazy=True)
            routing = ops.route(h, params, 1, lazy=True)
            out = whole(ops.experts(h, routing, params, 1))
            again, normed = ops.exchange_norm(partial, x, weight, 1e-6, 1, lazy=True)
            projected = ops.linear(normed, projection, 1)
            found.append((total, h, out, routing.weights, routing.experts, again, normed, projected))
        for number, (got, want) in enumerate(zip(*found, strict=True)):
            assert_bits(got[:1], want[:1], f"result {number} of kernels that norm {width} values")


def check_selection_in_gate_up(place: Place, params: MoeParams, alone: Any) -> None:
    """One row's experts selected by gate_up, with the norm in the router's kernel or, by the ops `alone`, before it:
    the bits and the plan of a selection by itself, and the bits of a row beside others."""
    alone.norm_in_next = False
    width = params.gate.shape[1]
    x, weight = place.rand(ROW_TILE, width, seed=26, scale=3.0), place.weight(width, seed=27)
    partial = torch.stack([place.rand(ROW_TILE, width, seed=seed).float() for seed in range(50, 54)])
    place.constant(place.ops._gate(params.gate), alone._gate(params.gate))
    found = []
    for ops, rows, lazy in (
        (place.ops, 1, False),
        (place.ops, 1, True),
        (alone, 1, True),
        (alone, 2, True),
        (alone, 9, True),
    ):
        total, h = ops.exchange_norm(partial, x, weight, 1e-6, rows, lazy=True)
        routing = ops.route(h, params, rows, lazy)
        out = ops.experts(h, routing, params, rows)
        found.append((total[:1], h[:1], routing.experts[:1], routing.weights[:1], whole(out)[:1]))
        check_plan(routing, rows)
    for form, results in enumerate(found[1:]):
        for number, (got, want) in enumerate(zip(results, found[0], strict=True)):
            assert_bits(got, want, f"result {number} of form {form} of a selection")


def check_route_ties(place: Place, params: MoeParams) -> None:
    """All scores equal: the lower group wins, in it the lower id."""
    level = replace(params, gate=torch.zeros_like(params.gate), bias=torch.zeros_like(params.bias))
    place.constant(place.ops._gate(level.gate), level.bias)
    x = place.rand(ROW_TILE, params.gate.shape[1], seed=22)
    assert place.ops.route(x, level, 2).experts[:2].tolist() == [list(range(params.experts_per_token))] * 2


def check_selection(place: Place, params: MoeParams, rows: int) -> None:
    """From logits with many ties, infinities and rows that are no numbers: choices, weights and plan, and a row's bits
    whatever the rows beside it."""
    count, generator = params.gate.shape[0], torch.Generator().manual_seed(rows)
    logits = torch.randint(-8, 9, (ROW_TILE, count), generator=generator) / 4
    if rows > 4:
        logits[1, ::3], logits[2, 1::5], logits[3], logits[4, 2::7] = torch.inf, -torch.inf, torch.nan, torch.nan
    bias = (torch.randint(-2, 3, (count,), generator=generator) / 8).to(params.bias.device)
    place.constant(bias)
    params, logits = replace(params, bias=bias), logits.to(bias.device)
    x = place.rand(ROW_TILE, params.shared.gate_up.shape[1], seed=29)
    routing = place.ops._select(logits[None], x, params, rows)
    score = 1 / (1 + torch.exp(-logits[:rows]))
    choice = (score + bias).nan_to_num(nan=-torch.inf)
    groups = choice.view(rows, params.n_group, -1)
    best = _in_order(groups.topk(2).values.sum(-1))[:, : params.topk_group]
    allowed = torch.zeros(groups.shape[:2], dtype=torch.bool, device=bias.device).scatter_(1, best, True)
    allowed = allowed.repeat_interleave(groups.shape[2], 1)
    order = [sorted(range(count), key=lambda e, r=r: (not allowed[r, e], -choice[r, e], e)) for r in range(rows)]
    experts = torch.tensor(order, device=bias.device)[:, : params.experts_per_token]
    assert routing.experts[:rows].tolist() == experts.tolist()
    weights = score.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * params.scale
    torch.testing.assert_close(routing.weights[:rows], weights, rtol=1e-5, atol=1e-7, equal_nan=True)
    chunk = prefill_choose(place.ops.device, logits[:rows].contiguous(), params)
    assert torch.equal(chunk.experts, routing.experts[:rows])
    assert_bits(chunk.weights, routing.weights[:rows], "weights of a prefill chunk's choices")
    check_plan(routing, rows)
    elsewhere = place.ops._plan(x, routing, params, rows)
    assert plan_words(elsewhere.plan, rows) == plan_words(routing.plan, rows), "the plan of choices made elsewhere"
    halves = torch.stack([logits / 2, logits / 2])
    for parts, width in ((halves, rows), (logits[None], 1), (halves, rows // 2 + 1)):
        again = place.ops._select(parts, x, params, width)
        assert again.experts[:width].tolist() == routing.experts[:width].tolist()
        assert_bits(again.weights[:width].nan_to_num(7.0), routing.weights[:width].nan_to_num(7.0), "router weights")
        check_plan(again, width)


def _in_order(values: Tensor) -> Tensor:
    return values.sort(dim=-1, descending=True, stable=True).indices


def plan_words(plan: Tensor, rows: int) -> dict[int, tuple[int, list[int]]]:
    """By expert, in order of the slots, -1 for the shared one: mask of rows, and bits of their weights."""
    plan, made = plan.cpu(), {}
    for slot in range(int(plan[0])):
        mask = int(plan[PLAN_MASKS + slot])
        at = PLAN_WEIGHTS + slot * ROW_TILE
        weights = [int(plan[at + row]) for row in range(rows) if mask >> row & 1]
        made[int(plan[PLAN_IDS + slot]) if slot else -1] = mask, weights
    return made


def check_plan(routing: Routing, rows: int) -> None:
    """Distinct experts in ascending order, each with the rows that chose it and their weights."""
    made = plan_words(routing.plan, rows)
    experts, weights = routing.experts[:rows].tolist(), routing.weights[:rows].cpu().view(torch.int32).tolist()
    listed = sorted({e for row in experts for e in row})
    assert list(made) == [-1, *listed]
    one = int(torch.ones(1).view(torch.int32))
    assert made[-1] == ((1 << rows) - 1, [one] * rows)
    for expert in listed:
        chose = [row for row in range(rows) if expert in experts[row]]
        want = [weights[row][experts[row].index(expert)] for row in chose]
        assert made[expert] == (sum(1 << row for row in chose), want)


def check_experts(place: Place, params: MoeParams, rows: int) -> None:
    x = place.rand(ROW_TILE, params.gate.shape[1], seed=23, scale=2.0)
    place.constant(place.ops._gate(params.gate))
    routing = place.ops.route(x, params, rows)
    shared = MlpParams(params.shared.gate_up.float(), params.shared.down.float(), params.shared.limit)
    wide = replace(params, gate_up=params.gate_up.float(), down=params.down.float(), shared=shared)
    known = Routing(routing.experts[:rows], routing.weights[:rows])
    want = moe.experts(x[:rows].float(), known, wide, rows)
    got = whole(place.ops.experts(x, routing, params, rows))
    assert_near(got[:rows], want, "experts")
    elsewhere = whole(place.ops.experts(x, Routing(routing.experts, routing.weights), params, rows))
    assert_bits(elsewhere[:rows], got[:rows], "experts by a routing made elsewhere")


def check_unchosen_experts_are_dropped(place: Place, params: MoeParams) -> None:
    """An expert that a row did not choose may overflow for it: the row stays finite and keeps its bits."""
    width = params.gate.shape[1]
    x = place.rand(ROW_TILE, width, seed=24)
    routing = place.ops.route(x, params, 1)
    alone = whole(place.ops.experts(x, routing, params, 1))[:1].clone()
    count = params.gate.shape[0]
    chosen = routing.experts[0].tolist()
    others = [e for e in range(count) if e not in chosen][: params.experts_per_token]
    experts = torch.tensor([chosen, others], device=x.device)
    both = Routing(
        torch.cat([experts, experts.new_zeros(14, experts.shape[1])]),
        torch.cat([routing.weights[:1], routing.weights[:1], routing.weights[:1].repeat(14, 1)]),
    )
    gate_up = params.gate_up.clone()
    gate_up[others] = torch.inf
    place.constant(gate_up)
    got = whole(place.ops.experts(x, both, replace(params, gate_up=gate_up), 2))
    assert_bits(got[:1], alone, "row beside one that overflows")
    assert not got[1].isfinite().all()
