"""KDA: gated delta-rule attention with a recurrent state (ling3-model.md section 4.1).

`verify` is the sequential recurrence over a window; `prefill` is the chunked form of the same function, equal up to
rounding. Both start from the raw projections q‖k‖v‖f‖g‖b and end with the gated, normalised output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ling_kernels.ops import KdaParams, KdaStaged, Limits
from ling_kernels.reference.dense import rms_norm

# With decays of at least -5 a tile of 16 reaches exp(80), inside fp32's exp(88): the reason for the lower bound.
TILE = 16
L2_EPS = 1e-6


class _Inputs(NamedTuple):
    """Inputs of the recurrence, fp32: q, k, v, g [R, H, head]; beta [R, H]; z [R, P] is the output gate's."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    z: Tensor


def _prepare(proj: Tensor, raw: Tensor, params: KdaParams) -> _Inputs:
    """Convolution, SiLU, L2 norm, decay and beta for all rows. raw [3+R, 3P]: history, then this window's rows."""
    rows, heads = proj.shape[0], params.num_heads
    inner = params.dt_bias.shape[0]
    taps = params.conv.float().t().contiguous()  # [4, 3P]
    wide = raw.float()
    mixed = wide[:rows] * taps[0]
    for j in range(1, 4):
        mixed = mixed + wide[j : j + rows] * taps[j]
    q, k, v = F.silu(mixed).view(rows, 3, heads, -1).unbind(1)
    f, z, b = proj[:, 3 * inner :].float().split([inner, inner, heads], dim=1)
    g = params.lower_bound * torch.sigmoid(params.a_log.exp()[:, None] * (f + params.dt_bias).view(rows, heads, -1))
    q = _l2_norm(q) / q.shape[-1] ** 0.5
    return _Inputs(q, _l2_norm(k), v, g, torch.sigmoid(b), z)


def _l2_norm(x: Tensor) -> Tensor:
    # division by the root, as the published kernels do; a product with rsqrt rounds differently
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _gated(o: Tensor, z: Tensor, params: KdaParams, dtype: torch.dtype) -> Tensor:
    """Norm per head, then the sigmoid gate. o [R, H, head] fp32 -> [R, P]."""
    o = rms_norm(o, params.o_norm, params.eps)
    return (o.flatten(1) * torch.sigmoid(z)).to(dtype)


def verify(
    proj: Tensor, conv: Tensor, state: Tensor, params: KdaParams, rows: int, limits: Limits | None = None
) -> tuple[Tensor, KdaStaged]:
    raw = torch.cat([conv, proj[:, : conv.shape[1]]])
    x = _prepare(proj, raw, params)
    decay = x.g.exp()
    heads, head = x.k.shape[1], x.k.shape[2]
    states = torch.empty(rows + 1, *state.shape, dtype=state.dtype, device=state.device)
    states[0] = state
    o = torch.zeros(x.v.shape, dtype=torch.float32, device=state.device)
    for t in range(rows):
        k = x.k[t].view(heads, 1, head)
        decayed = states[t] * decay[t].view(heads, 1, head)
        read = torch.bmm(decayed, k.mT)
        u = x.beta[t].view(heads, 1, 1) * (x.v[t].view(heads, head, 1) - read)
        torch.baddbmm(decayed, u, k, out=states[t + 1])
        o[t] = torch.bmm(states[t + 1], x.q[t].view(heads, head, 1))[..., 0]
    return _gated(o, x.z, params, proj.dtype), KdaStaged(states, raw)


def commit(staged: list[KdaStaged], conv: Tensor, state: Tensor, count: Tensor, lazy: bool = False) -> None:
    window = count + torch.arange(3, device=count.device)
    for layer, kept in enumerate(staged):
        state[layer] = kept.states.index_select(0, count.view(1))[0]
        conv[layer] = kept.inputs.index_select(0, window)


def prefill(proj: Tensor, conv: Tensor, state: Tensor, params: KdaParams) -> Tensor:
    raw = torch.cat([conv, proj[:, : conv.shape[1]]])
    x = _prepare(proj, raw, params)
    o = torch.empty_like(x.v)
    carried = state.mT.contiguous()
    for start in range(0, proj.shape[0], TILE):
        tile = slice(start, start + TILE)
        o[tile], carried = _tile(carried, x.q[tile], x.k[tile], x.v[tile], x.g[tile], x.beta[tile])
    state.copy_(carried.mT)
    conv.copy_(raw[-3:])
    return _gated(o, x.z, params, proj.dtype)


def _tile(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """One tile of the chunked form. q, k, v, g [C, H, head], beta [C, H], state [H, key, value]; -> o [C, H, head], the
    state after it."""
    q, k, v, g = (x.transpose(0, 1) for x in (q, k, v, g))  # [H, C, head]
    beta = beta.t().unsqueeze(-1)
    total = g.cumsum(1)
    grown = total.exp()
    decayed_k, inverse_k = k * grown, k / grown
    causal = torch.ones(g.shape[1], g.shape[1], dtype=torch.bool, device=g.device).tril()
    kk = beta * (decayed_k @ inverse_k.mT).masked_fill(~causal.tril(-1), 0.0)
    rhs = beta * (v - decayed_k @ state)
    u = torch.linalg.solve_triangular(kk, rhs, upper=False, unitriangular=True)
    qk = ((q * grown) @ inverse_k.mT).masked_fill(~causal, 0.0)
    o = (q * grown) @ state + qk @ u
    last = total[:, -1:]
    state = last.exp().mT * state + (k * (last - total).exp()).mT @ u
    return o.transpose(0, 1), state
