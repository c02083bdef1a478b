"""What lies between the GPUs of this machine, and whether an exchange over it works and how long it takes. No torch.

Links and peer access are asked of the driver's management library; the exchange is tried by a process a GPU
(exchange_probe.py), with an end to it whatever a driver does.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

from ling_local.engine.gpus import gpu_handle, open_nvml, visible
from ling_local.engine.shard import SIZES

_P2P_WRITE, _P2P_NVLINK = 1, 2
_TAIL = 2000


@dataclass(frozen=True, slots=True)
class Link:
    """Between GPUs `first` and `second`. peer_access: one may write into the other's memory, says the driver."""

    first: int
    second: int
    nvlink: bool
    peer_access: bool

    def __str__(self) -> str:
        way = "NVLink" if self.nvlink else "PCIe"
        return f"GPU {self.first} - GPU {self.second}: {way}, {'' if self.peer_access else 'no '}peer access"


@dataclass(frozen=True, slots=True)
class Trial:
    """How an exchange between GPUs went. kind: "peer memory" or "NCCL", "" where it failed; note: why it is not peer
    memory, or why it failed; microseconds of a sum with residual and norm in a graph, one row and nine."""

    gpus: tuple[int, ...]
    kind: str
    note: str = ""
    one_row_us: float = 0.0
    nine_rows_us: float = 0.0


def find_links() -> list[Link]:
    """Every pair of GPUs that this process may use; none where the driver does not answer."""
    with open_nvml() as nvml, suppress(AttributeError):  # a library older than these questions
        handles = [gpu_handle(nvml, number) for number in visible(nvml)] if nvml else []
        return [
            Link(a, b, _p2p(nvml, handles[a], handles[b], _P2P_NVLINK), _p2p(nvml, handles[a], handles[b], _P2P_WRITE))
            for a, b in combinations(range(len(handles)), 2)
        ]
    return []


def try_exchange(gpus: Sequence[int], seconds: float = 120.0) -> Trial:
    """Start a process for each of `gpus`, exchange known values between them, and time it. Ends within `seconds`."""
    size = len(gpus)
    if size not in SIZES or size < 2:
        return Trial(tuple(gpus), "", f"{size} GPUs: an exchange is between 2, 4 or 8")
    board = os.memfd_create("ling-probe", 0)
    processes = []
    for rank, index in enumerate(gpus):
        command = [sys.executable, "-P", "-m", "ling_local.engine.exchange_probe"]
        arguments = [str(rank), str(size), str(index), str(board)]
        processes.append(
            subprocess.Popen(
                command + arguments,
                pass_fds=(board,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    os.close(board)
    return Trial(tuple(gpus), **_outcome(processes, time.monotonic() + seconds, seconds))


def _outcome(processes: list[subprocess.Popen[bytes]], until: float, seconds: float) -> dict[str, str | float]:
    """What rank 0 said at its end, or what the first rank to fail did."""
    late = False
    while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
        if late := time.monotonic() > until:
            break
        time.sleep(0.05)
    failed = next((rank for rank, process in enumerate(processes) if process.poll()), None)
    for process in processes:
        process.kill()
    said = [process.communicate()[0].decode("utf-8", "replace") for process in processes]
    if late:
        return {"kind": "", "note": f"no answer within {seconds:g} s"}
    lines = [line for line in said[failed or 0][-_TAIL:].splitlines() if line.strip()]
    last = lines[-1].strip() if lines else "it said nothing"
    if failed is not None:
        return {"kind": "", "note": f"rank {failed}: {last}"}
    return json.loads(last)


def _p2p(nvml: ctypes.CDLL, first: ctypes.c_void_p, second: ctypes.c_void_p, kind: int) -> bool:
    status = ctypes.c_int(-1)
    done = nvml.nvmlDeviceGetP2PStatus(first, second, kind, ctypes.byref(status))
    return done == 0 and status.value == 0
