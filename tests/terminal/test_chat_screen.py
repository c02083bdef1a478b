"""The chat screen in a pseudo-terminal behind a terminal emulator, with the scripted engine."""

from __future__ import annotations

import json
import re
import signal
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from program import COMMAND, Program, group_is_gone
from screen import Seen

Write = Callable[..., Path]
Start = Callable[..., Seen]
THINK_END = {"control": "</think>"}
SLOW = [{"tokens": ["word "], "repeat": 2000, "delay_ms": 10}]


@pytest.fixture
def talk(ling: Program, write_script: Write) -> Iterator[Start]:
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


def state_files(ling: Program) -> list[Path]:
    folder = ling.home / ".local" / "state" / "ling"
    return sorted(file for file in folder.rglob("*") if file.is_file()) if folder.exists() else []


# --- the talk


def test_two_turns_with_figures_and_ctrl_d(talk: Start) -> None:
    seen = talk(["first ", "answer"], ["second ", "answer"]).ready()
    assert seen.text.startswith("ling ")
    assert "first answer" in seen.ask("one")
    shown = seen.ask("two")
    assert "second answer" in shown
    assert "TPOT" in shown.splitlines()[-1]
    assert seen.leave() == 0
    assert "ling chat --resume" in seen.text


def test_the_prompt_is_there_before_the_model_and_an_early_message_waits(talk: Start) -> None:
    begun = time.monotonic()
    seen = talk(["ANSWER"], load={"delay_ms": 6000}).ready()
    assert time.monotonic() - begun < 5
    seen.until("script 10 %")
    seen.send("early\r").until("script 90 %")
    assert "ANSWER" not in seen.text
    seen.until("ANSWER")
    seen.ready()
    assert "script 90" not in seen.text


def test_live_figures_move_while_tokens_come_and_one_quiet_line_stays(talk: Start) -> None:
    turn = [{"tokens": ["w ", "x ", "y "], "repeat": 60, "delay_ms": 50, "drafted": 4}]
    seen = talk(turn, block=4).ready()
    seen.send("go\r")
    for part in ("TPOT", "mean", "tok/s", "step 50", "accept 3.0", "TTFT", "ctx", "% kept"):
        seen.until(lambda s, part=part: any(part in line for line in s.visible[-3:]))
    counts = set()
    seen.until(lambda s: counts.update(line for line in s.visible if "TTFT" in line) or len(counts) > 5)
    assert any(glyph in seen.text for glyph in "▂▃▄▅▆▇")  # three of five tokens a step, as a strip
    seen.ready()
    assert seen.text.count("TPOT") == 1
    assert "TPOT 16.6 ms" in seen.text or "TPOT 16.7 ms" in seen.text


def test_thinking_is_folded_and_unfolded(talk: Start) -> None:
    turn = ["Let me ", "see ", "now", THINK_END, "The answer"]
    seen = talk(turn, args=())
    shown = seen.ask("q")
    assert "▸ thought for" in shown
    assert "4 tokens" in shown
    assert "Let me see" not in shown
    seen.ask("/think show")
    assert "Let me see now" in seen.ask("q2")
    seen.ask("/think hide")
    assert "Let me" not in seen.ask("q3")


def test_a_thinking_budget_by_flag_and_by_command(talk: Start) -> None:
    thought = ["a", "b", "c", "d", "e", "f", THINK_END, "late"]
    seen = talk(thought, ["in time"], thought, ["in time"], args=("--think-budget", "3"))
    shown = seen.ask("q")
    assert "3 tokens" in shown
    assert "in time" in shown
    assert "may think for 2 tokens" in seen.ask("/think 2")
    assert "2 tokens" in seen.ask("q2")


