"""The Ling-3.0 forward pass for training: plain torch functions over a dict of tensors with the published names.

Weights are fp32 masters, cast at each product to the working dtype; experts are stacked [E, out, in]. What
ling3-model.md section 4.7 wants in fp32 is in fp32, and so is the residual stream. Work runs on rows [N, D] with
N = B * T, so that one compiled graph serves every sequence length with the same number of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ling_local.engine.config import ModelConfig
from ling_local.train.kda import Wrap, kda_chunked

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Net:
    """How to run the model.

    limits  [L+1, 2] SwiGLU limits of routed and shared experts, inf for none: a tensor, so that layers with other
            limits share one compiled graph
    dtype   of matrix products; kda: the kernel; wrap: called on each region's function, to compile it
    """

    config: ModelConfig
    limits: Tensor
    dtype: torch.dtype = torch.float32
    kda: Callable[..., Tensor] = kda_chunked
    wrap: Wrap = lambda function: function


def make_net(config: ModelConfig, device: str = "cpu", dtype: torch.dtype = torch.float32, **how: Any) -> Net:
    """A Net with the config's limits on the device."""
    layers = range(config.num_layers + config.num_mtp_layers)
    limits = [[limit or float("inf") for limit in (config.expert_limit(i), config.shared_limit(i))] for i in layers]
    return Net(config, torch.tensor(limits, device=device), dtype, **how)


@dataclass(frozen=True)
class Output:
    """hidden: after model.norm [N, D]; mtp: after final_layernorm or None; loads: tokens per expert and MoE layer."""

    hidden: Tensor
    mtp: Tensor | None
    loads: dict[int, Tensor]


def layer_params(params: Params, layer: int) -> dict[str, Tensor]:
    """One layer's tensors without the prefix."""
    prefix = f"model.layers.{layer}."
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [.., in] in the working dtype times weight [out, in]."""
    return F.linear(x, weight.to(x.dtype))


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm in fp32. -> fp32"""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def forward(net: Net, params: Params, ids: Tensor, mtp: bool = True) -> Output:
    """Hidden states of ids [B, T]. The MTP rows of the last position use id 0 as the next token: not meaningful."""
    config = net.config
    loads: dict[int, Tensor] = {}
    (x,) = deque(residuals(net, params, ids, loads), maxlen=1)  # the last one
    hidden = rms(x, params["model.norm.weight"], config.rms_norm_eps)
    if not (mtp and config.num_mtp_layers):
        return Output(hidden, None, loads)
    following = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), 1).reshape(-1)
    return Output(hidden, _mtp(net, params, hidden, following, *_places(ids), loads), loads)


def residuals(net: Net, params: Params, ids: Tensor, loads: dict[int, Tensor]) -> Iterator[Tensor]:
    """The residual stream [N, D] before the first layer, and after each. Puts the experts' loads into loads."""
    x = F.embedding(ids.reshape(-1), params["model.word_embeddings.weight"]).float()
    yield x
    position, length = _places(ids)
    for layer in range(net.config.num_layers):
        x = _layer(net, layer_params(params, layer), layer, x, position, length, loads)
        yield x


def _places(ids: Tensor) -> tuple[Tensor, int]:
    """Position of each row of ids [B, T], and T."""
    batch, length = ids.shape
    return torch.arange(length, device=ids.device).repeat(batch), length


def logits(net: Net, params: Params, hidden: Tensor) -> Tensor:
    """[N, V] fp32."""
    return linear(hidden.to(net.dtype), params["lm_head.weight"]).float()


def _mtp(
    net: Net, params: Params, hidden: Tensor, following: Tensor, position: Tensor, length: int, loads: dict[int, Tensor]
) -> Tensor:
    config, layer = net.config, net.config.num_layers
    weights = layer_params(params, layer)
    embedded = F.embedding(following, params["model.word_embeddings.weight"])
    both = torch.cat(
        (
            rms(embedded, weights["enorm.weight"], config.rms_norm_eps),
            rms(hidden, weights["hnorm.weight"], config.rms_norm_eps),
        ),
        -1,
    )
    u = linear(both.to(net.dtype), weights["eh_proj.weight"]).float()
    u = _layer(net, weights, layer, u, position, length, loads)
    return rms(u, weights["final_layernorm.weight"], config.rms_norm_eps)


def _layer(
    net: Net, weights: Params, layer: int, x: Tensor, position: Tensor, length: int, loads: dict[int, Tensor]
) -> Tensor:
    config = net.config
    attention = _mla if config.is_mla(layer) else _kda
    x = attention(net, _only(weights, ("attention.", "input_layernorm.")), x, position, length)
    weights = _only(weights, ("mlp.", "post_attention_layernorm."))
    if config.is_dense(layer):
        return net.wrap(dense_mlp)(config, net.dtype, weights, x)
    x, loads[layer] = net.wrap(moe)(config, net.dtype, weights, x, net.limits[layer])
    return x


