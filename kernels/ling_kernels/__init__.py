"""The kernels of ling: the ops of the one decode step, by device. Imports torch only, never ling_local."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ling_kernels.exchange import Board, SharedExchange
from ling_kernels.ops import KernelError, Ops


def load(
    device: str,
    *,
    cache: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    pdl: bool = True,
    board: Board | None = None,
    peer_memory: bool = True,
    gate_fp32: bool = False,
) -> Ops:
    """The ops for a device: "cpu", "cuda" or "cuda:1". Raises KernelError for one that has none.

    cache: folder for compiled kernels, None to compile anew; progress(unit, done, total) is told of each compilation;
    pdl: let a kernel start while the one before it ends.
    board: what this rank shares with the others, where there are several; all of them call this at about the same time.
    peer_memory: try to write into each other's memory; without, or where it fails its test, ranks exchange over NCCL.
    gate_fp32: a GPU's routers keep weights that are fp32 in the checkpoint; in bf16 otherwise. The CPU always does.
    """
    kind, _, index = device.partition(":")
    several = board is not None and board.size > 1
    if kind == "cpu":
        from ling_kernels.reference import ReferenceOps
        from ling_kernels.reference.ranks import RankOps

        return RankOps(SharedExchange(board)) if several else ReferenceOps()
    if kind == "cuda":
        from ling_kernels.cuda import open_ops

        return open_ops(int(index or 0), cache, progress, pdl, board if several else None, peer_memory, gate_fp32)
    raise KernelError(f"no kernels for device '{device}' yet")
