"""Asking ahead: a kernel asks for what later ones read, so that it is in L2 when they come. Only time depends on it."""

from __future__ import annotations

from torch import Tensor

from ling_kernels.cuda.driver import Ahead, Device

# The share of L2 that may be asked for at a time: the rest is for what streams through meanwhile.
SHARE = 0.4
ALIGNED = 16


class AheadOps:
    """Contract in `ling_kernels.ops.Ops`. asks: switch, for tests and measurements.

    `ahead` keeps a hint; a kernel that has an `Ahead` as its last argument passes `hint()`, which takes it. A kernel
    calls ask_ahead with it once its own loads are on their way. A hint that no kernel took is replaced by the next one.
    """

    device: Device
    asks = False
    _hint: tuple[Tensor, ...] = ()

    def ahead(self, *tensors: Tensor | None) -> None:
        self._hint = tuple(tensor for tensor in tensors if tensor is not None)

    def hint(self) -> Ahead:
        """What the kernel that is about to be launched shall ask for: the hint's memory, the first tensors first, as
        far as L2 can hold it."""
        tensors, self._hint = self._hint, ()
        if not self.asks:
            return Ahead()
        return Ahead.of(merged([span(tensor) for tensor in tensors]), int(SHARE * self.device.properties.l2_bytes))


def span(tensor: Tensor) -> tuple[int, int]:
    """First and last address of a tensor, whole units of 16 bytes."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    end = first + (last + 1) * tensor.element_size() if tensor.numel() else first
    return -(-first // ALIGNED) * ALIGNED, end // ALIGNED * ALIGNED


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same memory without overlaps, in the order of its first parts: views of one weight ask for it once."""
    kept: list[tuple[int, int]] = []
    for first, end in spans:
        for at, (other, other_end) in enumerate(kept):
            if first < other_end and other < end:
                kept[at] = (min(first, other), max(end, other_end))
                break
        else:
            if first < end:
                kept.append((first, end))
    return kept