def _only(weights: Params, prefixes: tuple[str, ...]) -> dict[str, Tensor]:
    """What a region reads: layers of a kind then look alike to the compiler."""
    return {name: value for name, value in weights.items() if name.startswith(prefixes)}


def _kda(net: Net, weights: Params, x: Tensor, position: Tensor, length: int) -> Tensor:
    q, k, v, g, beta, gate = net.wrap(kda_inputs)(net.config, net.dtype, weights, x, position)
    o = net.kda(*(y.unflatten(0, (-1, length)) for y in (q, k, v, g, beta)))
    return net.wrap(kda_output)(net.config, net.dtype, weights, x, o.flatten(0, 1), gate)


def kda_inputs(
    config: ModelConfig, dtype: torch.dtype, weights: Params, x: Tensor, position: Tensor
) -> tuple[Tensor, ...]:
    """x [N, D] to q, k, v [N, H, 128] in dtype, g [N, H, 128] and beta [N, H] in fp32, output gate [N, P]."""
    h = rms(x, weights["input_layernorm.weight"], config.rms_norm_eps).to(dtype)
    heads = (config.num_heads, config.head_dim)
    q, k, v = (
        _conv(linear(h, weights[f"attention.{n}_proj.weight"]), weights[f"attention.{n}_conv1d.weight"], position)
        for n in "qkv"
    )
    q, k, v = (y.unflatten(-1, heads) for y in (q, k, v))
    q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * config.head_dim**-0.5
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    f = linear(h, weights["attention.f_proj.weight"]).float() + weights["attention.dt_bias"]
    rate = weights["attention.A_log"].exp()[:, None]
    g = config.kda_lower_bound * torch.sigmoid(rate * f.unflatten(-1, heads))
    beta = torch.sigmoid(linear(h, weights["attention.b_proj.weight"]).float())
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta, linear(h, weights["attention.g_proj.weight"])


def _conv(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Causal depth-wise convolution with SiLU over rows [N, P]; rows before a sequence's start are zero. -> fp32"""
    x = x.float()
    taps = weight.float()[:, 0]
    total = x * taps[:, 3]
    for back in (1, 2, 3):
        shifted = F.pad(x, (0, 0, back, 0))[: x.shape[0]]
        total = total + torch.where((position >= back)[:, None], shifted, 0.0) * taps[:, 3 - back]
    return F.silu(total)


def kda_output(config: ModelConfig, dtype: torch.dtype, weights: Params, x: Tensor, o: Tensor, gate: Tensor) -> Tensor:
    """Norm, gate and output projection of o [N, H, 128], added to x."""
    o = rms(o, weights["attention.o_norm.weight"], config.rms_norm_eps).flatten(1) * torch.sigmoid(gate.float())
    return x + linear(o.to(dtype), weights["attention.o_proj.weight"]).float()


def _mla(net: Net, weights: Params, x: Tensor, position: Tensor, length: int) -> Tensor:
    config = net.config
    q, k, v, gate = net.wrap(mla_inputs)(config, net.dtype, weights, x, position)
    q, k, v = (y.unflatten(0, (-1, length)).transpose(1, 2) for y in (q, k, v))
    width = v.shape[-1]
    if v.is_cuda:  # flash attention wants equal widths
        v = F.pad(v, (0, q.shape[-1] - width))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=q.shape[-1] ** -0.5)
    return net.wrap(mla_output)(config, net.dtype, weights, x, o[..., :width].transpose(1, 2).flatten(0, 1), gate)


def mla_inputs(
    config: ModelConfig, dtype: torch.dtype, weights: Params, x: Tensor, position: Tensor
) -> tuple[Tensor, ...]:
    """x [N, D] to q, k [N, H, nope + rope], v [N, H, V] in dtype and the head gate [N, H] in fp32."""
    eps = config.rms_norm_eps
    h = rms(x, weights["input_layernorm.weight"], eps).to(dtype)
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    q_nope, q_rope = mla_query(config, weights, h).split((nope, rope), -1)
    latent, k_rope = linear(h, weights["attention.kv_a_proj_with_mqa.weight"]).split((config.kv_lora_rank, rope), -1)
    latent = rms(latent, weights["attention.kv_a_layernorm.weight"], eps).to(dtype)
    kv = linear(latent, weights["attention.kv_b_proj.weight"]).unflatten(
        -1, (config.num_heads, nope + config.v_head_dim)
    )
    k_nope, v = kv.split((nope, config.v_head_dim), -1)
    frequency = config.rope_theta ** (-torch.arange(0, rope, 2, device=x.device, dtype=torch.float32) / rope)
    angle = (position.float()[:, None] * frequency)[:, None]
    q_rope = _rotate(q_rope, angle).to(dtype)
    k_rope = _rotate(k_rope[:, None], angle).to(dtype).expand(-1, config.num_heads, -1)
    gate = torch.sigmoid(linear(h, weights["attention.g_proj.weight"]).float())
    return torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), v, gate


