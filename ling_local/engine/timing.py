"""Timing on the device: medians by its own clock, graphs of launches, and the bandwidth that shares are given of.

A loop over one warm op reverses rankings, so ops are timed cold: each launch reads weights that the L2 cache cannot
hold, inside a graph, as in a decode step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

REPLAYS = 15
TIMES_L2 = 3
Launch = Callable[[], object]


def median_us(run: Launch, device: str, replays: int = REPLAYS) -> float:
    """Microseconds of a run, median of several after a warm-up: by events on a GPU, by the clock on a CPU."""
    for _ in range(3):
        run()
    spans = []
    for _ in range(replays):
        if device == "cpu":
            begun = time.perf_counter()
            run()
            spans.append(1e6 * (time.perf_counter() - begun))
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        spans.append(1000 * start.elapsed_time(end))
    return statistics.median(spans)


def launches_us(launches: Sequence[Launch], device: str) -> float:
    """Microseconds of one launch: all of them in one graph, the median replay divided by their number."""
    for launch in launches:
        launch()
    if device == "cpu":
        return median_us(lambda: [launch() for launch in launches], device, 3) / len(launches)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return median_us(graph.replay, device) / len(launches)


def flushed_us(launches: Sequence[Launch], device: str) -> float:
    """The same with the L2 cache emptied before each launch; the time that this takes is measured and left out."""
    buffer = torch.zeros(max(2 * l2_bytes(device), 2**20) // 4, dtype=torch.float32, device=device)

    def flush() -> Tensor:
        return buffer.amax()  # reads only: what is written would still be on its way out while the launch runs

    both = [call for launch in launches for call in (flush, launch)]
    return max(2 * launches_us(both, device) - launches_us([flush] * len(launches), device), 0.0)


def l2_bytes(device: str) -> int:
    """Size of the cache that weights must not be found in; none on a CPU, where nothing is claimed about it."""
    return 0 if device == "cpu" else torch.cuda.get_device_properties(device).L2_cache_size


def copy_bandwidth(device: str, num_bytes: int = 2**31) -> float:
    """Bytes a second of a large copy on the device, read and written."""
    source = torch.empty(num_bytes if device != "cpu" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-6 * median_us(lambda: target.copy_(source), device))
