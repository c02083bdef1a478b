"""Cold timings of the dense ops, router and experts, at the published shapes with random weights.

python kernels/bench/dense.py                  # tiny, 1 and 9 rows
python kernels/bench/dense.py --shape flash4   # one rank of four of flash
python kernels/bench/dense.py --no-pdl         # launches one after another
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from cold import Timing, copies_for, copy_bandwidth, print_table, time_graph, weight
from floors import BF16, MODELS
from torch import Tensor

import ling_kernels
from ling_kernels.cuda import CudaOps
from ling_kernels.ops import ROW_TILE, MlpParams, MoeParams
from ling_local.engine.config import ModelConfig


def moe_params(shape: ModelConfig) -> MoeParams:
    width, inner = shape.hidden_size, shape.moe_intermediate_size
    return MoeParams(
        gate=weight(shape.num_experts, width).float(),
        bias=torch.zeros(shape.num_experts, device="cuda"),
        gate_up=weight(shape.num_experts, 2 * inner, width),
        down=weight(shape.num_experts, width, inner),
        shared=MlpParams(weight(2 * inner, width), weight(width, inner)),
        experts_per_token=shape.experts_per_token,
        n_group=shape.n_group,
        topk_group=shape.topk_group,
        scale=shape.routed_scaling_factor,
    )


def projections(shape: ModelConfig) -> dict[str, tuple[int, int]]:
    """Rows and width of a KDA layer's weights and of a dense MLP's second."""
    inner = shape.num_heads * 128
    return {
        "in_proj (KDA)": (5 * inner + shape.num_heads, shape.hidden_size),
        "out_proj": (shape.hidden_size, inner),
        "dense down": (shape.hidden_size, shape.intermediate_size),
    }


def time_projections(ops: CudaOps, shape: ModelConfig, rows: int) -> Iterator[Timing]:
    for name, (n, width) in projections(shape).items():
        size = BF16 * (n * width + rows * (n + width))
        weights = [weight(n, width) for _ in range(copies_for(size))]
        x = weight(ROW_TILE, width)
        yield Timing(name, rows, size, time_graph([_call(ops.linear, x, w, rows) for w in weights]))
    n, width = shape.vocab_size, shape.hidden_size
    size = BF16 * n * width + 4 * rows * n
    weights, x = [weight(n, width) for _ in range(4)], weight(ROW_TILE, width)
    yield Timing("lm_head", rows, size, time_graph([_call(ops.head, x, w, rows) for w in weights]))


def time_mlp_and_norm(ops: CudaOps, shape: ModelConfig, rows: int) -> Iterator[Timing]:
    width, inner = shape.hidden_size, shape.intermediate_size
    size = BF16 * (3 * inner * width + 2 * rows * (inner + width))
    params = [MlpParams(weight(2 * inner, width), weight(width, inner)) for _ in range(copies_for(size))]
    x, partial, norm = weight(ROW_TILE, width), weight(ROW_TILE, width), weight(width)
    yield Timing("dense mlp", rows, size, time_graph([_call(ops.mlp, x, p, rows) for p in params]))
    moved = BF16 * (4 * rows * width + width)
    chain = [_call(ops.exchange_norm, partial, x, norm, 1e-6, rows)] * 50
    yield Timing("exchange_norm", rows, moved, time_graph(chain))


def time_experts(ops: CudaOps, shape: ModelConfig, rows: int) -> Iterator[Timing]:
    """Routing of random rows; the distinct experts are counted, so the bytes are what was read. The shared expert's
    gate and up are made while the router selects. Then both as a step has them, where gate_up selects one row's."""
    width, inner = shape.hidden_size, shape.moe_intermediate_size
    x = torch.randn(ROW_TILE, width, device="cuda").bfloat16()
    layers = [moe_params(shape) for _ in range(6)]
    begun = BF16 * (shape.num_experts * width + 2 * inner * width)
    yield Timing("route, shared gate_up", rows, begun, time_graph([_call(ops.route, x, p, rows) for p in layers]))
    routings = [ops.route(x, p, rows) for p in layers]
    slots = sum(int(r.plan[0]) for r in routings) / len(layers)
    size = BF16 * ((3 * slots - 2) * inner * width + 2 * rows * slots * inner + 2 * rows * width)
    calls = [_call(ops.experts, x, r, p, rows) for r, p in zip(routings, layers, strict=True)]
    yield Timing(f"experts ({slots - 1:.0f} + shared)", rows, size, time_graph(calls))

    def both(params: MoeParams) -> Tensor:
        return ops.experts(x, ops.route(x, params, rows, lazy=True), params, rows)

    yield Timing("route and experts", rows, begun + size, time_graph([_call(both, p) for p in layers]))


def _call(op: Callable, *args: object) -> Callable[[], object]:
    return lambda: op(*args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=MODELS, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--no-pdl", action="store_true")
    parser.add_argument("--cache", type=Path, help="folder for compiled kernels")
    args = parser.parse_args()
    ops = ling_kernels.load("cuda", cache=args.cache, pdl=not args.no_pdl)
    shape, timings = MODELS[args.shape], []
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        for rows in args.rows:
            for part in (time_projections, time_mlp_and_norm, time_experts):
                timings += part(ops, shape, rows)
    print_table(timings, bandwidth)


if __name__ == "__main__":
    main()