def mla_query(config: ModelConfig, weights: Params, h: Tensor) -> Tensor:
    """Queries [N, H, nope + rope] of the normed rows h [N, D], in h's dtype."""
    if config.q_lora_rank:
        low = linear(h, weights["attention.q_a_proj.weight"])
        low = rms(low, weights["attention.q_a_layernorm.weight"], config.rms_norm_eps).to(h.dtype)
        q = linear(low, weights["attention.q_b_proj.weight"])
    else:
        q = linear(h, weights["attention.q_proj.weight"])
    return q.unflatten(-1, (config.num_heads, -1))


def _rotate(x: Tensor, angle: Tensor) -> Tensor:
    """RoPE on pairs (2i, 2i+1). x [N, H, R], angle [N, 1, R/2]. -> fp32"""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1).flatten(-2)


def mla_output(config: ModelConfig, dtype: torch.dtype, weights: Params, x: Tensor, o: Tensor, gate: Tensor) -> Tensor:
    """Head gate and output projection of o [N, H, V], added to x."""
    o = (o.float() * gate[..., None]).flatten(1).to(dtype)
    return x + linear(o, weights["attention.dense.weight"]).float()


def dense_mlp(config: ModelConfig, dtype: torch.dtype, weights: Params, x: Tensor) -> Tensor:
    """x plus the SwiGLU MLP of its norm."""
    h = rms(x, weights["post_attention_layernorm.weight"], config.rms_norm_eps).to(dtype)
    return x + _swiglu(h, weights, "mlp.", None).float()


def _clamped(gate: Tensor, up: Tensor, limit: Tensor | None) -> Tensor:
    """SiLU(gate) * up, the gate branch bounded above, the up branch on both sides."""
    gate = F.silu(gate.float())
    up = up.float()
    return gate * up if limit is None else gate.clamp(max=limit) * up.clamp(-limit, limit)


def _swiglu(h: Tensor, weights: Params, prefix: str, limit: Tensor | None) -> Tensor:
    inner = _clamped(
        linear(h, weights[f"{prefix}gate_proj.weight"]), linear(h, weights[f"{prefix}up_proj.weight"]), limit
    )
    return linear(inner.to(h.dtype), weights[f"{prefix}down_proj.weight"])


def moe(config: ModelConfig, dtype: torch.dtype, weights: Params, x: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """x plus routed and shared experts of its norm, and how many rows chose each expert [E].

    All experts run on all rows, as one product; the router's weights, zero for those not chosen, do the rest.
    """
    normed = rms(x, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
    h = normed.to(dtype)
    route = router(config, weights, h.float())
    gate, up, down = (weights[f"mlp.experts.{name}_proj.weight"] for name in ("gate", "up", "down"))
    inner = _clamped(linear(h, gate.flatten(0, 1)), linear(h, up.flatten(0, 1)), limits[0])
    inner = (inner.unflatten(-1, (config.num_experts, -1)) * route[..., None]).flatten(1).to(dtype)
    routed = linear(inner, down.permute(1, 0, 2).flatten(1)).float()
    shared = _swiglu(h, weights, "mlp.shared_experts.", limits[1]).float()
    return x + routed + shared, (route.detach() > 0).sum(0).float()


def router(config: ModelConfig, weights: Params, h: Tensor) -> Tensor:
    """Weight of each expert [N, E], zero for those not chosen; all fp32. Ties go to the lower index."""
    scores = torch.sigmoid(h @ weights["mlp.gate.weight"].float().t())
    biased = scores.detach() + weights["mlp.gate.expert_bias"]
    grouped = biased.unflatten(-1, (config.n_group, -1))
    group_score = torch.where(top_mask(grouped, 2), grouped, 0.0).sum(-1)
    allowed = top_mask(group_score, config.topk_group)[..., None].expand_as(grouped).flatten(-2)
    chosen = top_mask(biased.masked_fill(~allowed, -torch.inf), config.experts_per_token)
    kept = torch.where(chosen, scores, 0.0)
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * config.routed_scaling_factor


def top_mask(x: Tensor, count: int) -> Tensor:
    """True for the `count` largest along the last axis, by counting the larger ones: fuses where a sort would not."""
    index = torch.arange(x.shape[-1], device=x.device)
    larger = x[..., None, :] > x[..., :, None]
    earlier = (x[..., None, :] == x[..., :, None]) & (index[None, :] < index[:, None])
    return (larger | earlier).sum(-1) < count
