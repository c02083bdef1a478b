"""The one rule for `gpu` tests: skipped where there is no GPU. And the kernels, compiled once for all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ling_kernels
from device_checks import Place
from ling_kernels.cuda import CudaOps


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


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
