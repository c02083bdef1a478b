"""A DSpark draft in training form: many random blocks of a sequence in one pass (dspark.md sections 3 to 5, 14.2).

Plain functions over a dict of tensors with the published names. The target's embedding and head are not among them:
they stay frozen. What the engine computes one block at a time (`ling_kernels.reference.draft`) is the definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ling_kernels.reference.mla import rope_table
from ling_local.engine.config import DraftConfig
from ling_local.engine.layout import DRAFT_COPIES, draft_layout
from ling_local.train.net import linear, rms

Params = Mapping[str, Tensor]
W1, W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


@dataclass(frozen=True)
class DraftNet:
    """dtype: of matrix products; rope [C, rope_dim] fp32 as cos‖sin, one row a position."""

    config: DraftConfig
    rope: Tensor
    dtype: torch.dtype = torch.float32

    @property
    def inputs(self) -> int:
        """Rows that go into a block; the last block_size of them give the drafts."""
        return self.config.block_size + (0 if self.config.sample_from_anchor else 1)


class Blocks(NamedTuple):
    """hidden [.., n, D] and the Markov head's input to its second table [.., n, r], both fp32; confidence [.., n]:
    logits, None without that head."""

    hidden: Tensor
    markov: Tensor
    confidence: Tensor | None


def make_draft_net(config: DraftConfig, length: int, device: torch.device | str, dtype: torch.dtype) -> DraftNet:
    """A net for sequences of up to `length` tokens."""
    table = rope_table(length + config.block_size + 1, config.rope_dim, config.rope_theta, device)
    return DraftNet(config, table, dtype)


def new_draft_params(config: DraftConfig, seed: int) -> dict[str, Tensor]:
    """Fresh fp32 parameters on the CPU, the same for the same seed. Markov bias and confidence begin at zero."""
    generator = torch.Generator().manual_seed(seed)
    params = {}
    for spec in draft_layout(config):
        if spec.name in DRAFT_COPIES:
            continue
        noise = torch.randn(spec.shape, generator=generator)
        if spec.name.endswith("norm.weight"):
            params[spec.name] = torch.ones(spec.shape)
        elif spec.name == W2 or spec.name.startswith("confidence_head") or spec.name.endswith(".bias"):
            params[spec.name] = torch.zeros(spec.shape)
        elif spec.name == W1:
            params[spec.name] = 0.5 * noise
        else:
            small = spec.name.endswith(("o_proj.weight", "down_proj.weight"))
            params[spec.name] = noise * (0.25 if small else 1.0) * spec.shape[-1] ** -0.5
    return params


def balance_taps(params: dict[str, Tensor], taps: Tensor, width: int) -> None:
    """Scale fc so that every tap of `taps` [.., taps * D] begins with the same weight. Deep layers are the louder."""
    size = taps.float().unflatten(-1, (-1, width)).square().flatten(0, -3).mean((0, 2)).sqrt()
    fc = params["fc.weight"]
    with torch.no_grad():
        fc.copy_((fc.unflatten(1, (-1, width)) / size.to(fc.device).clamp(min=1e-6)[:, None]).flatten(1))


def turned(x: Tensor, angles: Tensor, config: DraftConfig) -> Tensor:
    """Rope over the first rope_dim values of each head: x [.., heads, head] fp32, angles [.., rope_dim]."""
    turning, still = x.split((config.rope_dim, x.shape[-1] - config.rope_dim), -1)
    cos, sin = angles[..., None, :].chunk(2, -1)
    if config.rope_neox:
        a, b = turning.chunk(2, -1)
        turning = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turning = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    return torch.cat((turning, still), -1)


def _keys_values(draft: DraftNet, layer: Params, x: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (normed, turned) and values of x [.., D]: [.., Hq, head], those of a group repeated."""
    config = draft.config
    heads = (config.num_kv_heads, config.head_dim)
    keys = linear(x, layer["self_attn.k_proj.weight"]).unflatten(-1, heads)
    values = linear(x, layer["self_attn.v_proj.weight"]).unflatten(-1, heads)
    keys = turned(rms(keys, layer["self_attn.k_norm.weight"], config.rms_norm_eps), angles, config).to(x.dtype)
    repeat = config.num_heads // config.num_kv_heads
    return keys.repeat_interleave(repeat, -2), values.repeat_interleave(repeat, -2)


