"""Embedding, norms, projections, MLP and head on a GPU."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ling_kernels.cuda.checks import check_rows
from ling_kernels.cuda.checks import check_width as _width
from ling_kernels.cuda.checks import named as _named
from ling_kernels.cuda.driver import Argument, Device
from ling_kernels.cuda.experts import ExpertOps
from ling_kernels.cuda.prefill import prefill_mlp
from ling_kernels.cuda.tiles import TALL, TOGETHER, Deal, deal, sums_bytes, tiles_per_block, warps_for
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
    """Contracts in `ling_kernels.ops.Ops`, those of the router and the experts included.

    For measurements: early, the share of L2 that a projection asks for of its own weight before it waits; early_norm,
    that exchange_norm lets the next kernel start before it waits itself; together and warps, as `tiles.deal` has them.
    The first two change no bit.
    """

    early = 0.4
    early_norm = True
    together = TOGETHER
    warps: int | None = None

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
        args = [partial, x, weight, total, h, width, float(eps), int(self.early_norm)]
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
        self._stream(name, n, width, rows, [h, weight, out, *norm, rows, n, width])
        return out

    def mlp(self, h: Tensor, params: MlpParams, rows: int | None = None) -> Tensor:
        if rows is None:
            return prefill_mlp(self.device, h, params)
        inner, width = params.down.shape[1], params.gate_up.shape[1]
        mid = h.new_empty(h.shape[0], inner)
        args = [h, params.gate_up, mid, float(params.limit), rows, inner, width]
        after = self._hint
        self.ahead(params.down)
        self._stream("mlp_gate_up", inner, width, rows, args, paired=True)
        self.ahead(*after)
        return self.linear(mid, params.down, rows)

    def head(self, h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
        if rows is None:
            return reference.head(h, weight)
        n, width = weight.shape
        logits = torch.empty(h.shape[0], n, dtype=torch.float32, device=h.device)
        warps, per, blocks = self._whole_tiles("head", n, width, rows)
        dealt = Deal(warps, TALL, per, blocks)
        values = torch.empty(blocks, ROW_TILE, dtype=torch.float32, device=h.device)
        ids = torch.empty(blocks, ROW_TILE, dtype=torch.int32, device=h.device)
        self._stream("head", n, width, rows, [h, weight, logits, values, ids, rows, n, width], dealt)
        self.candidates = Candidates(logits, values, ids, per * TALL)
        return logits

    def _whole_tiles(self, name: str, n: int, width: int, rows: int) -> tuple[int, int, int]:
        """Warps, tiles of 16 rows for a block, and blocks, where all warps of the machine may be taken."""
        tiles = -(-n // TALL)
        warps = warps_for(tiles, width, self.device.properties.num_sms)
        slots = self.device.resident(_named(name, rows), warps * 32, sums_bytes(warps, rows))
        per = tiles_per_block(tiles, slots)
        return warps, per, -(-tiles // per)

    def _stream(
        self,
        name: str,
        n: int,
        width: int,
        rows: int,
        args: list[Argument],
        dealt: Deal | None = None,
        paired: bool = False,
    ) -> None:
        """Launch one of the kernels that walk tiles of a matrix of `n` rows; paired: of n gate and n up rows. Its last
        arguments are how the matrix is dealt out, how many rows a block asks for early, and the hint."""
        check_rows(args[0], rows)
        _width("width of a projection", width)
        most = TALL // 2 if paired else TALL
        dealt = dealt or deal(n, width, self.device.properties.num_sms, most, self.together, self.warps)
        row_bytes = args[0].element_size() * width * (2 if paired else 1)
        asked = int(self.early * self.device.properties.l2_bytes / dealt.blocks / row_bytes)
        args = [*args, dealt.per, dealt.tall, min(asked, dealt.per * dealt.tall), self.hint()]
        shared = sums_bytes(dealt.warps, rows)
        self.device.launch(_named(name, rows), dealt.blocks, dealt.warps * 32, args, shared)


def _threads(width: int) -> int:
    return -(-width // 256) * 32
