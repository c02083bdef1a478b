"""The ops on an NVIDIA GPU: checks shapes, passes pointers, launches. What each kernel does stands in `csrc`.

Conventions between the kernels' host sides:
- A window's buffers are allocated by each op with torch.empty, so that a captured graph owns them; rows past the live
  ones are never written and never read.
- `gated`: kda_verify may leave (o, sums, eps), where o [R, P] still lacks its norm and sums [ROW_TILE, H, slices] fp32
  hold the sums of squares; `linear_partial` of exactly that o applies the norm.
- `unnormed`: a lazy exchange_norm may leave one row's sum and norm to `linear` or `route` of exactly that h, whose
  kernel then writes h and the new x.
- `unembedded`: a lazy embed leaves the look-up to exchange_norm of exactly that x.
- `uncommitted`: a lazy kda_commit leaves its launch to `advance` of the verdict whose count it was given.
- `Routing.begun`: values [slots, ROW_TILE, I] between gate_up and down, I the larger of the experts' widths. Whoever
  makes a plan makes those of the first slot, the shared expert's.
- `unselected`: a lazy route leaves one row's selection to `experts` of exactly that routing, whose first kernel then
  writes experts, weights and plan; the router's has cleared the plan and made the first slot's values.
- `candidates`: head leaves (logits, values, ids, span), the best of every `span` vocabulary rows for each live row:
  values [ranges, ROW_TILE] fp32 (NaN where a logit was not finite), ids [ranges, ROW_TILE] int32.
"""

from __future__ import annotations

from pathlib import Path

import torch

from ling_kernels.cuda.compile import ProgressFn
from ling_kernels.cuda.dense import DenseOps
from ling_kernels.cuda.draft import DraftOps
from ling_kernels.cuda.driver import Device
from ling_kernels.cuda.latent import LatentOps
from ling_kernels.cuda.recurrent import RecurrentOps
from ling_kernels.cuda.sample import SampleOps
from ling_kernels.exchange import Board

COMPILING_S = 600.0  # that ranks wait for the one that compiles


class CudaOps(DenseOps, RecurrentOps, LatentOps, SampleOps, DraftOps):
    """The contracts of `ling_kernels.ops.Ops` on one GPU."""


def open_ops(
    index: int = 0,
    cache: Path | None = None,
    progress: ProgressFn | None = None,
    pdl: bool = True,
    board: Board | None = None,
    peer_memory: bool = True,
    gate_fp32: bool = False,
) -> CudaOps:
    """Compile (or find in `cache`) and load the kernels for GPU `index`. Raises KernelError.

    board: what the ranks share, where there are several: all of them call this. peer_memory: see `open_exchange`.
    gate_fp32: see `DenseOps`.
    """
    if board is None:
        return CudaOps(Device(index, cache, progress, pdl), gate_fp32)
    from ling_kernels.cuda.exchange import open_exchange
    from ling_kernels.cuda.ranks import CudaRankOps

    torch.cuda.set_device(index)
    if board.rank > 0 and cache is not None:
        board.share(seconds=COMPILING_S)  # rank 0 compiles, the others find what it kept
    device = Device(index, cache, progress, pdl)
    if board.rank == 0 and cache is not None:
        board.share(seconds=COMPILING_S)
    board.share(seconds=COMPILING_S)
    return CudaRankOps(device, *open_exchange(device, board, peer_memory), gate_fp32)
