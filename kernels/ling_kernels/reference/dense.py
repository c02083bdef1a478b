"""Embedding, norms, projections, SwiGLU and head.

All rows are computed whatever `rows` says: on a CPU the number of rows is what must never change.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ling_kernels.ops import MlpParams

HEAD_BLOCK = 8192  # vocabulary rows widened to fp32 at a time
# Rows that one matrix product of a window sees, always so many: torch picks another kernel for another number, and a
# row's bits would depend on its neighbours. Half a tile, so that a narrow window costs half.
PIECE = 8


def pieces(rows: int | None) -> list[slice]:
    """The parts of a window's tile that hold live rows; all of a prefill chunk at once."""
    return [slice(None)] if rows is None else [slice(at, at + PIECE) for at in range(0, rows, PIECE)]


def by_pieces(function: Callable[[Tensor], Tensor], x: Tensor, rows: int | None) -> Tensor:
    """function of x [R, ...] piece by piece; the parts of a window without a live row become zero."""
    done = [function(x[piece]) for piece in pieces(rows)]
    if len(done) * PIECE < x.shape[0] and rows is not None:
        done.append(done[0].new_zeros(x.shape[0] - len(done) * PIECE, *done[0].shape[1:]))
    return done[0] if len(done) == 1 else torch.cat(done)


def embed(ids: Tensor, table: Tensor, lazy: bool = False) -> Tensor:
    return table.index_select(0, ids)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension, in fp32, returned in x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.float()).to(x.dtype)


def exchange_norm(
    partial: Tensor | None,
    x: Tensor,
    weight: Tensor,
    eps: float,
    rows: int | None = None,
    lazy: bool = False,
) -> tuple[Tensor, Tensor]:
    if partial is not None:
        x = (x + partial).to(x.dtype)
    return x, rms_norm(x, weight, eps)


def linear(h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
    if rows is None:
        return F.linear(h, weight)
    # the transposed product of so few rows takes a quarter less time
    return by_pieces(lambda part: torch.mm(weight, part.t()).t(), h, rows)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """SiLU(gate) ⊙ up of [..., 2I]; with a limit the gate is cut after SiLU from above, up on both sides."""
    gate, up = gate_up.float().chunk(2, -1)
    gate = F.silu(gate)
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * up


def mlp(h: Tensor, params: MlpParams, rows: int | None = None) -> Tensor:
    inner = swiglu(linear(h, params.gate_up, rows), params.limit)
    return linear(inner.to(h.dtype), params.down, rows)


def head(h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
    if weight.dtype == torch.float32:
        return linear(h, weight, rows)
    # bf16 logits would tie for whole groups of tokens: widen both sides, a block of the vocabulary at a time
    wide = h.float()
    return torch.cat([linear(wide, block.float(), rows) for block in weight.split(HEAD_BLOCK)], dim=-1)
