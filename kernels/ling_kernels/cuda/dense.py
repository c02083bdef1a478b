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
from ling_kernels.cuda.tiles import MAX_RING, STREAM_THREADS, Stream, stream
from ling_kernels.ops import ROW_TILE, KernelError, MlpParams
from ling_kernels.reference import dense as reference

MAX_WIDTH = 8192  # of a row that one block norms


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

    For measurements, without effect on any bit: early_norm, that exchange_norm lets the next kernel start before it
    waits itself; ring, the most stages that a projection's ring may have.
    """

    early_norm = True
    ring = MAX_RING

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
        if lacks_norm and width % 128:
            raise KernelError(f"KDA output of {width} values: the kernels need heads of 128")
        self._stream(name, [h, weight, out, *norm, rows, n, width], self._dealt(n, width, rows, scaled=lacks_norm))
        return out

    def mlp(self, h: Tensor, params: MlpParams, rows: int | None = None) -> Tensor:
        if rows is None:
            return prefill_mlp(self.device, h, params)
        inner, width = params.down.shape[1], params.gate_up.shape[1]
        mid = h.new_empty(h.shape[0], inner)
        args = [h, params.gate_up, mid, float(params.limit), rows, inner, width]
        after = self._hint
        self.ahead(params.down)
        self._stream("mlp_gate_up", args, self._dealt(inner, width, rows, paired=True))
        self.ahead(*after)
        return self.linear(mid, params.down, rows)

    def head(self, h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
        if rows is None:
            return reference.head(h, weight)
        n, width = weight.shape
        logits = torch.empty(h.shape[0], n, dtype=torch.float32, device=h.device)
        dealt = self._dealt(n, width, rows, step=8)  # a token's logits of a tile are whole sectors
        values = torch.empty(dealt.blocks, ROW_TILE, dtype=torch.float32, device=h.device)
        ids = torch.empty(dealt.blocks, ROW_TILE, dtype=torch.int32, device=h.device)
        self._stream("head", [h, weight, logits, values, ids, rows, n, width], dealt)
        self.candidates = Candidates(logits, values, ids, dealt.per)
        return logits

    def _dealt(
        self, n: int, width: int, rows: int, paired: bool = False, scaled: bool = False, step: int = 1
    ) -> Stream:
        _width("width of a projection", width)
        return stream(n, width, rows, self.device.properties, paired, scaled, step, self.ring)

    def _stream(self, name: str, args: list[Argument], dealt: Stream) -> None:
        """Launch one of the kernels of stream.cuh. Its last arguments are how the work is dealt out, and the hint."""
        rows = args[-3]
        check_rows(args[0], rows)
        args = [*args, dealt.per, dealt.tall, dealt.depth, int(dealt.kept), self.hint()]
        self.device.launch(_named(name, rows), dealt.blocks, STREAM_THREADS, args, dealt.shared)


def _threads(width: int) -> int:
    return -(-width // 256) * 32
