"""A step kernel by kernel: launches, microseconds, and how much later the step is for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch


def breakdown(run: Callable[[], None], steps: int = 5) -> None:
    """Launches, microseconds by kernel, and how much later the step is for each: launches overlap, so what a kernel
    costs is the time from the end of what ended before it to its own end. Profiled, so a little slower than it is."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    print_breakdown(profile, steps)


def print_breakdown(profile: torch.profiler.profile, steps: int, most: int = 40) -> None:
    spans = [(e.time_range.end, e.time_range.start, e.name) for e in profile.events() if on_device(e)]
    busy, late, count, before, idle = Counter(), Counter(), Counter(), None, 0.0
    for end, start, name in sorted(spans):
        idle += 0.0 if before is None else max(0.0, start - before)
        count[name] += 1
        busy[name] += end - start
        late[name] += max(0.0, end - (start if before is None else before))
        before = end if before is None else max(before, end)
    print("\n| kernel | launches | us | us later |\n| --- | ---: | ---: | ---: |")
    for name, total in late.most_common(most):
        print(f"| {name[:70]} | {count[name] / steps:.0f} | {busy[name] / steps:.1f} | {total / steps:.1f} |")
    total = (sum(x.values()) / steps for x in (count, busy, late))
    print("| all | {:.0f} | {:.1f} | {:.1f} |".format(*total))
    print(f"| of these with nothing on the GPU | | | {idle / steps:.1f} |\n")


def on_device(event: torch.autograd.profiler_util.FunctionEvent) -> bool:
    return event.device_type == torch.autograd.DeviceType.CUDA
