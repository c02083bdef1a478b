"""The kernels of ling: the ops of the one decode step, by device. Imports torch only, never ling_local."""

from __future__ import annotations

from ling_kernels.ops import KernelError, Ops


def load(device: str) -> Ops:
    """The ops for a device type. Raises KernelError for one that has none."""
    if device == "cpu":
        from ling_kernels.reference import ReferenceOps

        return ReferenceOps()
    raise KernelError(f"no kernels for device '{device}' yet")
