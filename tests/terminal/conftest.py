"""The program, and chats on the screen with scripts of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from program import Program
from screen import Seen, Start


@pytest.fixture
def ling(tmp_path: Path) -> Program:
    """The real program in an empty home."""
    home = tmp_path / "home"
    home.mkdir()
    return Program(home)


@pytest.fixture
def talk(ling: Program, write_script: Callable[..., Path]) -> Iterator[Start]:
    """Start a chat on the screen with a script of these turns; ended at the end of the test."""
    started: list[Seen] = []

    def start(*turns: Any, args: tuple[str, ...] = ("--no-think",), **more: Any) -> Seen:
        terminal = {key: more.pop(key) for key in ("columns", "rows", "env") if key in more}
        script = write_script(*turns, **more)
        seen = Seen(ling, "--engine", "scripted", "-m", script, *args, **terminal)
        started.append(seen)
        return seen

    yield start
    for seen in started:
        seen.child.close(force=True)
