"""On-policy text: the target continues prompts, hundreds of rows in lock-step, one token a step.

A row is a chain of documents: a prompt is fed token by token, the target answers until a stop id or the prompt's
limit, then the row's next prompt begins. So no row waits for another and every position is used. One step touches
device tensors only and has fixed shapes, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ling_kernels.reference.sample import gumbel
from ling_local.train.draft_prompts import Prompts
from ling_local.train.draft_target import Target, scores
from ling_local.train.net import _rotate, dense_mlp, kda_output, layer_params, linear, mla_output, mla_query, moe, rms
from ling_local.train.stepping import Replayed

EXTENT = 128  # keys are read up to a multiple of this; one graph for each


@dataclass(frozen=True)
class Rows:
    """tokens [N, T] int32; answered [N, T] bool: chosen by the target, not part of a prompt; temperature [N] fp32."""

    tokens: Tensor
    answered: Tensor
    temperature: Tensor

    def to(self, device: torch.device | str) -> Rows:
        return Rows(self.tokens.to(device), self.answered.to(device), self.temperature.to(device))


def join(parts: list[Rows]) -> Rows:
    """All rows of all parts."""
    return Rows(*(torch.cat([getattr(p, n) for p in parts]) for n in ("tokens", "answered", "temperature")))


class Sampler:
    """State of B rows of up to T tokens on the target's device.

    recurrent [kda, B, H, K, V] fp32; conv [kda, B, 3, 3P] and latent [mla, B, T, L + r] in the net's dtype; the rest
    are words by row: where its prompt is read, what is left of it, how much it has answered.
    """

    def __init__(self, target: Target, prompts: Prompts, rows: int, length: int, graph: bool = True) -> None:
        config, device, dtype = target.config, target.device, target.net.dtype
        self.target, self.length, self.rows = target, length, rows
        heads, head = config.num_heads, config.head_dim
        kda, mla = len(config.kda_layers), len(config.mla_layers)
        self.layers = [_fused(target, layer) for layer in range(config.num_layers)]
        self.recurrent = torch.zeros(kda, rows, heads, head, head, device=device)
        self.conv = torch.zeros(kda, rows, 3, 3 * heads * head, dtype=dtype, device=device)
        self.latent = torch.zeros(mla, rows, length, config.latent_dim, dtype=dtype, device=device)
        self.flat, self.starts, self.lengths, self.limits = (x.to(device) for x in prompts.tensors())
        self.tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        self.answered = torch.zeros(rows, length, dtype=torch.bool, device=device)
        words = torch.zeros(6, rows, dtype=torch.int64, device=device)
        self.token, self.read, self.left, self.made, self.limit, self.next = words
        self.at = torch.zeros((), dtype=torch.int64, device=device)
        self.temperature = torch.zeros(rows, device=device)
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stops = torch.tensor(target.stop_ids or (-1,), device=device)
        self.between = -1 if target.end_id is None else target.end_id
        self.replayed: dict[int, Replayed] = {}
        self.graph = graph

    @torch.no_grad()
    def run(self, first: int, temperature: Tensor, seeds: Tensor, stop: Callable[[], bool] = lambda: False) -> Rows:
        """Fill all rows from empty states. Row r answers prompts first + r, first + r + B, ..., round and round.

        temperature [B], 0 for greedy; seeds [B]: a row draws what the engine draws with that seed and no filters.
        stop: asked now and then; True leaves the rest of the rows empty.
        """
        for tensor in (self.recurrent, self.conv, self.tokens, self.answered, self.made, self.at):
            tensor.zero_()
        self.temperature.copy_(temperature)
        self.seeds.copy_(seeds)
        number = self.starts.shape[0]
        chosen = (first + torch.arange(self.rows, device=self.starts.device)) % number
        # what stands between two documents does not stand before the first
        skip = 0 if self.target.end_id is None else 1
        self.next.copy_((chosen + self.rows) % number)
        self.read.copy_(self.starts[chosen] + skip + 1)
        self.left.copy_(self.lengths[chosen] - skip - 1)
        self.limit.copy_(self.limits[chosen])
        self.token.copy_(self.flat[self.starts[chosen] + skip])
        self.tokens[:, 0] = self.token
        for place in range(self.length - 1):
            extent = min(-(-(place + 1) // EXTENT) * EXTENT, self.length)
            if extent not in self.replayed:
                body = _bound(self._step, extent)
                self.replayed[extent] = Replayed(body, self.at.device, self.graph)
            self.replayed[extent]()
            if place % 64 == 63 and stop():
                break
        return Rows(self.tokens.int(), self.answered.clone(), self.temperature.clone())

    def _step(self, extent: int) -> None:
        """One token for every row. Reads nothing of the device on the host."""
        target, config = self.target, self.target.config
        x = F.embedding(self.token, target.embedding).float()
        kda = mla = 0
        for layer, weights in enumerate(self.layers):
            if config.is_mla(layer):
                x = self._mla(weights, x, self.latent[mla], extent)
                mla += 1
            else:
                x = self._kda(weights, x, self.conv[kda], self.recurrent[kda])
                kda += 1
            if config.is_dense(layer):
                x = dense_mlp(config, target.net.dtype, weights, x)
            else:
                x, _ = moe(config, target.net.dtype, weights, x, target.net.limits[layer])
        hidden = rms(x, target.params["model.norm.weight"], config.rms_norm_eps)
        self._advance(self._choose(scores(hidden, target.head)[:, : target.vocab]))

    def _choose(self, logits: Tensor) -> Tensor:
        hot = (self.temperature > 0)[:, None]
        noise = gumbel(self.seeds, self.at.expand(self.rows), logits.shape[-1])
        scaled = logits / torch.where(hot, self.temperature[:, None].clamp(min=1e-5), 1.0)
        return torch.where(hot, scaled + noise, scaled).argmax(-1)

    def _advance(self, chosen: Tensor) -> None:
        """Write the next token of every row and move its words."""
        forced = self.left > 0
        token = torch.where(forced, self.flat[self.read.clamp(max=self.flat.shape[0] - 1)], chosen)
        made = torch.where(forced, 0, self.made + 1)
        stopped = (token[:, None] == self.stops).any(-1) | (made >= self.limit)
        ended = ~forced & stopped
        skip = (token == self.between).long()  # the target has put it there itself
        for word, value in (
            (self.read, torch.where(ended, self.starts[self.next] + skip, self.read + forced)),
            (self.left, torch.where(ended, self.lengths[self.next] - skip, self.left - forced.long())),
            (self.limit, torch.where(ended, self.limits[self.next], self.limit)),
            (self.made, torch.where(ended, 0, made)),
            (self.next, torch.where(ended, (self.next + self.rows) % self.starts.shape[0], self.next)),
            (self.token, token),
        ):
            word.copy_(value)
        self.at += 1
        place = self.at.view(1)
        self.tokens.index_copy_(1, place, token[:, None])
        self.answered.index_copy_(1, place, ~forced[:, None])

    def _kda(self, weights: dict[str, Tensor], x: Tensor, conv: Tensor, state: Tensor) -> Tensor:
        """One row of KDA per sequence; advances conv [B, 3, 3P] and state [B, H, K, V]."""
        config, dtype = self.target.config, self.target.net.dtype
        heads, inner = config.num_heads, config.num_heads * config.head_dim
        h = rms(x, weights["input_layernorm.weight"], config.rms_norm_eps).to(dtype)
        raw, f, gate, b = linear(h, weights["in_proj"]).split([3 * inner, inner, inner, heads], -1)
        seen = torch.cat((conv, raw[:, None]), 1)
        conv.copy_(seen[:, 1:])
        mixed = F.silu((seen.float() * weights["conv"].t()).sum(1))
        q, k, v = mixed.view(-1, 3, heads, config.head_dim).unbind(1)
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * config.head_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        rate = weights["attention.A_log"].exp()[:, None]
        f = (f.float() + weights["attention.dt_bias"]).view(-1, heads, config.head_dim)
        decay = (config.kda_lower_bound * torch.sigmoid(rate * f)).exp()
        beta = torch.sigmoid(b.float())[..., None]
        state.mul_(decay[..., None])
        update = beta * (v - torch.matmul(k[..., None, :], state)[..., 0, :])
        state.addcmul_(k[..., :, None], update[..., None, :])
        o = torch.matmul(q[..., None, :], state)[..., 0, :]
        return kda_output(config, dtype, weights, x, o, gate)

    def _mla(self, weights: dict[str, Tensor], x: Tensor, cache: Tensor, extent: int) -> Tensor:
        """One row of absorbed latent attention per sequence; writes cache [B, T, L + r] at the row's position."""
        config, dtype = self.target.config, self.target.net.dtype
        nope, rope, latent = config.qk_nope_head_dim, config.qk_rope_head_dim, config.kv_lora_rank
        h = rms(x, weights["input_layernorm.weight"], config.rms_norm_eps).to(dtype)
        q_nope, q_rope = mla_query(config, weights, h).split((nope, rope), -1)
        kv, key = linear(h, weights["attention.kv_a_proj_with_mqa.weight"]).split((latent, rope), -1)
        kv = rms(kv, weights["attention.kv_a_layernorm.weight"], config.rms_norm_eps)
        frequency = config.rope_theta ** (-torch.arange(0, rope, 2, device=x.device, dtype=torch.float32) / rope)
        angle = (self.at.float() * frequency).expand(x.shape[0], 1, -1)
        fresh = torch.cat((kv, _rotate(key[:, None], angle)[:, 0]), -1).to(dtype)
        cache.index_copy_(1, self.at.view(1), fresh[:, None])
        by_head = weights["attention.kv_b_proj.weight"].view(config.num_heads, -1, latent)
        absorbed = torch.einsum("bhn,hnl->bhl", q_nope, by_head[:, :nope].to(dtype))
        wanted = torch.cat((absorbed, _rotate(q_rope, angle).to(dtype)), -1)
        found = torch.bmm(wanted, cache[:, :extent].mT).float() * (nope + rope) ** -0.5
        hidden = torch.arange(extent, device=x.device) > self.at
        chance = found.masked_fill(hidden, -torch.inf).softmax(-1).to(dtype)
        mixed = torch.bmm(chance, cache[:, :extent, :latent])
        o = torch.einsum("bhl,hvl->bhv", mixed, by_head[:, nope:].to(dtype))
        gate = torch.sigmoid(linear(h, weights["attention.g_proj.weight"]).float())
        return mla_output(config, dtype, weights, x, o, gate)


def _bound(step: Callable[[int], None], extent: int) -> Callable[[], None]:
    return lambda: step(extent)


def _fused(target: Target, layer: int) -> dict[str, Tensor]:
    """One layer's tensors; KDA's projections as one matrix, its convolutions as one fp32 table [3P, 4]."""
    weights = layer_params(target.params, layer)
    if not target.config.is_mla(layer):
        weights["in_proj"] = torch.cat([weights[f"attention.{name}_proj.weight"] for name in "qkvfgb"])
        weights["conv"] = torch.cat([weights[f"attention.{name}_conv1d.weight"][:, 0].float() for name in "qkv"])
    return weights
