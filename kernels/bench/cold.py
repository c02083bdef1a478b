"""Cold timings: each launch reads weights that the L2 cache cannot hold, inside a graph, as in a decode step.

A loop over one warm layer reverses rankings. So an op is captured once for each of several layers whose weights
together are at least three times the L2, and the time is a replay's divided by the layers.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

REPLAYS = 15
TIMES_L2 = 3


@dataclass(frozen=True)
class Timing:
    """One row of the table. num_bytes: what the op must read and write at least."""

    name: str
    rows: int
    num_bytes: float
    microseconds: float


def copies_for(num_bytes: float) -> int:
    """Layers that are needed so that none is still in L2 when its turn comes again; at least four."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(4, int(TIMES_L2 * l2 / num_bytes) + 1)


def time_graph(launches: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one launch: the median replay of a graph of all of them, divided by their number."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return 1000 * _median(graph.replay) / len(launches)


def copy_bandwidth(num_bytes: int = 2**31) -> float:
    """Bytes a second of a large device copy, read and written: the ceiling that shares are given of."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * num_bytes / (1e-3 * _median(lambda: target.copy_(source)))


def print_table(timings: Sequence[Timing], bandwidth: float) -> None:
    """Markdown, to be pasted into kernels/README.md."""
    print(f"measured copy bandwidth: {bandwidth / 1e12:.2f} TB/s, {torch.cuda.get_device_name()}\n")
    print("| op | rows | MB | us | TB/s | of copy | floor us |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for t in timings:
        rate = t.num_bytes / t.microseconds * 1e6
        print(
            f"| {t.name} | {t.rows} | {t.num_bytes / 1e6:.2f} | {t.microseconds:.2f} | {rate / 1e12:.2f} "
            f"| {100 * rate / bandwidth:.0f} % | {t.num_bytes / bandwidth * 1e6:.2f} |"
        )


def weight(*shape: int) -> Tensor:
    """Random bf16 on the device, scaled so that products stay of order one."""
    return torch.randn(*shape, dtype=torch.bfloat16, device="cuda") * shape[-1] ** -0.5


def _median(run: Callable[[], object]) -> float:
    """Milliseconds of a run by events, median of several after a warm-up."""
    for _ in range(3):
        run()
    spans = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        spans.append(start.elapsed_time(end))
    return statistics.median(spans)
