"""What ten captured steps of the demo model do on the GPU, with and without drafts: all memory operations and kernels.

python kernels/bench/copies.py

The record that nothing goes from the device to the host but the ring's entry, one small copy a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ling_local.engine.native import NativeEngine
from ling_local.paths import demo_dir
from ling_local.types import TokenRequest

STEPS, BEFORE = 10, 12


@dataclass(frozen=True)
class Line:
    """One kind of activity over all steps."""

    name: str
    count: int
    microseconds: float


def profiled(engine: NativeEngine, draft: bool) -> list[Line]:
    """Everything that the GPU did during STEPS steps in the middle of an answer, run ahead as always."""
    prompt = tuple((13 * i + 7) % 4000 for i in range(40))
    generation = engine.generate(TokenRequest(prompt, max_tokens=400, draft=draft, full_width=draft))
    steps = iter(generation)
    for _ in range(BEFORE):
        next(steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            next(steps)
        torch.cuda.synchronize()
    generation.close()
    found = [Line(e.key, e.count, e.device_time_total) for e in profile.key_averages() if e.device_time_total]
    return sorted(found, key=lambda line: -line.microseconds)


def is_memory(line: Line) -> bool:
    return line.name.startswith(("Memcpy", "Memset"))


def print_lines(lines: Sequence[Line], most: int) -> None:
    print("| activity | times | us |\n| --- | ---: | ---: |")
    for line in lines[:most]:
        print(f"| {line.name[:90]} | {line.count} | {line.microseconds:.1f} |")
    print(f"| all {len(lines)} kinds | {sum(x.count for x in lines)} | {sum(x.microseconds for x in lines):.1f} |\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=40, help="kernels to list")
    args = parser.parse_args()
    for draft in ("off", "dspark", "mtp"):
        engine = NativeEngine.load(demo_dir(), "cuda", "bfloat16", draft, context=2048)
        lines = profiled(engine, draft != "off")
        engine.close()
        print(f"\n## {STEPS} steps of the demo model, drafts: {draft}, {torch.cuda.get_device_name()}\n")
        print("Memory operations:\n")
        print_lines([line for line in lines if is_memory(line)], args.most)
        print("Kernels:\n")
        print_lines([line for line in lines if not is_memory(line)], args.most)
        to_host = sum(line.count for line in lines if "DtoH" in line.name)
        # the steps that are granted ahead send their entries in the same span
        verdict = "only the ring's" if to_host <= STEPS + engine.run_ahead + 1 else "MORE THAN THE RING'S"
        print(f"copies from the device to the host: {to_host}, {verdict}")


if __name__ == "__main__":
    main()
