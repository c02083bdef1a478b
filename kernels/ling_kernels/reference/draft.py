"""DSpark: context injection, block draft, Markov picks and confidence (dspark.md sections 3 to 6)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ling_kernels.ops import ROW_TILE, DraftLayerParams, DraftParams, Proposal, Sampling
from ling_kernels.reference.dense import linear, mlp, rms_norm
from ling_kernels.reference.mla import rotate
from ling_kernels.reference.sample import choose_draft, draft_rule


def _turned(x: Tensor, angles: Tensor, params: DraftParams) -> Tensor:
    """Rope over the first rope_dim values of each head: x [n, heads, head], angles [n, rope_dim] cos‖sin."""
    turning, still = x.float().split([params.rope_dim, x.shape[-1] - params.rope_dim], dim=-1)
    if params.neox:
        cos, sin = angles[:, None].chunk(2, -1)
        a, b = turning.chunk(2, -1)
        turning = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        turning = rotate(turning, angles)
    return torch.cat([turning, still], dim=-1).to(x.dtype)


def _keys_values(
    x: Tensor, layer: DraftLayerParams, params: DraftParams, angles: Tensor, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """Keys (normed, turned) and values of rows x [n, D]: [n, Hkv, head] each."""
    queries = params.num_heads * params.head_dim
    both = linear(x, layer.in_proj[queries:], rows)
    keys, values = both.view(x.shape[0], 2, params.num_kv_heads, -1).unbind(1)
    return _turned(rms_norm(keys, layer.k_norm, params.eps), angles, params), values


def embed(anchor: Tensor, length: Tensor, table: Tensor, mask: int, num: int) -> tuple[Tensor, Tensor]:
    places = torch.arange(num, device=anchor.device)
    return table.index_select(0, torch.where(places == 0, anchor, mask)), length + places


def context(taps: Tensor, params: DraftParams, cache: Tensor, rope: Tensor, positions: Tensor, rows: int) -> None:
    live = rows if taps.shape[0] == ROW_TILE else None  # a window piece by piece, a prefill chunk whole
    ctx = rms_norm(linear(taps, params.fc, live), params.hidden_norm, params.eps)
    angles = rope.index_select(0, positions)
    for index, layer in enumerate(params.layers):
        for side, fresh in enumerate(_keys_values(ctx, layer, params, angles, live)):
            cache[index, side].index_copy_(0, positions[:rows], fresh[:rows])


def _same(x: Tensor) -> Tensor:
    return x


def block(
    x: Tensor,
    params: DraftParams,
    cache: Tensor,
    rope: Tensor,
    length: Tensor,
    extent: int,
    summed: Callable[[Tensor], Tensor] = _same,
) -> Tensor:
    """summed: a partial [n, D] to its sum over ranks."""
    num = x.shape[0]
    angles = rope.index_select(0, length + torch.arange(num, device=x.device))
    earlier = torch.arange(extent, device=x.device) < length
    visible = torch.cat([earlier, earlier.new_ones(num)])
    for index, layer in enumerate(params.layers):
        h = rms_norm(x, layer.attention_norm, params.eps)
        q = F.linear(h, layer.in_proj[: params.num_heads * params.head_dim]).view(num, params.num_heads, -1)
        q = _turned(rms_norm(q, layer.q_norm, params.eps), angles, params)
        keys, values = _keys_values(h, layer, params, angles)
        keys = torch.cat([cache[index, 0, :extent], keys])
        values = torch.cat([cache[index, 1, :extent], values])
        x = (x + summed(F.linear(_attend(q, keys, values, visible), layer.out_proj))).to(x.dtype)
        x = (x + summed(mlp(rms_norm(x, layer.mlp_norm, params.eps), layer.mlp))).to(x.dtype)
    return rms_norm(x, params.norm, params.eps)


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention without a causal mask. q [n, Hq, head]; keys, values [m, Hkv, head] -> [n, Hq * head]."""
    repeat = q.shape[1] // keys.shape[1]
    keys, values = (t.float().repeat_interleave(repeat, 1).transpose(0, 1) for t in (keys, values))
    # rows that are not visible may hold anything: their weight is exactly zero, and they are finite
    scores = torch.bmm(q.float().transpose(0, 1), keys.mT) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.bmm(weights, values).transpose(0, 1).flatten(1).to(q.dtype)


def pick(
    base: Tensor,
    h: Tensor,
    anchor: Tensor,
    params: DraftParams,
    positions: Tensor,
    sampling: Sampling,
    whole: Callable[[Tensor], Tensor] = _same,
) -> Proposal:
    """whole: logits of this rank's rows of the vocabulary to those of all."""
    drafts, confidence, rule = [], [], draft_rule(positions, sampling)
    before = anchor.view(1)
    state = torch.zeros(1, params.markov_w1.shape[1], dtype=torch.float32, device=base.device)
    for row in range(base.shape[0]):
        hidden, known = h[row : row + 1].float(), params.markov_w1.index_select(0, before).float()
        bias, state = _markov(hidden, known, state, params)
        logits = whole(base[row : row + 1] + F.linear(bias, params.markov_w2.float()))
        confidence.append(_confidence(hidden, known, params, row))
        before = choose_draft(logits[:, : sampling.vocab], rule, slice(row, row + 1))
        drafts.append(before)
    return Proposal(torch.cat(drafts), torch.cat(confidence))


def _markov(hidden: Tensor, known: Tensor, state: Tensor, params: DraftParams) -> tuple[Tensor, Tensor]:
    """The head's input to W2 [1, r] from the token before (known [1, r]) and the row's hidden state [1, D]."""
    if params.markov_head == "gated":
        weight, bias = params.markov_extra
        gate = torch.sigmoid(F.linear(torch.cat([hidden, known], dim=-1), weight.float(), bias.float()))
        return gate * known, state
    if params.markov_head == "rnn":
        joint = torch.cat([state, known, hidden], dim=-1)
        weight, bias = params.markov_extra
        g, c, o = F.linear(joint, weight.float(), bias.float()).chunk(3, -1)
        state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
        return torch.tanh(o), state
    return known, state


def _confidence(hidden: Tensor, known: Tensor, params: DraftParams, row: int) -> Tensor:
    if params.confidence is None:
        return hidden.new_ones(1)
    inputs = torch.cat([hidden, known], dim=-1) if params.confidence_with_markov else hidden
    score = F.linear(inputs, params.confidence.float(), params.confidence_bias.float())[:, 0]
    return torch.sigmoid(score / params.temperatures[row])
