"""What ends an answer or the chat screen: Ctrl-C, failures, signals; and the terminal as it was."""

from __future__ import annotations

import signal
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from program import COMMAND, FULL, Program, group_is_gone
from screen import SLOW, THINK_END, Seen, Start, records

Write = Callable[..., Path]


# --- Ctrl-C, Ctrl-D


def test_ctrl_c_stops_the_answer_and_keeps_what_came(talk: Start) -> None:
    seen = talk(SLOW, ["next answer"])
    seen.ready().send("go\r").until("word word word")
    begun = time.monotonic()
    seen.send("\x03").until("stopped")
    assert time.monotonic() - begun < 3
    assert "next answer" in seen.ask("and now?")
    kept = records(seen)
    assert [r["reason"] for r in kept if r["kind"] == "done"] == ["cancelled", "eos"]
    assert seen.leave() == 0


@pytest.mark.parametrize("gap_s", [0.0, 0.02])
def test_two_ctrl_c_in_a_row_do_no_harm(talk: Start, gap_s: float) -> None:
    seen = talk(SLOW, ["next answer"], env=FULL)
    seen.ready().send("go\r").until("word word").send("\x03")
    time.sleep(gap_s)
    seen.send("\x03").until("stopped").ready()
    assert "next answer" in seen.ask("and now?")


def test_ctrl_c_while_thinking_and_while_reading_the_prompt(talk: Start) -> None:
    thinking = [{"tokens": ["hm "], "repeat": 2000, "delay_ms": 10}]
    late = {"steps": ["late"], "prefill_ms": 20_000}
    seen = talk(thinking, late, [THINK_END, "next"], args=())
    seen.ready().send("one\r").until("▸ thinking").send("\x03").until("stopped").ready()
    seen.send("two\r").until("reading the prompt").send("\x03")
    seen.until(lambda s: s.text.count("stopped") == 2).ready()
    assert "late" not in seen.text
    seen.send("three\r").until("next")


def test_ctrl_c_at_the_prompt_clears_the_line_and_says_how_to_leave(talk: Start) -> None:
    seen = talk(["answer"]).ready()
    seen.send("half a line").until("half a line").send("\x03").ready()
    assert "leaves" not in seen.lines[-3]
    seen.send("\x03").until("Ctrl-D or /exit leaves").ready()
    assert seen.leave() == 0


def test_ctrl_c_while_a_message_waits_for_the_load_ends_with_130(talk: Start) -> None:
    seen = talk(["x"], load={"delay_ms": 30_000}).ready()
    seen.send("q\r").until("script 10 %").send("\x03")
    assert seen.ended() == 130
    assert not seen.cursor_hidden


def test_an_engine_that_does_not_hear_is_ended_by_a_second_ctrl_c(talk: Start) -> None:
    seen = talk(["par", {"hang": True}], columns=100)
    seen.ready().send("q\r").until("par").send("\x03").until("stopping")
    seen.read(2.3)
    seen.send("\x03").until("the engine was closed").ready()
    seen.send("again\r").until("the engine is started again")


@pytest.mark.parametrize("keys", ["\x04", "/exit\r", "/quit\r", "/EXIT\r"])
def test_every_way_to_leave(talk: Start, keys: str) -> None:
    assert talk(["x"]).ready().leave(keys) == 0


# --- failures


def test_a_failed_answer_is_said_and_the_talk_goes_on(talk: Start) -> None:
    seen = talk(["par", {"fail": "nan"}], ["good answer"])
    shown = seen.ask("q")
    assert "NaN" in shown
    assert "good answer" in seen.ask("q2")
    assert seen.ask("/tokens").endswith("1 turn")


def test_an_engine_that_dies_is_started_again(talk: Start) -> None:
    seen = talk(["par", {"kill": "SIGKILL"}], columns=100)
    assert "killed by SIGKILL" in seen.ask("q")
    seen.send("/bench 2\r").until("the engine is started again").until(lambda s: s.text.count("SIGKILL") == 2).ready()
    seen.send("again\r").until(lambda s: s.text.count("the engine is started again") == 2)
    seen.until(lambda s: s.text.count("killed by SIGKILL") == 3).ready()
    assert seen.leave() == 0


def test_a_failed_regen_keeps_the_old_answer(talk: Start) -> None:
    seen = talk(["ALPHA"], [{"fail": "nan"}], columns=100)
    seen.ask("one")
    seen.send("/regen\r").until("NaN").ready()
    assert seen.ask("/tokens").endswith("1 turn")
    assert "TTFT" in seen.ask("/stats")  # its figures are kept as well
    name = seen_name(seen)
    again = talk(["x"], args=("--no-think", "--resume", name), columns=100)
    assert again.ask("/tokens").endswith("1 turn")


