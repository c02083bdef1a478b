"""The reference ops against the formulas of the specification, written out plainly in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ling_kernels import KernelError, load
from ling_kernels.ops import ROW_TILE, KdaParams, MlaParams, MlpParams, MoeParams
from ling_kernels.reference import kda, mla, moe
from ling_kernels.reference.dense import linear, rms_norm, swiglu
from parity import assert_bits

HEADS, HEAD, WIDTH = 3, 16, 40


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def relative(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize(("outputs", "inputs"), [(2, 256), (5, 192), (8, 72), (96, 256), (1282, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_a_product_has_the_same_bits_in_every_place(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, x = rand(outputs, inputs).to(dtype), rand(ROW_TILE, inputs).to(dtype)
    turned = linear(x.roll(1, 0), weight, ROW_TILE)
    assert_bits(turned.roll(-1, 0), linear(x, weight, ROW_TILE), "rows one place further")
    for row in range(ROW_TILE):
        alone = linear(x.roll(-row, 0), weight, 1)
        assert_bits(alone[0], turned[(row + 1) % ROW_TILE], f"row {row} alone")


@pytest.fixture
def kda_params() -> KdaParams:
    inner = HEADS * HEAD
    return KdaParams(
        in_proj=rand(5 * inner + HEADS, WIDTH),
        conv=rand(3 * inner, 4),
        a_log=rand(HEADS),
        dt_bias=rand(inner),
        o_norm=1 + 0.1 * rand(HEAD),
        out_proj=rand(WIDTH, inner),
        num_heads=HEADS,
        lower_bound=-5.0,
        eps=1e-6,
    )


def kda_plainly(proj: Tensor, conv: Tensor, state: Tensor, p: KdaParams) -> tuple[Tensor, Tensor]:
    """ling3-model.md 4.1, token by token and head by head in float64."""
    proj, conv, state = proj.double(), conv.double(), state.double().clone()
    inner = HEADS * HEAD
    history, outputs = torch.cat([conv, proj[:, : 3 * inner]]), []
    for t in range(proj.shape[0]):
        mixed = F.silu((p.conv.double().t() * history[t : t + 4]).sum(0)).view(3, HEADS, HEAD)
        f, z = proj[t, 3 * inner : 4 * inner].view(HEADS, HEAD), proj[t, 4 * inner : 5 * inner].view(HEADS, HEAD)
        b = proj[t, 5 * inner :]
        row = []
        for h in range(HEADS):
            q, k, v = (mixed[i, h] for i in range(3))
            q = q / (q.square().sum() + 1e-6).sqrt() / HEAD**0.5
            k = k / (k.square().sum() + 1e-6).sqrt()
            g = -5.0 * torch.sigmoid(p.a_log[h].double().exp() * (f[h] + p.dt_bias.double().view(HEADS, HEAD)[h]))
            decayed = state[h] * g.exp()  # [value, key]
            u = torch.sigmoid(b[h]) * (v - decayed @ k)
            state[h] = decayed + torch.outer(u, k)
            o = state[h] @ q
            o = o / (o.square().mean() + p.eps).sqrt() * p.o_norm.double()
            row.append(o * torch.sigmoid(z[h]))
        outputs.append(torch.cat(row))
    return torch.stack(outputs), state


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_kda_verify_is_the_recurrence(kda_params: KdaParams, rows: int) -> None:
    proj, conv, state = rand(16, 5 * 48 + 3, seed=1), rand(3, 144, seed=2), rand(HEADS, HEAD, HEAD, seed=3)
    before = state.clone(), conv.clone()
    o, staged = kda.verify(proj, conv, state, kda_params, rows)
    want, after = kda_plainly(proj[:rows], conv, state, kda_params)
    assert relative(o[:rows], want) < 1e-5
    assert relative(staged.states[rows], after) < 1e-5
    assert o[rows:].abs().sum() == 0
    assert state.equal(before[0])
    assert conv.equal(before[1])


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("decay", [-8.0, 0.0, 8.0])  # the gate's input: no decay, some, the full exp(-5) a token
def test_kda_prefill_is_the_recurrence(kda_params: KdaParams, rows: int, decay: float) -> None:
    proj, conv, state = rand(rows, 5 * 48 + 3, seed=4), rand(3, 144, seed=5), rand(HEADS, HEAD, HEAD, seed=6)
    proj[:, 144:192] += decay
    want, after = kda_plainly(proj, conv, state, kda_params)
    o = kda.prefill(proj, conv, state, kda_params)
    assert relative(o, want) < 1e-4
    assert relative(state, after) < 1e-4
    assert conv.equal(torch.cat([rand(3, 144, seed=5), proj[:, :144]])[-3:])


def test_kda_commit_takes_any_prefix(kda_params: KdaParams) -> None:
    proj, conv, state = rand(16, 5 * 48 + 3, seed=7), rand(1, 3, 144, seed=8), rand(1, HEADS, HEAD, HEAD, seed=9)
    _, staged = kda.verify(proj, conv[0], state[0], kda_params, 9)
    for count in range(10):
        moved_conv, moved_state = conv.clone(), state.clone()
        kda.commit([staged], moved_conv, moved_state, torch.tensor(count))
        _, want = kda_plainly(proj[:count], conv[0], state[0], kda_params) if count else (None, state[0])
        assert relative(moved_state[0], want) < 1e-5
        assert moved_conv[0].equal(torch.cat([conv[0], proj[:, :144]])[count : count + 3])


@pytest.mark.parametrize("low_rank", [0, 24])
def test_mla_absorbed_is_mla_expanded(low_rank: int) -> None:
    nope, turned, value, latent, rows = 20, 8, 12, 32, 7
    query = low_rank or HEADS * (nope + turned)
    kv_b = rand(HEADS, nope + value, latent, seed=1) / 6
    params = MlaParams(
        in_proj=torch.empty(0),
        q_norm=1 + 0.1 * rand(low_rank) if low_rank else None,
        q_b_proj=rand(HEADS * (nope + turned), low_rank) / 5 if low_rank else None,
        kv_norm=1 + 0.1 * rand(latent),
        w_uk=kv_b[:, :nope],
        w_uv=kv_b[:, nope:],
        out_proj=torch.empty(0),
        num_heads=HEADS,
        rope_dim=turned,
        eps=1e-6,
    )
    proj = rand(200, query + latent + turned + HEADS, seed=2)
    table = mla.rope_table(256, turned, 1e4)
    cache = torch.zeros(256, latent + turned)
    positions = torch.arange(200)
    mla.mla(proj[:193], cache, table, positions[:193], params, 193, 256)
    got = mla.mla(proj[193:], cache, table, positions[193:], params, rows, 256)

    wide = proj.double()
    q, kv, key, gate = wide.split([query, latent, turned, HEADS], dim=1)
    if low_rank:
        q = rms_norm(q.float(), params.q_norm, 1e-6).double() @ params.q_b_proj.double().t()
    q = q.view(200, HEADS, -1)
    kv = rms_norm(kv.float(), params.kv_norm, 1e-6).double() @ kv_b.double().flatten(0, 1).t()
    k_nope, v = kv.view(200, HEADS, -1).split([nope, value], -1)
    q_rope = mla.rotate(q[..., nope:].float(), table[:200]).double()
    k_rope = mla.rotate(key.float(), table[:200]).double()
    scores = torch.einsum("qhd,khd->hqk", q[..., :nope], k_nope) + torch.einsum("qhd,kd->hqk", q_rope, k_rope)
    scores = (scores / (nope + turned) ** 0.5).masked_fill(~torch.ones(200, 200).tril().bool(), -torch.inf)
    want = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * torch.sigmoid(gate)[..., None]
    assert relative(got, want.flatten(1)[193:]) < 1e-5


def test_rope_turns_interleaved_pairs() -> None:
    x, table = rand(3, 8), mla.rope_table(3, 8, 100.0)
    got = mla.rotate(x, table).double()
    for position in range(3):
        for pair in range(4):
            angle = torch.tensor(position * 100.0 ** (-2 * pair / 8), dtype=torch.float64)
            a, b = x[position, 2 * pair].double(), x[position, 2 * pair + 1].double()
            want = torch.stack([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])
            assert torch.allclose(got[position, 2 * pair : 2 * pair + 2], want, atol=1e-6)


def moe_params(experts: int, limit: float = 0.0) -> MoeParams:
    width, inner = 24, 10
    return MoeParams(
        gate=rand(experts, width, seed=1),
        bias=0.3 * rand(experts, seed=2),
        gate_up=rand(experts, 2 * inner, width, seed=3) / 4,
        down=rand(experts, width, inner, seed=4) / 3,
        shared=MlpParams(rand(2 * inner, width, seed=5) / 4, rand(width, inner, seed=6) / 3, limit),
        experts_per_token=4,
        n_group=4,
        topk_group=2,
        scale=2.5,
        limit=limit,
    )


def test_router_chooses_inside_the_best_groups_and_weighs_without_bias() -> None:
    params, h = moe_params(16), rand(9, 24, seed=7)
    routing = moe.route(h, params)
    for row in range(9):
        scores = torch.sigmoid(h[row].double() @ params.gate.double().t())
        choice = (scores + params.bias.double()).view(4, 4)
        groups = choice.topk(2, dim=1).values.sum(1).topk(2).indices
        allowed = [g * 4 + i for g in groups.tolist() for i in range(4)]
        best = sorted(allowed, key=lambda e: -choice.flatten()[e])[:4]
        assert routing.experts[row].tolist() == best
        assert torch.allclose(routing.weights[row].double(), scores[best] / scores[best].sum() * 2.5, atol=1e-6)


def test_router_with_negative_bias_never_leaves_the_groups() -> None:
    params = moe_params(16)
    params.bias.fill_(-9.0)
    groups = moe.route(rand(5, 24), params).experts // 4
    assert all(len(set(row)) <= 2 for row in groups.tolist())


def test_router_ties_go_to_the_lower_id() -> None:
    params = moe_params(16)
    params.gate.zero_()
    params.bias.zero_()
    assert moe.route(rand(3, 24), params).experts.tolist() == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("limit", [0.0, 0.4])
def test_three_ways_to_run_experts_agree(limit: float) -> None:
    params, h = moe_params(16, limit), 3 * rand(16, 24, seed=8)
    routing = moe.route(h, params)
    wide = h.double()
    want = torch.zeros(16, 24, dtype=torch.float64)
    for row in range(16):
        for expert, weight in zip(routing.experts[row].tolist(), routing.weights[row].tolist(), strict=True):
            gate, up = (params.gate_up[expert].double() @ wide[row]).chunk(2)
            gate = F.silu(gate)
            if limit:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            want[row] += weight * (params.down[expert].double() @ (gate * up))
    for way in (
        moe._all(h, routing, params, 16),
        moe._gathered(h, routing, params, 16),
        moe._grouped(h, routing, params),
    ):
        assert relative(way, want) < 1e-5


def test_an_expert_that_was_not_chosen_cannot_spoil_a_row() -> None:
    params, h = moe_params(16), rand(1, 24)
    routing = moe.route(h, params)
    clean = moe.experts(h, routing, params, 1)
    for expert in set(range(16)) - set(routing.experts[0].tolist()):
        params.gate_up[expert] = torch.nan
    assert moe.experts(h, routing, params, 1).equal(clean)


def test_clamp_is_after_silu_and_one_sided_on_the_gate() -> None:
    gate, up = torch.tensor([9.0, -9.0, 1.0, 9.0]), torch.tensor([9.0, -9.0, 0.5, -9.0])
    got = swiglu(torch.cat([gate, up]), 4.0)
    want = torch.tensor([4.0 * 4.0, F.silu(gate[1]) * -4.0, F.silu(gate[2]) * 0.5, -16.0])
    assert torch.allclose(got, want)
    assert torch.allclose(swiglu(torch.cat([gate, up]), 0.0), F.silu(gate) * up)


def test_an_unknown_device_has_no_kernels() -> None:
    with pytest.raises(KernelError, match="abacus"):
        load("abacus")
