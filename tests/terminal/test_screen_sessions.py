"""Talks of the chat screen on disk."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

from program import FULL, Program
from screen import SLOW, Start, state_files

Write = Callable[..., Path]


def test_files_are_private_and_a_kill_loses_the_open_line_only(talk: Start, ling: Program) -> None:
    """C139, C141"""
    seen = talk(["whole answer"], SLOW)
    seen.ask("one")
    seen.ready().send("two\r").until("word word").read(2.5)
    seen.signal(signal.SIGKILL)
    seen.ended()
    for file in state_files(ling):
        assert file.stat().st_mode & 0o777 == 0o600, file
        assert file.parent.stat().st_mode & 0o777 == 0o700
    again = talk(["and on"], args=("--no-think", "--resume", "last"), columns=100)
    again.until("2 turns").ready()
    assert "word word" in again.text
    assert "and on" in again.ask("three")
    assert again.ask("/tokens").endswith("3 turns")


def test_two_processes_cannot_write_one_session(talk: Start, ling: Program) -> None:
    seen = talk(["a"], env=FULL)  # its process is the terminal's
    seen.ask("one")
    second = talk(["b"], args=("--no-think", "--resume", "last"), columns=120)
    assert second.ended() == 1
    assert "is open in another ling" in second.text
    assert str(seen.child.pid) in second.text
    third = talk(["c"], columns=120)
    assert "is open in another ling" in third.ask("/load 1")
    assert "c" in third.ask("mine")


def test_load_goes_on_with_an_earlier_talk(talk: Start) -> None:
    first = talk(["ALPHA"])
    first.ask("the first talk")
    assert first.leave() == 0
    seen = talk(["BETA"], columns=100)
    shown = seen.ask("/load 1")
    assert "the first talk" in shown
    assert "ALPHA" in shown
    assert "from an earlier chat" in seen.ask("/stats")
    assert "BETA" in seen.ask("more")
    assert seen.ask("/tokens").endswith("2 turns")


def test_no_history_writes_nothing(talk: Start, ling: Program) -> None:
    seen = talk(["a"], args=("--no-think", "--no-history"))
    seen.ask("secret")
    assert seen.leave() == 0
    assert state_files(ling) == []
    assert "--resume" not in seen.text


def test_a_state_folder_that_cannot_be_written_ends_nothing(talk: Start, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    seen = talk(["ANSWER"], env={"XDG_STATE_HOME": str(tmp_path / "state")}, columns=100)
    shown = seen.ask("q")
    assert "ANSWER" in shown
    assert "no longer kept" in shown
    assert "no longer kept" not in seen.ask("q2")


def test_resume_is_refused_where_it_means_nothing(ling: Program, write_script: Write, talk: Start) -> None:
    script = write_script(["x"])
    done = ling("chat", "--engine", "scripted", "-m", script, "-p", "hi", "--resume", "last", stdin=None)
    assert (done.code, done.out) == (2, b"")
    seen = talk(["x"], args=("--resume", "nosuch"))
    assert seen.ended() == 2
    assert "no session 'nosuch'" in seen.text or "no session" in seen.text
