"""Fixtures that several rooms share."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Files that take longest: with several workers they begin first.
LONG = (
    "test_ranks",
    "test_emulated_mixers",
    "test_compile",
    "test_emulated_exchange",
    "test_emulated_step",
    "test_speculation",
    "test_rank_processes",
)

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each program that tests start would compile ling anew
if "PYTEST_XDIST_WORKER" in os.environ:  # every core has a worker of its own; the programs that tests start as well
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A runner in the background may start us with signals ignored, and every program that we start would ignore them too.
for ignored, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, usual)


@pytest.fixture
def write_script(tmp_path: Path) -> Callable[..., Path]:
    """Write a script for the scripted engine: turns, then any top-level field; returns its path."""

    def write(*turns: Any, name: str = "script", **fields: Any) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"turns": list(turns), **fields}), encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tests keep what takes long to build (built.py): one folder for all workers of a run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "built"
    folder.mkdir(exist_ok=True)
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; and the one rule for `gpu` tests: skipped where there is no GPU."""
    items.sort(key=lambda item: item.path.stem not in LONG)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu:
        return
    import torch  # two seconds that other tests need not wait for

    if not torch.cuda.is_available():
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
