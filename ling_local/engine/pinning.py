"""What keeps the launching thread on time: a core of its own near its GPU, and no garbage collection meanwhile."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PCI = Path("/sys/bus/pci/devices")
_CPUS = Path("/sys/devices/system/cpu")


def cpu_list(text: str) -> set[int]:
    """CPUs of the kernel's notation, "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def launcher_cpu(rank: int, size: int, allowed: set[int], near: set[int]) -> int | None:
    """The core for rank `rank`'s launcher: from the end of those near its GPU, away from the first ones, where systems
    put their own work. None where every rank could not have two."""
    cores = sorted(near & allowed) or sorted(allowed)
    firsts = [cpu for cpu in cores if cpu == min(_siblings(cpu) & allowed | {cpu})]
    if len(allowed) < 2 * size or len(firsts) < size + 1:
        return None
    return firsts[-1 - rank]


def _siblings(cpu: int) -> set[int]:
    """Threads of the same core."""
    try:
        return cpu_list((_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text())
    except (OSError, ValueError):
        return {cpu}


def near_gpu(bus_id: str) -> set[int]:
    """CPUs next to the GPU at PCI address `bus_id`, "0000:1b:00.0"; empty where the system does not say."""
    try:
        return cpu_list((_PCI / bus_id.lower() / "local_cpulist").read_text())
    except (OSError, ValueError):
        return set()


def pin_launcher(rank: int, size: int, bus_id: str) -> int | None:
    """Keep the calling thread, and no other, on a core of its own; which one, or None where there are too few."""
    try:
        cpu = launcher_cpu(rank, size, os.sched_getaffinity(0), near_gpu(bus_id))
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
    except (OSError, AttributeError):  # refused, or a system without
        return None
    return cpu


class _Collections:
    """Who wants none at the moment: several threads of one process may, and end in any order."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a generation that is given up may end wherever its last reference goes
        self._unwanted = 0
        self._were_on = True

    def hold(self) -> None:
        with self._lock:
            if self._unwanted == 0:
                self._were_on = gc.isenabled()
                gc.disable()
            self._unwanted += 1

    def release(self) -> None:
        with self._lock:
            self._unwanted -= 1
            if self._unwanted == 0 and self._were_on:
                gc.enable()


_collections = _Collections()


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: one takes longer than several steps, and the launching thread must keep up."""
    _collections.hold()
    try:
        yield
    finally:
        _collections.release()
