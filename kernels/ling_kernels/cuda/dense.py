"""Embedding, norms, projections, MLP and head on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ling_kernels.cuda.checks import check_width as _width
from ling_kernels.cuda.checks import named as _named
from ling_kernels.cuda.driver import Argument, Device
from ling_kernels.cuda.experts import ExpertOps
from ling_kernels.cuda.prefill import prefill_mlp
from ling_kernels.cuda.tiles import sums_bytes, tiles_per_block, warps_for
from ling_kernels.ops import ROW_TILE, KernelError, MlpParams
from ling_kernels.reference import dense as reference

MAX_WIDTH = 8192  # of a row that one block norms
MAX_HEADS = 64  # whose norms one projection can apply


class Gated(NamedTuple):
    """Output of KDA that still lacks its norm: o [R, P], sums of squares [ROW_TILE, H, slices] fp32."""

    o: Tensor
    sums: Tensor
    eps: float


class Candidates(NamedTuple):
    """Best logit of every `span` rows of the vocabulary: values [ranges, ROW_TILE] fp32, NaN where one was not
    finite; ids [ranges, ROW_TILE] int32, the lowest of equal ones."""

    logits: Tensor
    values: Tensor
    ids: Tensor
    span: int


class DenseOps(ExpertOps):
    """Contracts in `ling_kernels.ops.Ops`, those of the router and the experts included."""

    def __init__(self, device: Device, gate_fp32: bool = False) -> None:
        super().__init__(device, gate_fp32)
        self.gated: Gated | None = None
        self.candidates: Candidates | None = None

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        width = _width("hidden size", table.shape[1], MAX_WIDTH)
        x = table.new_empty(ids.shape[0], width)
        self.device.launch("embed", ids.shape[0], _threads(width), [ids, table, x, width])
        return x

    def exchange_norm(
        self, partial: Tensor | None, x: Tensor, weight: Tensor, eps: float, rows: int | None = None
    ) -> tuple[Tensor, Tensor]:
        width = _width("hidden size", x.shape[1], MAX_WIDTH)
        total, h = (x if partial is None else torch.empty_like(x)), torch.empty_like(x)
        args = [partial, x, weight, total, h, width, float(eps)]
        self.device.launch("exchange_norm", x.shape[0] if rows is None else rows, _threads(width), args)
        return total, h

    def linear(self, h: Tensor, weight: Tensor, rows: int | None = None, out: Tensor | None = None) -> Tensor:
        """out: where to, [R, n], for a window."""
        gated, self.gated = self.gated, None
        lacks_norm = gated is not None and gated.o is h
        if rows is None:
            if lacks_norm:
                raise KernelError("a projection of KDA's window output was asked for without its rows")
            return reference.linear(h, weight)
        n, width = weight.shape
        out = h.new_empty(h.shape[0], n) if out is None else out
        name = "linear_normed" if lacks_norm else "linear"
        norm = [gated.sums, gated.sums.shape[2], float(gated.eps)] if lacks_norm else []
        if lacks_norm and (width % 128 or width // 128 > MAX_HEADS):
            raise KernelError(f"KDA output of {width} values: the kernels need heads of 128, at most {MAX_HEADS}")
        self._stream(name, -(-n // 16), width, rows, [h, weight, out, *norm, rows, n, width])
        return out

    def mlp(self, h: Tensor, params: MlpParams, rows: int | None = None) -> Tensor:
        if rows is None:
            return prefill_mlp(self.device, h, params)
        inner, width = params.down.shape[1], params.gate_up.shape[1]
        mid = h.new_empty(h.shape[0], inner)
        args = [h, params.gate_up, mid, float(params.limit), rows, inner, width]
        after = self._hint
        self.ahead(params.down)
        self._stream("mlp_gate_up", -(-inner // 8), width, rows, args)
        self.ahead(*after)
        return self.linear(mid, params.down, rows)

    def head(self, h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
        if rows is None:
            return reference.head(h, weight)
        n, width = weight.shape
        logits = torch.empty(h.shape[0], n, dtype=torch.float32, device=h.device)
        tiles = -(-n // 16)
        per, blocks = self._deal("head", tiles, width, rows)
        values = torch.empty(blocks, ROW_TILE, dtype=torch.float32, device=h.device)
        ids = torch.empty(blocks, ROW_TILE, dtype=torch.int32, device=h.device)
        self._stream("head", tiles, width, rows, [h, weight, logits, values, ids, rows, n, width])
        self.candidates = Candidates(logits, values, ids, per * 16)
        return logits

    def _deal(self, name: str, tiles: int, width: int, rows: int) -> tuple[int, int]:
        """Tiles per block, and blocks."""
        warps = warps_for(tiles, width, self.device.properties.num_sms)
        slots = self.device.resident(_named(name, rows), warps * 32, sums_bytes(warps, rows))
        per = tiles_per_block(tiles, slots)
        return per, -(-tiles // per)

    def _stream(self, name: str, tiles: int, width: int, rows: int, args: list[Argument], asks: bool = True) -> None:
        """Launch one of the kernels that walk tiles of a matrix; their last arguments are how many a block has and, of
        those that ask ahead, the hint."""
        if not 1 <= rows <= ROW_TILE:
            raise KernelError(f"{rows} rows: a window has 1 to {ROW_TILE}")
        _width("width of a projection", width)
        if args[0].dtype != torch.bfloat16:
            raise KernelError(f"activations in {args[0].dtype}: the kernels compute in bfloat16")
        warps = warps_for(tiles, width, self.device.properties.num_sms)
        per, blocks = self._deal(name, tiles, width, rows)
        args = [*args, per, self.hint()] if asks else [*args, per]
        self.device.launch(_named(name, rows), blocks, warps * 32, args, sums_bytes(warps, rows))


def _threads(width: int) -> int:
    return -(-width // 256) * 32
