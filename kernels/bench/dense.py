"""Cold timings of the dense ops, router and experts, at the published shapes with random weights.

python kernels/bench/dense.py                  # tiny, 1 and 9 rows
python kernels/bench/dense.py --shape flash4   # one rank of four of flash
python kernels/bench/dense.py --no-pdl         # launches one after another
python kernels/bench/dense.py --variants       # projections only, dealt out in other ways, and with less asked early
python kernels/bench/dense.py --chain          # exchange_norm and in_proj in turn, as in a step
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from cold import Timing, copies_for, copy_bandwidth, print_table, time_graph, weight
from torch import Tensor

import ling_kernels
from ling_kernels.cuda import CudaOps
from ling_kernels.cuda.tiles import TALL, TOGETHER, deal
from ling_kernels.ops import ROW_TILE, MlpParams, MoeParams

BF16 = 2


@dataclass(frozen=True)
class Shape:
    """heads: on this rank; inner, dense, vocab: this rank's part."""

    hidden: int
    heads: int
    experts: int
    inner: int
    dense: int
    vocab: int


SHAPES = {
    "tiny": Shape(hidden=1536, heads=16, experts=128, inner=512, dense=4608, vocab=157184),
    "flash4": Shape(hidden=2560, heads=8, experts=512, inner=192, dense=1536, vocab=39296),
}


def moe_params(shape: Shape) -> MoeParams:
    width, inner = shape.hidden, shape.inner
    return MoeParams(
        gate=weight(shape.experts, width).float(),
        bias=torch.zeros(shape.experts, device="cuda"),
        gate_up=weight(shape.experts, 2 * inner, width),
        down=weight(shape.experts, width, inner),
        shared=MlpParams(weight(2 * inner, width), weight(width, inner)),
        experts_per_token=8,
        n_group=8,
        topk_group=4,
        scale=2.5,
    )


def projections(shape: Shape) -> dict[str, tuple[int, int]]:
    """Rows and width of each weight of a KDA layer, and of an MLA layer's first projection."""
    inner = shape.heads * 128
    return {
        "in_proj (KDA)": (5 * inner + shape.heads, shape.hidden),
        "out_proj": (shape.hidden, inner),
        "dense down": (shape.hidden, shape.dense),
        "in_proj (MLA)": (256 + 576 + shape.heads, shape.hidden),
    }


def time_projections(ops: CudaOps, shape: Shape, rows: int) -> Iterator[Timing]:
    for name, (n, width) in projections(shape).items():
        size = BF16 * (n * width + rows * (n + width))
        weights = [weight(n, width) for _ in range(copies_for(size))]
        x = weight(ROW_TILE, width)
        yield Timing(name, rows, size, time_graph([_call(ops.linear, x, w, rows) for w in weights]))
    n, width = shape.vocab, shape.hidden
    size = BF16 * n * width + 4 * rows * n
    weights, x = [weight(n, width) for _ in range(4)], weight(ROW_TILE, width)
    yield Timing("lm_head", rows, size, time_graph([_call(ops.head, x, w, rows) for w in weights]))


def time_mlp_and_norm(ops: CudaOps, shape: Shape, rows: int) -> Iterator[Timing]:
    width, inner = shape.hidden, shape.dense
    size = BF16 * (3 * inner * width + 2 * rows * (inner + width))
    params = [MlpParams(weight(2 * inner, width), weight(width, inner)) for _ in range(copies_for(size))]
    x, partial, norm = weight(ROW_TILE, width), weight(ROW_TILE, width), weight(width)
    yield Timing("dense mlp", rows, size, time_graph([_call(ops.mlp, x, p, rows) for p in params]))
    moved = BF16 * (4 * rows * width + width)
    chain = [_call(ops.exchange_norm, partial, x, norm, 1e-6, rows)] * 50
    yield Timing("exchange_norm", rows, moved, time_graph(chain))


