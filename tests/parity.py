"""Comparing tensors: one table of tolerances, NaN is a mismatch, the worst place is named."""

from __future__ import annotations

import numpy as np
import torch

# Largest absolute difference, and why.
TOLERANCE = {
    "golden logits": 2e-3,  # two independent references agree within 1.3e-4; the goldens' README sets the bound
    "golden hidden states": 1e-3,  # measured 2e-5 in fp32
    "fp32 forms": 1e-3,  # the same function in another order of fp32 operations, values of order 1 to 10
}


def assert_close(got: torch.Tensor, want: torch.Tensor | np.ndarray, kind: str) -> None:
    """Same shape and within the kind's tolerance everywhere; NaN never passes."""
    want = torch.as_tensor(want)
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    error = (got.double() - want.double()).abs().nan_to_num(nan=torch.inf)
    worst = error.argmax()
    place = tuple(int(i) for i in torch.unravel_index(worst, error.shape))
    message = f"{kind}: {got.flatten()[worst]} at {place}, expected {want.flatten()[worst]}"
    assert error.max() <= TOLERANCE[kind], message


def assert_bits(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Equal to the bit; the first difference is named."""
    assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    kind = {4: torch.int32, 2: torch.int16, 8: torch.int64}[got.element_size()]
    different = got.contiguous().view(kind) != want.contiguous().view(kind)
    if different.any():
        place = tuple(int(i) for i in torch.unravel_index(different.flatten().int().argmax(), got.shape))
        raise AssertionError(f"{what}: {int(different.sum())} differ, first at {place}: {got[place]} != {want[place]}")
