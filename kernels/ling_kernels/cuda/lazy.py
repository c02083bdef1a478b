"""What one op leaves undone, or already knows, for the next."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ling_kernels.cuda.driver import Argument
from ling_kernels.ops import Routing


class Gated(NamedTuple):
    """Output of KDA that still lacks its norm: o [R, P], sums of squares [ROW_TILE, H, slices] fp32."""

    o: Tensor
    sums: Tensor
    eps: float


class Unnormed(NamedTuple):
    """A row that is still to be added and normed: h [R, D], which is not there yet, and exchange_norm's arguments."""

    h: Tensor
    args: list[Argument]


class Unselected(NamedTuple):
    """A row's routing that is not there yet, but for what is begun, and the arguments of its selection."""

    routing: Routing
    args: list[Argument]


class Unembedded(NamedTuple):
    """Rows that are still to be looked up: x [R, D], which is not there yet, and where they come from: ids [R] int64,
    table [V, D]."""

    x: Tensor
    ids: Tensor
    table: Tensor


class Uncommitted(NamedTuple):
    """A commit that is left to `advance`: by what count [] int64, and the launch without it and without the words that
    `advance` moves."""

    count: Tensor
    name: str
    blocks: int
    args: list[Argument]


class Candidates(NamedTuple):
    """Best of every `span` values of a row of logits [R, V] fp32: values [ranges, ROW_TILE] fp32, NaN where one was not
    finite; ids [ranges, ROW_TILE] int32, the lowest of equal ones."""

    logits: Tensor
    values: Tensor
    ids: Tensor
    span: int
