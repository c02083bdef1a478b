"""Memory for results that the next kernel looks for before the one that makes them has ended (csrc/blank.cuh)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Argument, Device

ALIGNED = 16


class Blanks:
    """A window's results between two mixers: memory that the first mixer's last kernel makes blank, dealt out in the
    order of their kernels. Each result has one writer, which writes all that is read. Room is made for what layers of
    as many rows would have taken so far, so there is none before the first mixer; what finds none lies in memory of its
    own, and its reader waits for its producer as usual.

    on: for measurements and tests, without effect on any bit.
    """

    def __init__(self, device: Device) -> None:
        self.on = True
        self._device = device
        self._memory: list[tuple[Tensor, int]] = []  # of this mixer and the one before, with the capture they belong to
        self._room: dict[int, tuple[int, int]] = {}  # by rows: bytes that are live, and for others
        self._taken = self._blank = 0  # bytes of the newest memory
        self._counts = False

    def renew(self, rows: int, like: Tensor) -> list[Argument]:
        """New memory for what follows, and the arguments of the kernel that makes it blank, once it has waited."""
        size, slack = self._room.get(rows, (0, 0))
        size = max(size, self._taken) if self._counts else size
        self._room[rows], self._blank = (size, slack), size
        self._taken, self._counts = 0, True
        if not self.on or not size:
            self._memory = []
            return [None, 0]
        made = torch.empty(size + slack, dtype=torch.uint8, device=like.device)
        self._memory = [(made, self._device.capture()), *self._memory[:1]]
        return [made, size // ALIGNED]

    def end(self) -> None:
        """The layers end here."""
        self._memory, self._counts = [], False

    def empty(self, like: Tensor, rows: int, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Room for a result [.., R, width] whose first `rows` are live, of like's dtype unless another is given. The
        other rows, which nobody writes or reads, have the memory of what comes after."""
        dtype = dtype or like.dtype
        width, each = shape[-1], min(rows, shape[-2]) * shape[-1]
        live = math.prod(shape[:-2]) * each
        begin, size, slack = self._taken, _aligned(live, dtype), _aligned(shape[-2] * width, dtype)
        self._taken += size
        known, most = self._room.get(rows, (0, 0))
        self._room[rows] = known, max(most, slack)
        if not self._now() or self._taken > self._blank or begin + slack > self._memory[0][0].numel():
            return torch.empty(shape, dtype=dtype, device=like.device)
        strides = (each,) * (len(shape) - 2) + (width, 1)
        return self._memory[0][0].view(dtype).as_strided(shape, strides, begin // dtype.itemsize)

    def has(self, *results: Tensor | None) -> bool:
        """Whether each lies there, so that it may be looked for."""
        ours = [memory.untyped_storage().data_ptr() for memory, _ in self._memory] if self._now() else []
        return all(result is not None and result.untyped_storage().data_ptr() in ours for result in results)

    def _now(self) -> bool:
        """What one graph made blank once is not blank when another is replayed."""
        if self._memory and self._memory[0][1] != self._device.capture():
            self._memory = []
        return bool(self._memory)


def _aligned(count: int, dtype: torch.dtype) -> int:
    return -(-count * dtype.itemsize // ALIGNED) * ALIGNED
