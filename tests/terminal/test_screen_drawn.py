"""What the chat screen draws."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from program import Program
from screen import THINK_END, Start, state_files


def test_each_line_once_in_the_scrollback(talk: Start) -> None:
    """C031: an answer taller than the window."""
    lines = "".join(f"- line {n} of many\n" for n in range(60))
    seen = talk([{"text": lines, "cut": 7, "per_step": 2, "delay_ms": 4}], columns=60, rows=12)
    seen.ready().send("go\r").until("TPOT").ready()
    found = [int(line.split("line ")[1].split()[0]) for line in seen.lines if "of many" in line]
    assert found == list(range(60))


def test_wide_characters_fill_the_lines(talk: Start) -> None:
    """C009"""
    text = "深度学习模型可以在本地运行速度很快" * 12
    seen = talk([{"text": text, "cut": 5, "delay_ms": 2}], columns=40)
    shown = seen.ask("q")
    body = [line for line in shown.splitlines() if line.strip() and "tok" not in line]
    assert "".join(line.replace(" ", "") for line in body) == text
    assert all(len(line.replace(" ", "")) >= 19 for line in body[:-1])


def test_text_is_literal_and_controls_are_visible(talk: Start) -> None:
    """C033, C035, C039"""
    text = "if 0<foo or foo>10: Vec<int> <b>x</b> [/INST] [/] [bold list[int] :smile:"
    evil = "\x1b[2Jclear \x1b]0;title\x07 \x1b]52;c;eA==\x07 \x08 \rCR \x9b31m"
    seen = talk([text, "\n\n", evil], columns=120)
    shown = seen.ask(text)
    assert text in shown
    assert "␛[2Jclear" in shown
    assert "<U+009B>31m" in shown
    assert b"title\x07" not in seen.raw
    assert b"\x1b[2J" not in seen.raw


def test_no_colour_where_it_is_not_wanted(talk: Start) -> None:
    """C029"""
    turn = ["Text\n\n```python\nx = 1\n```\n\n", "| a |\n|---|\n| 1 |\n"]
    colour = re.compile(rb"\x1b\[(?:[\d;]*;)?(?:3[0-79]|4[0-79]|9[0-7]|38|48)(?:;[\d;]*)?m")
    plain = talk(turn, env={"NO_COLOR": "1"})
    plain.ask("q")
    plain.ask("/eixt")
    assert not colour.search(plain.raw)
    coloured = talk(turn, env={"NO_COLOR": ""})
    coloured.ask("q")
    assert colour.search(coloured.raw)
    never = talk(turn, args=("--no-think", "--color", "never"))
    never.ask("q")
    assert not colour.search(never.raw)


@pytest.mark.parametrize("how", [{"env": {"TERM": "dumb"}}, {"args": ("--no-think", "--plain")}])
def test_a_dumb_terminal_and_plain_get_no_screen(talk: Start, how: dict[str, Any]) -> None:
    seen = talk(["plain answer"], **how)
    seen.until(lambda s: s.visible[-1] in (">", "›")).send("q\n").until("plain answer").until("TPOT")
    assert b"\x1b[2K" not in seen.raw
    assert b"\x1b[?25l" not in seen.raw
    seen.send("/exit\n")
    assert seen.ended() == 0


def test_a_window_that_changes_its_size_midway(talk: Start) -> None:
    lines = "".join(f"item number {n} goes here\n\n" for n in range(40))
    seen = talk([{"text": lines, "cut": 9, "delay_ms": 15}], columns=80, rows=20)
    seen.ready().send("go\r").until("number 8")
    seen.resize(50, 15)
    seen.until("number 20")
    seen.resize(100, 30)
    seen.until("tok/s ").ready()
    assert "item number 39 goes here" in seen.text
    assert seen.text.count("item number 39") == 1
    assert seen.leave() == 0


@pytest.mark.parametrize("columns", [40, 200])
def test_narrow_and_wide(talk: Start, columns: int) -> None:
    seen = talk(["Hm ", THINK_END, "An answer of some words\n\n- and a list\n"], args=(), columns=columns)
    shown = seen.ask("q")
    assert "An answer of some words" in shown
    assert "tok" in shown.splitlines()[-1]
    seen.ask("/help")
    assert seen.leave() == 0


def test_no_stats_leaves_the_quiet_line_out(talk: Start) -> None:
    seen = talk(["ANSWER"], args=("--no-think", "--no-stats"))
    assert seen.ask("q") == "ANSWER"


def test_two_thousand_tokens_a_second_are_not_slowed_by_the_screen(talk: Start, ling: Program) -> None:
    """C037, on the engine's clock: within 2 % of what bench measures without a screen."""
    text = "".join(f"Word {n} of a *long* answer.\n\n" if n % 9 == 8 else f"Word {n} of it, " for n in range(600))
    turn = [{"text": text, "cut": 2, "per_step": 4, "delay_ms": 2}]
    seen = talk(turn, block=3, columns=200, args=("--no-think", "-n", "4000"), context=20_000)
    script = next(Path(arg) for arg in seen.child.args if arg.endswith(b".json" if isinstance(arg, bytes) else ".json"))
    seen.ready().until("context")
    for _ in range(3):  # a machine that was busy elsewhere is no slow screen
        seen.ask("go")
        figures = [line for line in seen.lines if "TPOT" in line][-1]
        shown_ms = float(figures.split("TPOT ")[1].split()[0])
        args = ("--engine", "scripted", "-m", script, "--tokens", "4000", "-r", "1", "--json", "--speculation", "auto")
        bench_ms = ling("bench", *args, stdin=None).json["decode"]["tpot_ms"]["mean"]
        if shown_ms < 1.02 * bench_ms:
            return
    pytest.fail(f"TPOT {shown_ms} ms with the screen, {bench_ms} ms without")


def test_a_terminal_of_another_encoding_shows_what_it_can(talk: Start) -> None:
    env = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    seen = talk(["Hm ", THINK_END, "An answer, 哈 ✓"], args=(), env=env)
    seen.until(lambda s: any(line == ">" for line in s.visible)).send("q\r").until("An answer, ?? ?")
    seen.until(lambda s: s.visible.count(">") == 1).send("/exit\r")
    assert seen.ended() == 0
    assert "> thought for" in seen.text
    assert seen.raw.isascii()


def test_flags_beat_variables(talk: Start, ling: Program) -> None:
    plain = talk(["x"], env={"LING_PLAIN": "1"})
    plain.until(lambda s: s.visible[-1] == "›").send("/exit\n")
    assert plain.ended() == 0
    assert b"\x1b[?25l" not in plain.raw
    screen = talk(["ANSWER"], args=("--no-think", "--screen"), env={"LING_PLAIN": "1", "LING_HISTORY": "0"})
    assert "ANSWER" in screen.ask("q")
    assert b"\x1b[?25l" in screen.raw
    assert screen.leave() == 0
    assert state_files(ling) == []
    kept = talk(["x"], args=("--no-think", "--history"), env={"LING_HISTORY": "0"})
    kept.ask("q")
    assert len(state_files(ling)) == 2


def test_a_plain_talk_has_no_resume(talk: Start) -> None:
    seen = talk(["x"], args=("--plain", "--resume", "last"))
    assert seen.ended() == 2
