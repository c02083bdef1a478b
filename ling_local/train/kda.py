"""Kimi delta attention over whole sequences, differentiable: the chunked form (ling3-model.md section 4.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK, TILE = 64, 16

Wrap = Callable[[Callable], Callable]


def kda_chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, wrap: Wrap = lambda function: function
) -> Tensor:
    """o of the delta-rule recurrence from a zero state.

    q, k  [B, T, H, K]  normalised, q scaled;  v  [B, T, H, V]
    g     [B, T, H, K]  log-decay per step, in [-5, 0];  beta  [B, T, H]
    ->    [B, T, H, V] fp32. Computed in fp32 whatever the inputs are. wrap: applied to what may be compiled.
    """
    batch, length, heads = beta.shape
    chunks = [_chunks(x, -length % CHUNK) for x in (q, k, v, g, beta[..., None])]
    system, right, read, readers, written, decay = wrap(prepare)(*chunks)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    steps = [
        x.unflatten(0, (batch, -1)).transpose(1, 2).flatten(0, 1) for x in (values, keys, read, readers, written, decay)
    ]
    o = _scan(*steps)  # [B * H, N, CHUNK, V]
    return o.flatten(1, 2).unflatten(0, (batch, heads)).transpose(1, 2)[:, :length]


def _chunks(x: Tensor, padding: int) -> Tensor:
    """[B, T, H, X] to [B * N, CHUNK, H, X], zeros after the end."""
    if padding:
        x = pad(x, (0, 0, 0, 0, 0, padding))
    return x.unflatten(1, (-1, CHUNK)).flatten(0, 1)


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """All of a chunk that needs no state; the shapes do not tell where a sequence ends. M = B * N chunks.

    -> system, read [M, H, CHUNK, CHUNK]; right [M, H, CHUNK, V + K]; readers [M, H, CHUNK, K];
       written [M, H, K, CHUNK]; decay [M, H, K, 1]
    """
    q, k, v, g, beta = (x.float().transpose(1, 2) for x in (q, k, v, g, beta))
    total = g.cumsum(-2)
    within, read = _interactions(q, k, total)
    grown = total.exp()
    last = total[..., -1:, :]
    right = beta * torch.cat((v, k * grown), -1)
    written = (k * (last - total).exp()).transpose(-1, -2)
    return (beta * within).tril(-1), right, read.tril(), q * grown, written, last.exp().transpose(-1, -2)


def _interactions(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Decayed k.k and q.k of a chunk's rows [.., CHUNK, CHUNK]; entries above the diagonal mean nothing.

    Each tile of rows measures decay from its own start, so no exponent is above 5 * TILE = 80 (fp32 ends at 88).
    """
    within, read = [], []
    for start in range(0, CHUNK, TILE):
        stop = start + TILE
        origin = total[..., start - 1 : start, :] if start else torch.zeros_like(total[..., :1, :])
        past = k[..., :stop, :] * (origin - total[..., :stop, :]).exp()
        rows = (total[..., start:stop, :] - origin).exp()
        both = torch.cat((k[..., start:stop, :] * rows, q[..., start:stop, :] * rows), -2) @ past.transpose(-1, -2)
        both = pad(both, (0, CHUNK - stop))
        within.append(both[..., :TILE, :])
        read.append(both[..., TILE:, :])
    return torch.cat(within, -2), torch.cat(read, -2)


def _scan(values: Tensor, keys: Tensor, read: Tensor, readers: Tensor, written: Tensor, decay: Tensor) -> Tensor:
    """The state from chunk to chunk; all arguments [B * H, N, ..]. -> [B * H, N, CHUNK, V]

    Split by unbind: its backward is one stack, where a slice's backward would write the whole tensor every time.
    """
    both = torch.cat((keys, readers), -2)
    state = torch.zeros(keys.shape[0], keys.shape[-1], values.shape[-1], dtype=keys.dtype, device=keys.device)
    rows = []
    for value, query, mix, write, fade in zip(
        *(x.unbind(1) for x in (values, both, read, written, decay)), strict=True
    ):
        seen, found = (query @ state).split(CHUNK, -2)
        update = value - seen
        rows.append(torch.baddbmm(found, mix, update))
        state = torch.baddbmm(fade * state, write, update)
    return torch.stack(rows, 1)
