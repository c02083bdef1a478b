"""The kernels, compiled once for all GPU tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import ling_kernels
from device_checks import Place
from ling_kernels.cuda import CudaOps
from ling_local.paths import cache_dir


@pytest.fixture(scope="session")
def cubins() -> Path:
    """Where engines keep compiled kernels, too: nothing is compiled twice, and what is old is never found."""
    return cache_dir() / "kernels"


@pytest.fixture(scope="session")
def cuda_ops(cubins: Path) -> CudaOps:
    return ling_kernels.load("cuda", cache=cubins)


@pytest.fixture(scope="session")
def plain_ops(cubins: Path) -> CudaOps:
    """The same without programmatic dependent launch."""
    return ling_kernels.load("cuda", cache=cubins, pdl=False)


@pytest.fixture
def place(cuda_ops: CudaOps) -> Place:
    return Place(cuda_ops, "cuda")
