"""The ops on an NVIDIA GPU: checks shapes, passes pointers, launches. What each kernel does stands in `csrc`.

Conventions between the kernels' host sides:
- A window's buffers are allocated by each op with torch.empty, so that a captured graph owns them; rows past the live
  ones are never written and never read.
- `gated`: kda_verify may leave (o, sums, eps), where o [R, P] still lacks its norm and sums [ROW_TILE, H, slices] fp32
  hold the sums of squares; `linear` applies the norm when it is given exactly that o.
- `candidates`: head leaves (logits, values, ids, span), the best of every `span` vocabulary rows for each live row:
  values [ranges, ROW_TILE] fp32 (NaN where a logit was not finite), ids [ranges, ROW_TILE] int32.
"""

from __future__ import annotations

from pathlib import Path

from ling_kernels.cuda.compile import ProgressFn
from ling_kernels.cuda.dense import DenseOps
from ling_kernels.cuda.draft import DraftOps
from ling_kernels.cuda.driver import Device
from ling_kernels.cuda.latent import LatentOps
from ling_kernels.cuda.recurrent import RecurrentOps
from ling_kernels.cuda.sample import SampleOps


class CudaOps(DenseOps, RecurrentOps, LatentOps, SampleOps, DraftOps):
    """The contracts of `ling_kernels.ops.Ops` on one GPU."""


def open_ops(
    index: int = 0, cache: Path | None = None, progress: ProgressFn | None = None, pdl: bool = True
) -> CudaOps:
    """Compile (or find in `cache`) and load the kernels for GPU `index`. Raises KernelError."""
    return CudaOps(Device(index, cache, progress, pdl))
