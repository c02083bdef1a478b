"""What a prefill chunk does with torch's own matrix kernels: expanded attention, and experts over sorted rows.

A chunk's rows may be many, its bits may depend on the chunk, and the host may look at the routing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from ling_kernels.ops import MlaParams, MoeParams, Routing
from ling_kernels.reference.dense import mlp, rms_norm, swiglu
from ling_kernels.reference.mla import rotate


def prefill_mla(proj: Tensor, cache: Tensor, rope: Tensor, positions: Tensor, params: MlaParams) -> Tensor:
    """MLA over T consecutive rows in its expanded form: keys and values of all heads from the latents so far.

    Writes the cache rows at `positions` [T], the same values as the absorbed form writes.
    """
    num, heads = proj.shape[0], params.num_heads
    latent, turned = params.kv_norm.shape[0], params.rope_dim
    query, kv, key, gate = proj.split([proj.shape[1] - latent - turned - heads, latent, turned, heads], dim=1)
    if params.q_b_proj is not None:
        query = F.linear(rms_norm(query, params.q_norm, params.eps), params.q_b_proj)
    angles = rope.index_select(0, positions)
    fresh = torch.cat([rms_norm(kv, params.kv_norm, params.eps).float(), rotate(key.float(), angles)], dim=-1)
    cache.index_copy_(0, positions, fresh.to(cache.dtype))
    end = int(positions[-1]) + 1  # prefill: the host may look
    known = cache[:end]

    nope, turning = query.view(num, heads, -1).split([params.w_uk.shape[1], turned], dim=-1)
    q = torch.cat([nope, rotate(turning.float(), angles).to(nope.dtype)], dim=-1)
    keys = torch.einsum("tl,hnl->thn", known[:, :latent], params.w_uk)
    shared = known[:, latent:].unsqueeze(1).expand(-1, heads, -1)
    k = torch.cat([keys, shared], dim=-1)
    v = torch.einsum("tl,hvl->thv", known[:, :latent], params.w_uv)
    o = attention(q, k, v)
    return (o.float() * torch.sigmoid(gate.float()).unsqueeze(-1)).flatten(1).to(proj.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last rows: q [T, H, k], k [S, H, k], v [S, H, v] -> [T, H, v]; S >= T.

    Values are padded to the keys' size: the fast kernels want one size.
    """
    size = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - size))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if q.shape[2] == k.shape[2]:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))
    return o[0].transpose(0, 1)[..., :size]


def prefill_experts(h: Tensor, routing: Routing, params: MoeParams) -> Tensor:
    """Chosen experts and the shared one over T rows: rows sorted by expert, two grouped products, summed in fp32."""
    num, chosen = routing.experts.shape
    flat = routing.experts.flatten()
    order = flat.argsort(stable=True)
    row = order // chosen
    ends = flat.bincount(minlength=params.gate.shape[0]).cumsum(0).to(torch.int32)
    inner = swiglu(grouped(h.index_select(0, row), params.gate_up, ends), params.limit)
    inner = (inner * routing.weights.flatten().index_select(0, order).unsqueeze(-1)).to(h.dtype)
    out = grouped(inner, params.down, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    # gathered back and summed, not added in place: the order of the sum is then always the same
    routed = out.index_select(0, back).view(num, chosen, -1).sum(1, dtype=torch.float32)
    return (routed + mlp(h, params.shared).float()).to(h.dtype)


def grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows x [n, k], sorted by group, times their group's weight [E, m, k]: [n, m]. ends [E] int32: of each group."""
    if _has_grouped_product(x):
        return torch._grouped_mm(x, weights.mT, offs=ends)
    out = x.new_empty(x.shape[0], weights.shape[1])
    start = 0
    for group, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], weights[group].t(), out=out[start:end])
        start = end
    return out


def _has_grouped_product(x: Tensor) -> bool:
    """torch's grouped product, where it runs as one kernel: bf16 on sm_90 and later."""
    if x.dtype != torch.bfloat16 or not x.is_cuda or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(x.device) >= (9, 0)