def seen_name(seen: Seen) -> str:
    """Leave, and give the session's name."""
    assert seen.leave() == 0
    return seen.text.rsplit("--resume ", 1)[1].split()[0]


def test_a_load_that_fails_ends_with_its_reason(talk: Start) -> None:
    seen = talk(["x"], load={"delay_ms": 1500, "fail": {"kind": "OutOfMemory", "message": "no room for it"}})
    seen.ready()
    assert seen.ended() == 1
    assert "no room for it" in seen.text
    assert not seen.cursor_hidden
    assert seen.modes_left_on == []


def test_a_load_that_fails_under_a_waiting_message_is_said_once(talk: Start) -> None:
    seen = talk(["x"], load={"delay_ms": 2500, "fail": {"kind": "OutOfMemory", "message": "no room for it"}})
    seen.ready().send("early\r")
    assert seen.ended() == 1
    assert seen.text.count("no room for it") == 1
    assert not seen.cursor_hidden


def test_too_long_a_question_is_refused_with_both_numbers(talk: Start) -> None:
    seen = talk(["fine"], context=200)
    assert "tokens long; the context holds 200" in seen.ask("s" * 300)
    assert "fine" in seen.ask("q")


# --- the terminal as it was


def modes(seen: Seen) -> list[Any]:
    return termios.tcgetattr(seen.child.child_fd)[:4]


@pytest.mark.parametrize("how", ["/exit", "ctrl-d", "SIGTERM", "SIGTERM mid-answer", "SIGHUP mid-answer", "crash"])
def test_the_terminal_is_left_as_it_was_found(talk: Start, how: str) -> None:
    """C055"""
    seen = talk(SLOW if "mid" in how else [{"fail": "MemoryError"}])
    found = modes(seen)
    seen.ready()
    assert modes(seen) != found
    if "mid" in how:
        seen.send("go\r").until("word word")
    elif how == "crash":
        seen.send("go\r").read(1)
    if how.startswith("SIG"):
        seen.signal(signal.Signals[how.split()[0]])
    else:
        seen.send("\x04" if how == "ctrl-d" else "/exit\r")
    code = -1
    end = time.monotonic() + 20
    while seen.child.isalive() and time.monotonic() < end:
        seen.read(0.05)
        if seen.child.isalive():
            restored = modes(seen)
    restored = termios.tcgetattr(seen.child.child_fd)[:4]
    code = seen.ended()
    assert restored == found
    assert not seen.cursor_hidden
    assert seen.modes_left_on == []
    assert code == {"SIGTERM": 143, "SIGHUP": 129}.get(how.split()[0], 0)


def test_ctrl_z_and_fg_at_the_prompt_and_during_an_answer(ling: Program, write_script: Write) -> None:
    script = write_script([{"tokens": ["word "], "repeat": 100, "delay_ms": 30}], ["AGAIN"])
    line = " ".join([*COMMAND, "chat", "--engine", "scripted", "-m", f"'{script}'", "--no-think"])
    with Seen(ling, command=["bash", "--norc", "--noprofile", "-i"], env={"PS1": "sh> "}) as seen:
        seen.until("sh>").send(f"{line}\r").ready()
        seen.send("half\x1a").until("Stopped")
        seen.send("stty -a | tr ' ' '\\n' | grep -c -x -e echo -e icanon -e icrnl\r").until("\n3")
        assert seen.modes_left_on in ([], ["bracketed paste"])  # readline of the shell may want it
        seen.send("fg\r").until(lambda s: s.prompt == "half")
        seen.send("\x03").ready().send("go\r").until("word word")
        seen.send("\x1a").until(lambda s: s.text.count("Stopped") == 2)
        assert not seen.cursor_hidden
        seen.send("fg\r").ready()
        seen.send("more\r").until("AGAIN").ready()
        seen.send("/exit\r").until(lambda s: s.visible[-1].startswith("sh>"))


def test_a_terminal_that_goes_away_leaves_no_process(talk: Start) -> None:
    seen = talk(SLOW, env=FULL).ready()
    seen.send("go\r").until("word word")
    pid = seen.child.pid
    seen.child.close(force=False)  # SIGHUP
    end = time.monotonic() + 10
    while not group_is_gone(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert group_is_gone(pid)
