"""MLA in its absorbed form, for windows and prefill chunks alike (ling3-model.md section 4.2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ling_kernels.ops import ROW_TILE, MlaParams
from ling_kernels.reference.dense import linear, pieces, rms_norm

SPLIT = 128  # keys read at a time, counted from position 0; part of the definition: it fixes the order of the sum


def rope_table(length: int, dim: int, theta: float, device: torch.device | str = "cpu") -> Tensor:
    """[length, dim] fp32 as cos‖sin of position · theta^(-2i/dim), angles computed in fp64."""
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * frequency
    return torch.cat([angle.cos(), angle.sin()], dim=-1).float()


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Interleaved pairs (2i, 2i+1) of x [R, ..., dim] turned by table [R, dim] (cos‖sin)."""
    table = table.view(x.shape[0], *[1] * (x.dim() - 2), x.shape[-1])
    cos, sin = table.chunk(2, -1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)


def mla(
    proj: Tensor, cache: Tensor, rope: Tensor, positions: Tensor, params: MlaParams, rows: int, extent: int
) -> Tensor:
    num, heads = proj.shape[0], params.num_heads
    latent, turned = params.kv_norm.shape[0], params.rope_dim
    query, kv, key, gate = proj.split([proj.shape[1] - latent - turned - heads, latent, turned, heads], dim=1)
    if params.q_b_proj is not None:
        query = linear(rms_norm(query, params.q_norm, params.eps), params.q_b_proj, rows if num == ROW_TILE else None)
    angles = rope.index_select(0, positions)
    fresh = torch.cat([rms_norm(kv, params.kv_norm, params.eps).float(), rotate(key.float(), angles)], dim=-1)
    cache.index_copy_(0, positions[:rows], fresh[:rows].to(cache.dtype))

    # a prefill chunk runs whole, a window piece by piece
    cut = pieces(rows if num == ROW_TILE else None)
    done = [_heads(query[p], gate[p], angles[p], positions[p], cache, params, extent) for p in cut]
    o = torch.cat(done).to(proj.dtype)
    return F.pad(o, (0, 0, 0, num - o.shape[0]))


def _heads(
    query: Tensor, gate: Tensor, angles: Tensor, positions: Tensor, cache: Tensor, params: MlaParams, extent: int
) -> Tensor:
    """Attention of rows whose keys are in the cache already: query [n, H*(nope+r)], gate [n, H] -> [n, H*v] fp32."""
    num, heads, turned = query.shape[0], params.num_heads, params.rope_dim
    latent = params.kv_norm.shape[0]
    nope, turning = query.float().view(num, heads, -1).split([params.w_uk.shape[1], turned], dim=-1)
    absorbed = torch.bmm(nope.transpose(0, 1), params.w_uk.float()).transpose(0, 1)
    q = torch.cat([absorbed, rotate(turning, angles)], dim=-1).flatten(0, 1)
    q = q / (params.w_uk.shape[1] + turned) ** 0.5
    mixed = _attend(q, cache, positions.repeat_interleave(heads), latent, extent)
    o = torch.bmm(mixed.view(num, heads, latent).transpose(0, 1), params.w_uv.float().mT)
    return (o.transpose(0, 1) * torch.sigmoid(gate.float()).unsqueeze(-1)).flatten(1)


def _attend(q: Tensor, cache: Tensor, positions: Tensor, latent: int, extent: int) -> Tensor:
    """Softmax over keys at or before each row's position. q [n, L+r], positions [n] -> [n, L] fp32.

    Keys come in splits from position 0 with a running maximum. A split that lies past a row's position multiplies
    by one and adds zero, so how far `extent` reaches does not change a bit.
    """
    top = torch.full_like(q[:, :1], -torch.inf)
    weight = torch.zeros_like(top)
    total = torch.zeros(q.shape[0], latent, dtype=torch.float32, device=q.device)
    for start in range(0, extent, SPLIT):
        keys = cache[start : start + SPLIT].float()
        visible = torch.arange(start, start + keys.shape[0], device=q.device) <= positions[:, None]
        scores = (q @ keys.t()).masked_fill(~visible, -torch.inf)
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        scale, p = (top - higher).exp(), (scores - higher).exp()
        weight = weight * scale + p.sum(-1, keepdim=True)
        total = total * scale + p @ keys[:, :latent]
        top = higher
    return total / weight
