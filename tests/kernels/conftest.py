"""`emulated` tests need a C++ compiler; where there is none they are skipped, as `gpu` tests are without a GPU."""

from __future__ import annotations

import shutil

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if shutil.which("g++") or shutil.which("clang++"):
        return
    for item in items:
        if item.get_closest_marker("emulated"):
            item.add_marker(pytest.mark.skip(reason="needs a C++ compiler"))
