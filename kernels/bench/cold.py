"""Cold timings: each launch reads weights that the L2 cache cannot hold, inside a graph, as in a decode step.

A loop over one warm layer reverses rankings. So an op is captured once for each of several layers whose weights
together are at least three times the L2, and the time is a replay's divided by the layers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ling_local.engine import timing


@dataclass(frozen=True)
class Timing:
    """One row of the table. num_bytes: what the op must read and write at least."""

    name: str
    rows: int
    num_bytes: float
    microseconds: float


def copies_for(num_bytes: float) -> int:
    """Layers that are needed so that none is still in L2 when its turn comes again; at least four."""
    return max(4, int(timing.TIMES_L2 * timing.l2_bytes("cuda") / num_bytes) + 1)


def time_graph(launches: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one launch: the median replay of a graph of all of them, divided by their number."""
    return timing.launches_us(launches, "cuda")


def step_ms(
    run: Callable[[], object], begin: Callable[[], object], runs: int = 5, steps: int = 40
) -> tuple[float, float]:
    """Milliseconds of one run: on the GPU by events, and as the caller sees it with three runs under way; medians of
    `runs` series. begin: goes before each series, so that none is further along than the others: every run makes the
    context longer, and attention's splits grow with it."""
    on_gpu, seen = [], []
    for _ in range(runs):
        begin()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            run()
        end.record()
        torch.cuda.synchronize()
        on_gpu.append(start.elapsed_time(end) / steps)
        begin()
        torch.cuda.synchronize()
        done = [torch.cuda.Event() for _ in range(3)]
        clock = time.perf_counter()
        for number in range(steps):
            if number >= len(done):
                done[number % len(done)].synchronize()
            run()
            done[number % len(done)].record()
        torch.cuda.synchronize()
        seen.append(1000 * (time.perf_counter() - clock) / steps)
    return statistics.median(on_gpu), statistics.median(seen)


def copy_bandwidth() -> float:
    """Bytes a second of a large device copy, read and written: the ceiling that shares are given of."""
    return timing.copy_bandwidth("cuda")


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
