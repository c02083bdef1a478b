"""Kernels compiled for GPUs, once for all tests.

`emulated` tests need a C++ compiler; where there is none they are skipped, as `gpu` tests are without a GPU.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from built import once
from ling_kernels.cuda.compile import compile_unit


@pytest.fixture(scope="session")
def compiled(built: Path) -> Callable[[str, str], tuple[bytes, str]]:
    """As compile_unit: (unit, architecture) to the cubin and the compiler's log."""

    def build(folder: Path) -> None:
        cubin, log = compile_unit(*folder.stem.split("-"))
        (folder / "cubin").write_bytes(cubin)
        (folder / "log").write_text(log)

    def compiled(unit: str, arch: str) -> tuple[bytes, str]:
        folder = once(built / f"{unit}-{arch}", build)
        return (folder / "cubin").read_bytes(), (folder / "log").read_text()

    return compiled


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("g++") or shutil.which("clang++"):
        return
    for item in items:
        if item.get_closest_marker("emulated"):
            item.add_marker(pytest.mark.skip(reason="needs a C++ compiler"))