def test_a_tool_call_is_shown_as_one(talk: Start) -> None:
    call = [
        {"control": "<tool_call>"}, "look_up\n", {"control": "<arg_key>"}, "city", {"control": "</arg_key>"}, "\n",
        {"control": "<arg_value>"}, "Rome", {"control": "</arg_value>"}, "\n", {"control": "</tool_call>"},
    ]  # fmt: skip
    seen = talk(call)
    assert 'look_up(city="Rome")' in seen.ask("q")


def test_a_second_turn_reads_only_what_is_new(talk: Start) -> None:
    seen = talk(["x" * 200], ["y"], columns=200)
    seen.ask("q" * 300)
    shown = seen.ask("more")
    new, cached = shown.split("prompt ")[1].split(" · ")[0].replace(" ──", "").split(" + ")
    assert int(new.split()[0]) < 100
    assert int(cached.split()[0]) > 300


# --- keys


def test_a_bracketed_paste_is_one_message(talk: Start) -> None:
    seen = talk(["FIRST"], ["SECOND"])
    seen.ready().send("\x1b[200~def f():\r    return 1\rf()\x1b[201~")
    seen.until("f()")
    assert "FIRST" not in seen.text
    seen.send("\r").until("FIRST").ready()
    assert "SECOND" not in seen.text
    kept = [json.loads(line) for line in session(seen)]
    assert [r["text"] for r in kept if r["kind"] == "user"] == ["def f():\n    return 1\nf()"]


def session(seen: Seen) -> list[str]:
    home = Path(seen.child.env["HOME"])
    (file,) = (home / ".local" / "state" / "ling" / "sessions").glob("*.jsonl")
    return file.read_text().splitlines()


def test_keys_typed_during_an_answer_are_kept_for_the_prompt(talk: Start) -> None:
    seen = talk([{"tokens": ["word "], "repeat": 30, "delay_ms": 50}], ["AGAIN"])
    seen.ready().send("go\r").until("word word").send("next questx\x7fion")
    seen.until("› next question")  # shown under the figures while the answer goes on
    seen.until(lambda s: s.prompt == "next question")
    seen.send("?\r").until("AGAIN")
    texts = [json.loads(line) for line in session(seen)]
    assert [r["text"] for r in texts if r["kind"] == "user"] == ["go", "next question?"]
    answers = "".join(r["text"] for r in texts if r["kind"] == "part")
    assert "quest" not in answers


def test_a_whole_line_typed_ahead_is_sent_by_itself(talk: Start) -> None:
    seen = talk([{"tokens": ["word "], "repeat": 30, "delay_ms": 30}], ["AGAIN"])
    seen.ready().send("go\r").until("word word").send("second\r")
    seen.until("AGAIN").ready()
    assert "› second" in seen.text


def test_what_is_typed_before_the_program_is_up_is_not_lost(talk: Start) -> None:
    seen = talk(["answer"], ["AGAIN"])
    seen.send("early bird\r")
    seen.until("answer").ready()
    assert "› early bird" in seen.text


def test_a_wide_character_goes_whole_where_the_terminal_erases_bytes(talk: Start) -> None:
    """C017"""
    seen = talk(["ANSWER"])
    attributes = termios.tcgetattr(seen.child.child_fd)
    attributes[0] &= ~0o40000  # stty -iutf8
    termios.tcsetattr(seen.child.child_fd, termios.TCSANOW, attributes)
    seen.ready().send("能\x7fx能").until(lambda s: s.prompt == "x能")
    seen.send("\r").until("ANSWER").ready()
    assert [json.loads(line)["text"] for line in session(seen) if '"user"' in line] == ["x能"]


def test_empty_lines_send_nothing(talk: Start) -> None:
    seen = talk(["ANSWER"])
    seen.ready()
    for keys in ("\r", "\r", "   \r", "\r"):
        seen.send(keys).read(0.2)
    seen.ready()
    assert "ANSWER" not in seen.text


def test_history_comes_back_in_the_next_chat(talk: Start) -> None:
    seen = talk(["a"])
    seen.ask("the first question")
    assert seen.leave() == 0
    again = talk(["b"]).ready()
    again.send("\x1b[A").until("› the first question")
    again.send("\x03").ready()
    again.send("\x12first").until("the first question")


