"""Signs of life: a page of shared memory in which each rank counts up, and the front looks on. No torch.

A process that was stopped, or hangs inside a driver with Python's lock held, stops counting. It costs no messages, and
the front's own pauses do not look like a rank's.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time

BEAT_S = 0.2
LOOK_S = 0.5


class Pulse:
    """One word for each of `size` ranks in the memory behind `fd`."""

    def __init__(self, fd: int, size: int) -> None:
        self._memory = mmap.mmap(fd, 8 * size)

    def beat(self, rank: int) -> None:
        struct.pack_into("<q", self._memory, 8 * rank, self.count(rank) + 1)

    def count(self, rank: int) -> int:
        return struct.unpack_from("<q", self._memory, 8 * rank)[0]


def make_pulse(size: int) -> int:
    """The file descriptor of a new page for `size` ranks."""
    fd = os.memfd_create("ling-pulse", 0)
    os.ftruncate(fd, 8 * size)
    return fd


def keep_beating(pulse: Pulse, rank: int) -> None:
    """Beat from a thread for as long as this process runs."""

    def body() -> None:
        while True:
            pulse.beat(rank)
            time.sleep(BEAT_S)

    threading.Thread(target=body, name="pulse", daemon=True).start()


class Listener:
    """Which ranks have fallen silent, asked every LOOK_S. Time that the front itself was stopped does not count."""

    def __init__(self, pulse: Pulse, size: int) -> None:
        self._pulse = pulse
        self._last = [0] * size
        self._silent = [0] * size

    def silent_for(self) -> list[float]:
        """Seconds without a sign of life, by rank. Called every LOOK_S."""
        for rank, before in enumerate(self._last):
            now = self._pulse.count(rank)
            self._silent[rank] = 0 if now != before else self._silent[rank] + 1
            self._last[rank] = now
        return [looks * LOOK_S for looks in self._silent]
