"""What the next layer reads first: kernels ask for a part of it while the memory is idle (csrc/ahead.cuh)."""

from __future__ import annotations

from torch import Tensor

from ling_kernels.cuda.driver import Argument
from ling_kernels.cuda.tiles import CHUNK, DEPTH, warps_for

NOTHING: list[Argument] = [None, 0, 0, 0, 1, 0]


class Asks:
    """Which projection follows which, as seen the first time; a step asks for what came after it then.

    on: by whom, for measurements: a set of "mixer" and "experts".
    """

    def __init__(self, num_sms: int) -> None:
        self.on: set[str] = {"mixer", "experts"}
        self._num_sms = num_sms
        self._next: dict[int, Tensor] = {}
        self._last: Tensor | None = None

    def begin(self, weight: Tensor) -> None:
        """A layer begins with this projection [n, width]."""
        if self._last is not None:
            self._next[self._last.data_ptr()] = weight
        self._last = weight

    def by(self, whom: str) -> list[Argument]:
        """Arguments of the kernel that asks: what of the projection after this layer's."""
        weight = self._next.get(self._last.data_ptr()) if self._last is not None else None
        if whom not in self.on or weight is None:
            return NOTHING
        n, width = weight.shape
        piece = warps_for(-(-n // 16), width, self._num_sms) * DEPTH * CHUNK * weight.element_size()
        pitch = width * weight.element_size()
        pieces = -(-pitch // piece) - 1
        return [weight, n, pitch, piece, pieces, int(whom == "mixer")] if pieces > 0 else NOTHING