def draft_hidden(draft: DraftNet, params: Params, embedding: Tensor, taps: Tensor, ids: Tensor, at: Tensor) -> Tensor:
    """Final hidden rows of the blocks anchored at `at` [B, A] in ids [B, T]: h [B, A, block_size, D] fp32.

    taps [B, T, taps * D]. A block's rows see the context before its anchor and all rows of their own block.
    """
    config, dtype = draft.config, draft.dtype
    length = ids.shape[1]
    context = linear(taps.to(dtype), params["fc.weight"])
    context = rms(context, params["hidden_norm.weight"], config.rms_norm_eps).to(dtype)
    mask = embedding[config.mask_token_id].float()
    anchors = F.embedding(ids.gather(1, at), embedding).float()
    x = torch.cat((anchors[:, :, None], mask.expand(*at.shape, draft.inputs - 1, -1)), 2)
    angles = draft.rope[at[..., None] + torch.arange(draft.inputs, device=at.device)]
    earlier = torch.arange(length, device=at.device) < at[..., None]
    for index in range(config.num_layers):
        layer = _layer_params(params, index)
        h = rms(x, layer["input_layernorm.weight"], config.rms_norm_eps).to(dtype)
        q = linear(h, layer["self_attn.q_proj.weight"]).unflatten(-1, (config.num_heads, config.head_dim))
        q = turned(rms(q, layer["self_attn.q_norm.weight"], config.rms_norm_eps), angles, config).to(dtype)
        before = _keys_values(draft, layer, context, draft.rope[:length])
        own = _keys_values(draft, layer, h, angles)
        o = _attend(q, before, own, earlier).flatten(-2)
        x = x + linear(o, layer["self_attn.o_proj.weight"]).float()
        h = rms(x, layer["post_attention_layernorm.weight"], config.rms_norm_eps).to(dtype)
        inner = F.silu(linear(h, layer["mlp.gate_proj.weight"]).float()) * linear(h, layer["mlp.up_proj.weight"])
        x = x + linear(inner.to(dtype), layer["mlp.down_proj.weight"]).float()
    return rms(x, params["norm.weight"], config.rms_norm_eps)[:, :, draft.inputs - config.block_size :]


def _layer_params(params: Params, index: int) -> dict[str, Tensor]:
    prefix = f"layers.{index}."
    return {name.removeprefix(prefix): value for name, value in params.items() if name.startswith(prefix)}


def _attend(q: Tensor, before: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], earlier: Tensor) -> Tensor:
    """q [B, A, n, H, head]; before: keys, values [B, T, H, head]; own: [B, A, n, H, head]; earlier [B, A, T].

    Two products instead of one masked one over all blocks' rows, which would grow with their square.
    """
    far = torch.einsum("banhd,bthd->bhant", q, before[0]).float()
    near = torch.einsum("banhd,bamhd->bhanm", q, own[0]).float()
    far = far.masked_fill(~earlier[:, None, :, None], -torch.inf)
    weights = (torch.cat((far, near), -1) * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
    far, near = weights.split((earlier.shape[-1], q.shape[2]), -1)
    return torch.einsum("bhant,bthd->banhd", far, before[1]) + torch.einsum("bhanm,bamhd->banhd", near, own[1])


def blocks(draft: DraftNet, params: Params, hidden: Tensor, previous: Tensor) -> Blocks:
    """The sequential tail over rows hidden [.., n, D], teacher-forced: previous [.., n] is the token before each."""
    markov, confidence = [], []
    state = hidden.new_zeros(*hidden.shape[:-2], draft.config.markov_rank)
    known = F.embedding(previous, params[W1])
    if draft.config.markov_head != "rnn":  # rows do not depend on each other
        bias, _ = markov_input(draft.config, params, hidden, known, state)
        return Blocks(hidden, bias, confidence_logit(draft.config, params, hidden, known))
    for row in range(hidden.shape[-2]):
        bias, state = markov_input(draft.config, params, hidden[..., row, :], known[..., row, :], state)
        markov.append(bias)
        confidence.append(confidence_logit(draft.config, params, hidden[..., row, :], known[..., row, :]))
    sure = None if confidence[0] is None else torch.stack(confidence, -1)
    return Blocks(hidden, torch.stack(markov, -2), sure)


def markov_input(
    config: DraftConfig, params: Params, hidden: Tensor, known: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What goes into the second table [.., r], and the rnn head's next state. known [.., r]: the token before."""
    if config.markov_head == "gated":
        both = torch.cat((hidden, known), -1)
        gate = F.linear(both, params["markov_head.gate_proj.weight"], params["markov_head.gate_proj.bias"])
        return torch.sigmoid(gate) * known, state
    if config.markov_head == "rnn":
        joint = torch.cat((state, known, hidden), -1)
        mixed = F.linear(joint, params["markov_head.joint_proj.weight"], params["markov_head.joint_proj.bias"])
        g, c, o = mixed.chunk(3, -1)
        state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
        return torch.tanh(o), state
    return known, state


def confidence_logit(config: DraftConfig, params: Params, hidden: Tensor, known: Tensor) -> Tensor | None:
    """z [..] of dspark.md section 6.1, or None."""
    if not config.confidence_head:
        return None
    inputs = torch.cat((hidden, known), -1) if config.confidence_with_markov else hidden
    return F.linear(inputs, params["confidence_head.proj.weight"], params["confidence_head.proj.bias"])[..., 0]
