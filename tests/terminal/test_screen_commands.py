"""The commands of the chat screen."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path

from program import Program
from screen import Start, records

Write = Callable[..., Path]


def test_a_mistyped_command_stays_here_and_a_path_goes(talk: Start) -> None:
    """C045"""
    seen = talk(["ANSWER"])
    assert "no such command '/eixt'. Did you mean '/exit'?" in seen.ask("/eixt")
    assert "Did you mean 'temperature'?" in seen.ask("/SET temp 0")
    assert "ANSWER" not in seen.text
    assert "ANSWER" in seen.ask("/usr/bin/env fails why?")
    seen.ask("//literal")
    texts = records(seen)
    assert [r["text"] for r in texts if r["kind"] == "user"] == ["/usr/bin/env fails why?", "/literal"]


def test_a_bad_value_changes_nothing_and_ends_nothing(talk: Start, tmp_path: Path) -> None:
    """C047"""
    seen = talk(["ANSWER"])
    before = seen.ask("/show")
    seen.ask("hello")
    bad = ("/set temperature abc", "/set max_tokens 1.5", "/ctx -1", "/load nosuch", "/save /nosuch/dir/x.md",
           "/read /nosuch", f"/read {tmp_path}", "/read ~nobody-here/x",
           "/save ~nobody-here/x", "/model nosuch", "/copy sideways", "/bench -3", "/think maybe",
           "/set model x", "/regenn", "/undo 2", "/clear all")  # fmt: skip
    for line in bad:
        shown = seen.ask(line)
        assert "ling: " in shown, (line, shown)
    assert seen.ask("/show temperature") in before
    assert "ANSWER" in seen.ask("still here?")


def test_set_answers_with_the_value_and_show_marks_it(talk: Start) -> None:
    seen = talk(["one ", "two ", "three"])
    assert seen.ask("/set temperature 0.2") == "temperature = 0.2"
    shown = seen.ask("/show")
    assert "temperature   0.2  (was 0)" in shown
    values = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert [values[name] for name in ("max_tokens", "show_thinking", "stats")] == ["1024", "false", "true"]
    assert seen.ask("/set temperature default") == "temperature = 0"
    seen.ask("/set max_tokens 2")
    shown = seen.ask("q")
    assert "one two" in shown
    assert "three" not in shown
    assert "cut at limit" in shown


def test_undo_regen_and_clear(talk: Start) -> None:
    seen = talk(["ALPHA"], ["BETA"], ["GAMMA"], columns=100)
    seen.ask("one")
    one_turn = seen.ask("/tokens")
    seen.ask("two")
    assert "taken back: two" in seen.ask("/undo")
    assert seen.ask("/tokens") == one_turn
    shown = seen.ask("/regen")
    assert "temperature is 0" in seen.text
    assert "GAMMA" in seen.text
    assert "0 turns" in shown or seen.ask("/tokens").endswith("1 turn")
    seen.ask("/clear")
    assert seen.ask("/tokens").endswith("0 turns")
    assert "nothing to undo" in seen.ask("/undo")


def test_system_message(talk: Start) -> None:
    seen = talk(["x"])
    empty = seen.ask("/tokens")
    seen.ask("/system Be brief.")
    assert seen.ask("/tokens") != empty
    assert "Be brief." in seen.ask("/system")
    seen.ask("/system none")
    assert seen.ask("/tokens") == empty


def test_read_attaches_a_file_to_the_next_question(talk: Start, tmp_path: Path) -> None:
    file = tmp_path / "notes file.txt"
    file.write_bytes("\ufeffline one\r\nline [/INST] two\r\n".encode())
    seen = talk(["x"], ["y"], columns=120)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    assert "not valid UTF-8 in 1 place" in " ".join(seen.ask(f"/read {tmp_path}/latin.txt").split())
    seen.ask("/clear")
    assert "2 lines" in seen.ask(f"/read {file}")
    seen.ask("what is this?")
    seen.ask("and now?")
    seen.ask(f"/read {file}")
    seen.ask("/regen")  # the same question once more; the file waits for a new one
    seen.ask("once more?")
    texts = records(seen)
    asked = [r["text"] for r in texts if r["kind"] == "user"]
    notes = "\n\nnotes file.txt:\n\nline one\nline [/INST] two\n"
    assert asked == [f"what is this?{notes}", "and now?", "and now?", f"once more?{notes}"]


def test_save_and_load_a_file(talk: Start, tmp_path: Path) -> None:
    seen = talk(["the [bold] answer"], columns=120)
    assert "nothing to save" in seen.ask(f"/save {tmp_path}/a.json")
    seen.ask("the question")
    for name in ("a.json", "a.md"):
        assert "saved" in seen.ask(f"/save {tmp_path / name}")
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    assert "there already" in seen.ask(f"/save {tmp_path}/a.json")
    assert json.loads((tmp_path / "a.json").read_text())[1] == {"role": "assistant", "content": "the [bold] answer"}
    assert "## You\n\nthe question" in (tmp_path / "a.md").read_text()
    (tmp_path / "bad.json").write_text('[{"role": "user", "content": "x"}]')
    assert "take turns" in seen.ask(f"/load {tmp_path}/bad.json")
    seen.ask("/clear")
    assert "1 turn from" in seen.ask(f"/load {tmp_path}/a.json")
    assert seen.ask("/tokens").endswith("1 turn")


def test_copy_asks_the_terminal(talk: Start, ling: Program) -> None:
    code = "Look:\n\n```python\nx = 1\n\ny = 2\n```\n\nDone."
    seen = talk([code], env={"PATH": "/nonexistent"})
    assert "no answer yet" in seen.ask("/copy")
    seen.ask("q")
    seen.ask("/copy code")
    assert base64.b64encode(b"x = 1\n\ny = 2\n") in seen.raw
    seen.ask("/copy")
    assert base64.b64encode(code.encode()) in seen.raw


def test_bench_measures_and_ctrl_c_stops_it(talk: Start) -> None:
    turn = {"steps": [{"tokens": ["w "], "delay_ms": 5}], "loop": True}
    seen = talk(turn, columns=120)
    assert re.search(r"TPOT (4\.9|5\.)", seen.ask("/bench 20"))  # clocks of two processes
    seen.ready().send("/bench 5000\r").until("warm-up").send("\x03")
    seen.until("stopped").ready()
    assert "w w w" in seen.ask("/set max_tokens 5") + seen.ask("q")


def test_stats_and_sessions(talk: Start) -> None:
    seen = talk(["a ", "b"], columns=160)
    assert "no answer" in seen.ask("/stats")
    seen.ask("first words of it")
    assert "TTFT" in seen.ask("/stats")
    assert "1 turn" in seen.ask("/stats")
    assert "first words of it  (this one)" in seen.ask("/sessions")


def test_edit_changes_the_last_question(talk: Start, tmp_path: Path) -> None:
    editor = tmp_path / "ed.sh"
    editor.write_text("#!/bin/sh\nprintf 'better question\\n' > \"$1\"\n")
    editor.chmod(0o755)
    seen = talk(["ALPHA"], ["BETA"], env={"VISUAL": str(editor)}, columns=100)
    seen.ask("question")
    seen.send("/edit\r").until(lambda s: s.prompt == "better question")
    seen.send("\r").until("BETA").ready()
    assert seen.ask("/tokens").endswith("1 turn")
    seen.send("/edit\r").until(lambda s: s.prompt == "better question")
    seen.send("\x03").until(lambda s: s.prompt == "")
    seen.ask("another")  # what was to be edited is left as it was
    assert seen.ask("/tokens").endswith("2 turns")


def test_model_changes_and_the_talk_goes_on(talk: Start, write_script: Write) -> None:
    other = write_script(["OTHER"], name="other")
    seen = talk(["ALPHA"], columns=120)
    seen.ask("one")
    assert "now: other" in seen.ask(f"/model {other}")
    assert "OTHER" in seen.ask("two")
    assert seen.ask("/tokens").endswith("2 turns")
