"""One rank's engine in its process: what it shares with the others, its GPU, its cores."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ling_kernels.exchange import PATIENCE_S, Board
from ling_local.engine.follow import Peers
from ling_local.engine.native import NativeEngine
from ling_local.engine.pinning import pin_launcher
from ling_local.engine.protocol import EngineSpec, ProgressFn
from ling_local.engine.ranks import Seat


def load_rank(spec: EngineSpec, seat: Seat, progress: ProgressFn | None) -> NativeEngine:
    """Load the part of rank `seat.rank`. Comes back when all ranks have loaded theirs."""
    board = Board(seat.board, seat.rank, seat.size)
    if seat.device == "cpu" and not spec.threads:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // seat.size))
    engine = NativeEngine.load(
        Path(spec.model),
        seat.device,
        spec.dtype,
        spec.draft,
        block=spec.block,
        context=spec.context,
        threads=spec.threads,
        progress=progress,
        dummy=spec.dummy,
        accept=spec.accept,
        board=board,
    )
    if seat.rank == 0:
        engine.peers = Peers([Connection(fd) for fd in seat.others])
    if seat.device != "cpu":
        pin_launcher(seat.rank, seat.size, bus_id(seat.device))
    board.share()
    engine.ops.exchange.set_patience(PATIENCE_S)
    return engine


def bus_id(device: str) -> str:
    """PCI address of a GPU as the kernel writes it."""
    found = torch.cuda.get_device_properties(device)
    domain, bus, slot = (getattr(found, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"
