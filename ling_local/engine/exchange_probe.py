"""One rank of a trial exchange: ``python -m ling_local.engine.exchange_probe RANK SIZE GPU FD``, started by links.py.

Opens the kernels as a load does, start-up test included, and times the exchange in a graph. Rank 0 ends with a line of
JSON: kind, note, one_row_us, nine_rows_us.
"""

from __future__ import annotations

import faulthandler
import json
import statistics
import sys
from collections.abc import Callable

import torch

import ling_kernels
from ling_kernels.exchange import Board
from ling_kernels.ops import ROW_TILE
from ling_local.paths import cache_dir

WIDTH, CHAIN, REPLAYS = 2560, 100, 20


def main(rank: int, size: int, index: int, fd: int) -> None:
    """Try and time an exchange between `size` ranks; this one is `rank`, on GPU `index`."""
    faulthandler.enable()
    torch.cuda.set_device(index)
    board = Board(fd, rank, size)
    ops = ling_kernels.load(f"cuda:{index}", cache=cache_dir() / "kernels", board=board)
    x = torch.randn(ROW_TILE, WIDTH, device=f"cuda:{index}").bfloat16()
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=x.device)
    figures = []
    with torch.inference_mode():
        for rows in (1, 9):
            us = chain_us(board, lambda rows=rows: ops.exchange_norm(x, x, weight, 1e-6, rows))
            figures.append(round(us, 2))
    ops.exchange.check()
    if rank == 0:
        found = {"kind": ops.exchange.kind, "note": ops.note, "one_row_us": figures[0], "nine_rows_us": figures[1]}
        sys.stdout.write("\n" + json.dumps(found) + "\n")
        sys.stdout.flush()
    board.share()


def chain_us(board: Board, run: Callable[[], object]) -> float:
    """Microseconds of one `run` in a graph of CHAIN of them, in the median of REPLAYS; all ranks call it together."""
    run()
    torch.cuda.synchronize()
    board.share()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(CHAIN):
            run()
    torch.cuda.synchronize()
    board.share()
    spans = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spans.append(1000 * start.elapsed_time(end) / CHAIN)
    return statistics.median(spans)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
