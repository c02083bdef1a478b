"""The kernels, compiled once for all GPU tests."""

from __future__ import annotations

from pathlib import Path

import pytest

import ling_kernels
from device_checks import Place
from ling_kernels.cuda import CudaOps


@pytest.fixture(scope="session")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where kernels are kept once compiled."""
    return tmp_path_factory.mktemp("cubins")


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
