"""What else went on while something was timed: other processes on our CPUs, a GPU that is hot or held back.

A figure from a busy machine looks like any other. So the time that our CPUs worked for somebody else is taken from
the kernel's own counters, and the GPU is asked before and after, never in between.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling_local.bench.machine import usable_cpus

_PROC = Path("/proc")
_SMI_S = 10.0
_LEAST_S = 1.0  # the kernel counts in hundredths of a second: nothing is known of a shorter run
_SMI_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "power_w": "power.limit",
    "temperature_c": "temperature.gpu",
    "clock_mhz": "clocks.sm",
    "max_clock_mhz": "clocks.max.sm",
    "throttled": "clocks_throttle_reasons.active",
}
_TEXTS = ("name", "driver", "throttled")
_WORST = {"memory_mib": min, "power_w": min, "temperature_c": max, "clock_mhz": min, "max_clock_mhz": min}
THROTTLES = {0x4: "its power limit", 0x8: "the board", 0x20: "its heat", 0x40: "its heat", 0x80: "the power supply"}
MIB = 1 << 20
_OTHERS_BYTES = 2 << 30  # a context of our own takes some hundred MB
CPU_DOUBT, STEAL_DOUBT = 0.1, 0.02  # of each CPU that we may use


@dataclass(frozen=True, slots=True)
class Conditions:
    """Over the time of a run; None where the system does not tell, or the run was too short to say.

    others_cpus  CPUs, as a mean, that worked for other processes; stolen: share of the time that a hypervisor kept
    load_1m      load average at the beginning; gpu, gpu_after: what the driver says of the GPU, of
                 several the worst
    gpu_free_bytes  of its memory, before anything of ours was there; of several the least
    """

    cpus: int
    load_1m: float | None = None
    others_cpus: float | None = None
    stolen: float | None = None
    gpu: dict[str, Any] | None = None
    gpu_after: dict[str, Any] | None = None
    gpu_free_bytes: int = 0

    @property
    def others_on_gpu(self) -> bool | None:
        """Whether somebody else's data was on the GPU."""
        total = self.gpu["memory_mib"] if self.gpu else None
        return total * MIB - self.gpu_free_bytes > _OTHERS_BYTES if total and self.gpu_free_bytes else None

    def doubts(self) -> Iterator[str]:
        """Sentences on what may have spoilt the figures."""
        if self.others_cpus is not None and self.others_cpus > CPU_DOUBT * self.cpus:
            yield f"other processes kept {self.others_cpus:.1f} of {self.cpus} CPUs busy meanwhile"
        if self.stolen is not None and self.stolen > STEAL_DOUBT:
            yield f"the hypervisor took {100 * self.stolen:.0f} % of the CPU time away"
        if self.others_on_gpu:
            yield "other processes were on the GPU"
        reasons = {word for gpu in (self.gpu, self.gpu_after) if gpu for word in gpu["throttled"]}
        if reasons:
            yield f"the GPU was slowed down by {' and '.join(sorted(reasons))}"


@dataclass(frozen=True, slots=True)
class _Counters:
    """In ticks: our CPUs' time that was used, ours of it, what a hypervisor kept; and since when."""

    busy: int
    ours: int
    stolen: int
    at_s: float


class Watch:
    """Looks when it is made and when it is asked; the run lies in between. gpus: the driver's names of those in use."""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self._gpus = gpus
        self._load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        self._gpu = read_gpus(gpus) if gpus else None
        self._begin = _counters()

    def end(self) -> Conditions:
        """What went on since."""
        begin, end, cpus = self._begin, _counters(), len(usable_cpus())
        gpu_after = read_gpus(self._gpus) if self._gpus else None
        if begin is None or end is None or end.at_s - begin.at_s < _LEAST_S:
            return Conditions(cpus, self._load, gpu=self._gpu, gpu_after=gpu_after)
        ticks = (end.at_s - begin.at_s) * os.sysconf("SC_CLK_TCK")
        others = min(max(0.0, (end.busy - begin.busy) - (end.ours - begin.ours)) / ticks, cpus)
        stolen = (end.stolen - begin.stolen) / ticks / cpus
        return Conditions(cpus, self._load, others, stolen, self._gpu, gpu_after)


def _counters() -> _Counters | None:
    """None where there is no /proc."""
    try:
        lines = (_PROC / "stat").read_text(encoding="ascii").splitlines()
        ours = sum(_ticks_of(pid) for pid in family())
    except (OSError, ValueError):
        return None
    wanted = {f"cpu{number}" for number in usable_cpus()}
    rows = [[int(cell) for cell in line.split()[1:9]] for line in lines if line.split(maxsplit=1)[0] in wanted]
    # user nice system idle iowait irq softirq steal
    busy = sum(sum(row[:3]) + row[5] + row[6] for row in rows)
    return _Counters(busy, ours, sum(row[7] for row in rows), time.monotonic())


def family() -> set[int]:
    """This process and all that descend from it, the engine's workers among them."""
    parents: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                parents[int(entry.name)] = int(fields[1])
    found, more = {os.getpid()}, True
    while more:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
    return found


def _ticks_of(pid: int) -> int:
    """CPU time of a process and of its children that have ended."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields after the name, which may hold blanks; [] where the process has just ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def read_gpus(gpus: Sequence[str], command: Sequence[str] = ("nvidia-smi",)) -> dict[str, Any] | None:
    """What the driver says of GPUs, by their UUIDs: numbers, and in words what slows them down. Of several the worst,
    as they wait for each other. None: no answer about one of them."""
    query = [*command, f"--query-gpu={','.join(('uuid', *_SMI_FIELDS.values()))}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    known = {row[0]: _facts(row[1:]) for row in rows if len(row) == 1 + len(_SMI_FIELDS)}
    if done.returncode or not set(gpus) <= set(known):
        return None
    found = [known[gpu] for gpu in gpus]
    worst = {name: _worst(pick, [facts[name] for facts in found]) for name, pick in _WORST.items()}
    return {**found[0], **worst, "throttled": sorted({reason for facts in found for reason in facts["throttled"]})}


def _facts(cells: Sequence[str]) -> dict[str, Any]:
    facts: dict[str, Any] = dict(zip(_SMI_FIELDS, cells, strict=True))
    for name in facts.keys() - set(_TEXTS):
        facts[name] = _number(facts[name])
    facts["throttled"] = throttles(facts["throttled"])
    return facts


def _worst(pick: Callable[[list[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return pick(known) if known else None


def throttles(word: str) -> list[str]:
    """What slows a GPU down, from the driver's bit mask. Idling and chosen clocks do not count."""
    try:
        mask = int(word, 16)
    except ValueError:  # "[N/A]"
        return []
    return sorted({reason for bit, reason in THROTTLES.items() if mask & bit})


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None
