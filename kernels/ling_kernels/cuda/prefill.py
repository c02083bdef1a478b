"""What a prefill chunk does with torch's own matrix kernels: expanded attention, and experts over sorted rows.

A chunk's rows may be many, its bits may depend on the chunk, and the host may look at the routing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from ling_kernels.cuda.driver import Device
from ling_kernels.cuda.tiles import contest_bytes
from ling_kernels.ops import MlaParams, MlpParams, MoeParams, Routing
from ling_kernels.reference.dense import rms_norm
from ling_kernels.reference.mla import rotate

CHOOSERS = 8  # rows that a block of prefill_choose has, a warp each
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def prefill_mla(proj: Tensor, cache: Tensor, rope: Tensor, positions: Tensor, params: MlaParams, end: int) -> Tensor:
    """MLA over T consecutive rows in its expanded form: keys and values of all heads from the latents so far, of which
    there are `end` with these rows.

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

    Values are padded to the keys' size: the fast kernels want one size. On Hopper cuDNN's kernel is several times
    faster than the others, but it takes no mask that starts at the end of the keys.
    """
    size = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - size))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if q.shape[2] == k.shape[2]:
        with sdpa_kernel(FASTEST_FIRST, set_priority=True):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(q.shape[2], k.shape[2]))
    return o[0].transpose(0, 1)[..., :size]


def prefill_choose(device: Device, logits: Tensor, params: MoeParams) -> Routing:
    """The choices of T rows, each made as a window's, from their router logits [T, E] fp32."""
    (num, count), chosen = logits.shape, params.experts_per_token
    experts = torch.empty(num, chosen, dtype=torch.int64, device=logits.device)
    weights = torch.empty(num, chosen, dtype=torch.float32, device=logits.device)
    args = [logits, params.bias, experts, weights, count, params.n_group, params.topk_group, chosen]
    args += [float(params.scale), num]
    blocks, shared = -(-num // CHOOSERS), CHOOSERS * contest_bytes(count)
    device.launch("prefill_choose", blocks, CHOOSERS * 32, args, shared)
    return Routing(experts, weights)


def prefill_experts(device: Device, h: Tensor, routing: Routing, params: MoeParams) -> Tensor:
    """Chosen experts and the shared one over T rows: rows sorted by expert, two grouped products, summed in fp32.

    The order of everything is fixed, so equal rows give equal bits. No host value is read.
    """
    (num, chosen), width = routing.experts.shape, h.shape[1]
    count, inner = num * chosen, params.down.shape[2]
    order, place = (torch.empty(count, dtype=torch.int32, device=h.device) for _ in range(2))
    ends = torch.empty(params.gate.shape[0], dtype=torch.int32, device=h.device)
    device.launch("prefill_sort", ends.shape[0], 1024, [routing.experts.contiguous(), order, place, ends, count])
    x = h.new_empty(count, width)
    device.launch("prefill_gather", count, _threads(width), [h, order, x, chosen, width])
    made = grouped(x, params.gate_up, ends)
    mid = h.new_empty(count, inner)
    args = [made, routing.weights, order, mid, inner, float(params.limit)]
    device.launch("prefill_swiglu", count, _threads(inner), args)
    routed, shared, out = grouped(mid, params.down, ends), prefill_mlp(device, h, params.shared), torch.empty_like(h)
    device.launch("prefill_sum", num, _threads(width), [routed, place, shared, out, chosen, width])
    return out


def prefill_mlp(device: Device, h: Tensor, params: MlpParams) -> Tensor:
    """SwiGLU over T rows: h [T, D] -> [T, D]."""
    inner = params.down.shape[1]
    mid = h.new_empty(h.shape[0], inner)
    args = [F.linear(h, params.gate_up), None, None, mid, inner, float(params.limit)]
    device.launch("prefill_swiglu", h.shape[0], _threads(inner), args)
    return F.linear(mid, params.down)


def _threads(width: int) -> int:
    """A block's threads for rows of `width` values, eight a thread."""
    return min(-(-width // 256) * 32, 256)


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
