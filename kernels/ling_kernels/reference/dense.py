"""Embedding, norms, projections, SwiGLU and head.

All rows are computed whatever `rows` says: on a CPU the number of rows is what must never change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ling_kernels.ops import MlpParams

HEAD_BLOCK = 8192  # vocabulary rows widened to fp32 at a time


def embed(ids: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in fp32, returned in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def exchange_norm(
    partial: Tensor | None, x: Tensor, weight: Tensor, eps: float, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    if partial is not None:
        x = x + partial
    return x, rms_norm(x, weight, eps)


def linear(h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
    return F.linear(h, weight)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """SiLU(gate) ⊙ up of [..., 2I]; with a limit the gate is cut after SiLU from above, up on both sides."""
    gate, up = gate_up.float().chunk(2, -1)
    gate = F.silu(gate)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * up


def mlp(h: Tensor, params: MlpParams, rows: int | None = None) -> Tensor:
    inner = swiglu(F.linear(h, params.gate_up), params.limit)
    return F.linear(inner.to(h.dtype), params.down)


def head(h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
    if weight.dtype == torch.float32:
        return F.linear(h, weight)
    # bf16 logits would tie for whole groups of tokens: widen both sides, a block of the vocabulary at a time
    wide = h.float()
    return torch.cat([F.linear(wide, block.float()) for block in weight.split(HEAD_BLOCK)], dim=-1)