# --- Ctrl-C, Ctrl-D


def test_ctrl_c_stops_the_answer_and_keeps_what_came(talk: Start) -> None:
    seen = talk(SLOW, ["next answer"])
    seen.ready().send("go\r").until("word word word")
    begun = time.monotonic()
    seen.send("\x03").until("stopped")
    assert time.monotonic() - begun < 3
    assert "next answer" in seen.ask("and now?")
    kept = [json.loads(line) for line in session(seen)]
    assert [r["reason"] for r in kept if r["kind"] == "done"] == ["cancelled", "eos"]
    assert seen.leave() == 0


@pytest.mark.parametrize("gap_s", [0.0, 0.02])
def test_two_ctrl_c_in_a_row_do_no_harm(talk: Start, gap_s: float) -> None:
    seen = talk(SLOW, ["next answer"])
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


# --- commands


def test_a_mistyped_command_stays_here_and_a_path_goes(talk: Start) -> None:
    """C045"""
    seen = talk(["ANSWER"])
    assert "no such command '/eixt'. Did you mean '/exit'?" in seen.ask("/eixt")
    assert "Did you mean 'temperature'?" in seen.ask("/SET temp 0")
    assert "ANSWER" not in seen.text
    assert "ANSWER" in seen.ask("/usr/bin/env fails why?")
    seen.ask("//literal")
    texts = [json.loads(line) for line in session(seen)]
    assert [r["text"] for r in texts if r["kind"] == "user"] == ["/usr/bin/env fails why?", "/literal"]


def test_a_bad_value_changes_nothing_and_ends_nothing(talk: Start, tmp_path: Path) -> None:
    """C047"""
    seen = talk(["ANSWER"])
    before = seen.ask("/show")
    seen.ask("hello")
    bad = ("/set temperature abc", "/set max_tokens 1.5", "/ctx -1", "/load nosuch", "/save /nosuch/dir/x.md",
           "/read /nosuch", f"/read {tmp_path}", "/model nosuch", "/copy sideways", "/bench -3", "/think maybe",
           "/set model x", "/regenn")  # fmt: skip
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
    assert "2 lines" in seen.ask(f"/read {file}")
    seen.ask("what is this?")
    seen.ask("and now?")
    texts = [json.loads(line) for line in session(seen)]
    asked = [r["text"] for r in texts if r["kind"] == "user"]
    assert asked == ["what is this?\n\nnotes file.txt:\n\nline one\nline [/INST] two\n", "and now?"]


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
    import base64

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


def test_model_changes_and_the_talk_goes_on(talk: Start, write_script: Write) -> None:
    other = write_script(["OTHER"], name="other")
    seen = talk(["ALPHA"], columns=120)
    seen.ask("one")
    assert "now: other" in seen.ask(f"/model {other}")
    assert "OTHER" in seen.ask("two")
    assert seen.ask("/tokens").endswith("2 turns")


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
    seen.send("again\r").until("the engine is started again")
    seen.until(lambda s: s.text.count("killed by SIGKILL") == 2).ready()
    assert seen.leave() == 0


def test_a_failed_regen_keeps_the_old_answer(talk: Start) -> None:
    seen = talk(["ALPHA"], [{"fail": "nan"}], columns=100)
    seen.ask("one")
    seen.send("/regen\r").until("NaN").ready()
    assert seen.ask("/tokens").endswith("1 turn")
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
    seen = talk(SLOW).ready()
    seen.send("go\r").until("word word")
    pid = seen.child.pid
    seen.child.close(force=False)  # SIGHUP
    end = time.monotonic() + 10
    while not group_is_gone(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert group_is_gone(pid)


# --- sessions on disk


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
    seen = talk(["a"])
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


# --- what is drawn


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
    import re

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
    assert "--resume needs the chat screen" in seen.text
