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
    """A row that is still to be added and normed: h, which is not there yet, and the arguments of that."""

    h: Tensor
    args: list[Argument]


class Unselected(NamedTuple):
    """A row's routing that is not there yet, but for what is begun, and the arguments of its selection."""

    routing: Routing
    args: list[Argument]


class Unembedded(NamedTuple):
    """Rows that are still to be looked up: x, which is not there yet, and where they come from."""

    x: Tensor
    ids: Tensor
    table: Tensor


class Candidates(NamedTuple):
    """Best logit of every `span` rows of the vocabulary: values [ranges, ROW_TILE] fp32, NaN where one was not
    finite; ids [ranges, ROW_TILE] int32, the lowest of equal ones."""

    logits: Tensor
    values: Tensor
    ids: Tensor
    span: int
