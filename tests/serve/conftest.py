"""The program that serves."""

from __future__ import annotations

from pathlib import Path

import pytest

from program import Program


@pytest.fixture
def ling(tmp_path: Path) -> Program:
    """The real program in an empty home."""
    home = tmp_path / "home"
    home.mkdir()
    return Program(home)