def time_experts(ops: CudaOps, shape: Shape, rows: int) -> Iterator[Timing]:
    """Routing of random rows; the distinct experts are counted, so the bytes are what was read. experts.py times the
    same as it stands in a step, where the parts overlap."""
    width, inner = shape.hidden, shape.inner
    x = torch.randn(ROW_TILE, width, device="cuda").bfloat16()
    layers = [moe_params(shape) for _ in range(6)]
    size = BF16 * shape.experts * width
    yield Timing("router", rows, size, time_graph([_call(ops.route, x, p, rows) for p in layers]))
    slots = sum(distinct(ops, x, p, rows) for p in layers) / len(layers) + 1
    size = BF16 * (3 * slots * inner * width + 2 * rows * slots * inner + 2 * rows * width)
    calls = [_call(ops.experts, x, ops.route(x, p, rows), p, rows) for p in layers]
    yield Timing(f"experts ({slots - 1:.0f} + shared)", rows, size, time_graph(calls))


def time_variants(ops: CudaOps, shape: Shape, rows: int) -> Iterator[Timing]:
    """Each projection alone, dealt out to blocks of so many warps, with more or less asked of L2 before the wait."""
    for name, (n, width) in projections(shape).items():
        size = BF16 * (n * width + rows * (n + width))
        weights = [weight(n, width) for _ in range(copies_for(size))]
        x = weight(ROW_TILE, width)
        for warps, together in ((None, 12), (None, 16), (3, 16), (4, 16), (6, 12), (8, 8), (8, 16), (12, 12), (16, 16)):
            ops.warps, ops.together = warps, together
            dealt = deal(n, width, ops.device.properties.num_sms, TALL, together, warps)
            for early in (0.0, 0.4) if warps else (0.0, 0.2, 0.4, 0.7):
                ops.early = early
                what = f"{name}, {together} together, early {early}: {tuple(dealt)}"
                yield Timing(what, rows, size, time_graph([_call(ops.linear, x, w, rows) for w in weights]))
    ops.warps, ops.together, ops.early = None, TOGETHER, type(ops).early


def time_chain(ops: CudaOps, shape: Shape, rows: int) -> Iterator[Timing]:
    """Layers of norm, in_proj, norm, out_proj, where the memory is idle only if a kernel leaves it so."""
    inner, width = shape.heads * 128, shape.hidden
    size = BF16 * ((5 * inner + shape.heads) * width + width * inner)
    layers = [(weight(5 * inner + shape.heads, width), weight(width, inner), weight(width)) for _ in range(8)]
    x, partial = weight(ROW_TILE, width), weight(ROW_TILE, width)
    o = weight(ROW_TILE, inner)

    def layer(first: Tensor, second: Tensor, norm: Tensor, following: Tensor | None) -> Callable[[], None]:
        def run() -> None:
            _, h = ops.exchange_norm(partial, x, norm, 1e-6, rows)
            ops.ahead(second, following)
            ops.linear(h, first, rows)
            ops.exchange_norm(partial, x, norm, 1e-6, rows)
            ops.linear(o, second, rows)

        return run

    for asks, early, early_norm in itertools.product((False, True), (0.0, 0.4), (False, True)):
        ops.asks, ops.early, ops.early_norm = asks, early, early_norm
        following = [first for first, _, _ in layers[1:]] + [None]
        calls = [layer(*part, after if asks else None) for part, after in zip(layers, following, strict=True)]
        what = f"norm, in, norm, out; ahead {asks}, early {early}, norm lets in early {early_norm}"
        yield Timing(what, rows, size, time_graph(calls))
    ops.asks, ops.early, ops.early_norm = True, type(ops).early, True


def distinct(ops: CudaOps, x: torch.Tensor, params: MoeParams, rows: int) -> int:
    """How many experts the first rows choose together."""
    return ops.route(x, params, rows).experts[:rows].unique().numel()


def _call(op: Callable, *args: object) -> Callable[[], object]:
    return lambda: op(*args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--variants", action="store_true")
    parser.add_argument("--chain", action="store_true")
    parser.add_argument("--cache", type=Path, help="folder for compiled kernels")
    args = parser.parse_args()
    ops = ling_kernels.load("cuda", cache=args.cache, pdl=not args.no_pdl)
    shape, timings = SHAPES[args.shape], []
    parts = (time_projections, time_mlp_and_norm, time_experts)
    if args.variants or args.chain:
        parts = (time_variants,) * args.variants + (time_chain,) * args.chain
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        for rows in args.rows:
            for part in parts:
                timings += part(ops, shape, rows)
    print_table(timings, bandwidth)


if __name__ == "__main__":
    main()
