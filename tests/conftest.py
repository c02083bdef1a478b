"""Fixtures that several rooms share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write_script(tmp_path: Path) -> Callable[..., Path]:
    """Write a script for the scripted engine: turns, then any top-level field; returns its path."""

    def write(*turns: Any, name: str = "script", **fields: Any) -> Path:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"turns": list(turns), **fields}), encoding="utf-8")
        return path

    return write
