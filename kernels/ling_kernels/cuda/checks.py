"""What the kernels over a window's rows take, and what they are called."""

from __future__ import annotations

from torch import Tensor, bfloat16

from ling_kernels.ops import ROW_TILE, KernelError


def check_rows(x: Tensor, rows: int) -> None:
    if not 1 <= rows <= ROW_TILE:
        raise KernelError(f"{rows} rows: a window has 1 to {ROW_TILE}")
    if x.dtype != bfloat16:
        raise KernelError(f"activations in {x.dtype}: the kernels compute in bfloat16")


def check_width(what: str, size: int, most: int = 1 << 30) -> int:
    """`size`, which `what` has."""
    if size % 8 or size > most:
        raise KernelError(
            f"{what} {size}: the kernels need a multiple of 8" + (f" up to {most}" if size > most else "")
        )
    return size


def named(name: str, rows: int) -> str:
    """Kernels come for one and for two tiles of eight tokens; both give a row the same bits."""
    return f"{name}_{8 if rows <= 8 else 16}"
