"""Router and experts as they stand in a step: exchange_norm, router, gate_up, down, layer after layer; by variant.

python kernels/bench/experts.py                      # tiny, 1 and 9 rows
python kernels/bench/experts.py --shape flash4 --rows 9
python kernels/bench/experts.py --breakdown          # microseconds by kernel of all layers

A layer's time is that of the chain less what exchange_norm takes alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from cold import copy_bandwidth, time_graph, weight
from dense import BF16, SHAPES, Shape, distinct, moe_params
from step import breakdown

import ling_kernels
from ling_kernels.cuda import CudaOps
from ling_kernels.ops import ROW_TILE, MoeParams

LAYERS = 12
# Switches of ExpertOps, and `whole_shared` of the device, which counts for kernels that have not been launched yet.
VARIANTS: dict[str, dict[str, object]] = {
    "as it is": {},
    "a kernel of its own selects": {"select_apart": True},
    "experts' weights leave L2 first": {"first_to_go": True},
    "gate_up 2 batches deep": {"gate_depth": 2},
    "gate_up 6 batches deep": {"gate_depth": 6},
    "down 3 batches deep": {"down_depth": 3},
    "no room beside gate_up": {"whole_shared": False},
    "launches one after another": {"pdl": False},
}


def chain(ops: CudaOps, shape: Shape, layers: list[MoeParams], rows: int, routed: bool) -> list[Callable[[], None]]:
    """One call a layer; without `routed` only the norm."""
    x, norm = weight(ROW_TILE, shape.hidden), weight(shape.hidden).abs() + 1
    partial = weight(ROW_TILE, shape.hidden)

    def layer(params: MoeParams) -> None:
        _, h = ops.exchange_norm(partial, x, norm, 1e-6, rows)
        if routed:
            ops.experts(h, ops.route(h, params, rows), params, rows)

    return [lambda params=params: layer(params) for params in layers]


def rows_of_table(shape: Shape, rows: int, args: argparse.Namespace, bandwidth: float) -> None:
    layers = [moe_params(shape) for _ in range(LAYERS)]
    for name, switches in VARIANTS.items():
        pdl = bool(switches.get("pdl", True))
        ops = ling_kernels.load("cuda", cache=args.cache, pdl=pdl)
        for switch, value in switches.items():
            setattr(ops.device if switch in ("whole_shared", "pdl") else ops, switch, value)
        x = torch.randn(ROW_TILE, shape.hidden, device="cuda").bfloat16()
        slots = sum(distinct(ops, x, p, rows) for p in layers) / len(layers) + 1
        size = BF16 * (3 * slots * shape.inner * shape.hidden + shape.experts * shape.hidden)
        runs = chain(ops, shape, layers, rows, routed=True)
        alone = time_graph(chain(ops, shape, layers, rows, routed=False))
        took = time_graph(runs) - alone
        floor = size / bandwidth * 1e6
        print(
            f"| {name} | {rows} | {slots - 1:.1f} | {size / 1e6:.1f} | {took:.2f} | {floor:.2f} | {floor / took:.0%} |"
        )
        if args.breakdown:
            breakdown(captured(runs))


def captured(runs: list[Callable[[], None]]) -> Callable[[], None]:
    """All of them in a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--breakdown", action="store_true")
    parser.add_argument("--cache", type=Path, help="folder for compiled kernels")
    args = parser.parse_args()
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        print(f"measured copy bandwidth: {bandwidth / 1e12:.2f} TB/s, {torch.cuda.get_device_name()}\n")
        print("| variant | rows | experts | MB | us | floor us | of copy |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
        for rows in args.rows:
            rows_of_table(SHAPES[args.shape], rows, args, bandwidth)


if __name__ == "__main__":
    main()
