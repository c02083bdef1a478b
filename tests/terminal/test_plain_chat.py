"""The line-by-line chat in a pseudo-terminal, with the scripted engine."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ling_local.cli.plain import CtrlC
from program import COMMAND, ESC, FULL, Program, group_is_gone, seen, watch

Write = Callable[..., Path]
PROMPT = b"> "


@pytest.fixture
def talk(ling: Program, write_script: Write) -> Callable[..., Any]:
    """A chat in a dumb terminal that shows its first prompt."""

    def start(*turns: list, args: tuple[str, ...] = ("--no-think",), env: Any = (), **fields: Any) -> Any:
        script = write_script(*turns, **fields)
        child = watch(ling, "chat", "--engine", "scripted", "-m", script, *args, env={"TERM": "dumb", **dict(env)})
        child.expect_exact(PROMPT)
        return child

    return start


def ask(child: Any, line: str) -> bytes:
    """Send a line; what is shown from its echo to the next prompt."""
    child.sendline(line)
    child.expect_exact(b"\n")
    child.expect_exact(b"\r\n" + PROMPT)
    return child.before


def leave(child: Any) -> int | None:
    child.sendeof()
    return seen(child)[1]


def test_talk_two_turns_and_leave_with_ctrl_d(talk) -> None:
    child = talk(["first answer"], ["second answer"])
    assert b"first answer\r\n" in ask(child, "one")
    shown = ask(child, "two")
    assert b"second answer\r\n" in shown
    assert b"TPOT" in shown  # one line of figures
    assert leave(child) == 0


@pytest.mark.parametrize("word", ["/exit", "/quit", "/EXIT"])
def test_exit_leaves(talk, word: str) -> None:
    child = talk(["x"])
    child.sendline(word)
    assert seen(child)[1] == 0


def test_empty_lines_send_nothing(talk) -> None:
    child = talk(["the only answer"])
    for line in ("", "", "", "   ", "\t"):
        child.sendline(line)
        child.expect_exact(PROMPT)
        assert b"answer" not in child.before
    assert b"the only answer" in ask(child, "now")
    leave(child)


def test_a_mistyped_command_stays_here_and_gets_the_nearest(talk) -> None:
    child = talk(["ANSWER"])
    assert b"no such command '/eixt'. Did you mean '/exit'?" in ask(child, "/eixt")
    assert b"no such command '/frobnicate'" in ask(child, "/frobnicate")
    assert b"no such setting 'temp'. Did you mean 'temperature'?" in ask(child, "/SET temp 0")
    shown = ask(child, "/usr/bin/env fails why?")
    assert b"ANSWER" in shown
    leave(child)


def test_a_text_block_is_one_message(talk) -> None:
    child = talk(["ANSWER"])
    for line in ('"""one', "/exit", ""):
        child.sendline(line)
        child.expect_exact(PROMPT)
        assert b"ANSWER" not in child.before
    block = ask(child, 'two"""')
    child.sendline("/clear")
    child.expect_exact(PROMPT)
    one_line = ask(child, "one" + "x" * len("\n/exit\n\n") + "two")  # as many tokens as the block without its marks
    assert b"ANSWER" in block
    assert block.split(b"ctx ")[1].split(b"/")[0] == one_line.split(b"ctx ")[1].split(b"/")[0]
    leave(child)


def test_two_slashes_send_one(talk, ling: Program, write_script: Write) -> None:
    child = talk(["ANSWER"])
    shown = ask(child, "//literal")
    assert b"ANSWER" in shown
    counted = shown.split(b"ctx ")[1].split(b"/")[0]
    child.sendline("/clear")
    child.expect_exact(PROMPT)
    assert b"ctx " + counted in ask(child, "xliteral")  # as many tokens as the text with one slash has
    leave(child)


def test_help_lists_every_command(talk) -> None:
    child = talk(["x"])
    shown = ask(child, "/help")
    for word in (b"/help", b"/set", b"/clear", b"/exit", b"//text", b"Ctrl-C"):
        assert word in shown
    leave(child)


def test_set_shows_changes_and_refuses_without_harm(talk) -> None:
    child = talk(["one ", "two ", "three"])
    assert b"temperature = 0\r\n" in ask(child, "/set temperature") + b"\r\n"
    assert b"temperature = 0.2" in ask(child, "/set temperature 0.2")
    for bad in ("/set temperature abc", "/set temperature -1", "/set max_tokens 1.5", "/ctx -1", "/load nosuch"):
        ask(child, bad)
    shown = ask(child, "/set")
    assert b"temperature   0.2" in shown
    assert b"max_tokens    1024\r\n" in shown
    assert b"temperature = 0\r\n" in ask(child, "/set temperature default") + b"\r\n"
    ask(child, "/set max_tokens 2")
    shown = ask(child, "q")
    assert b"one two \r\n" in shown
    assert b"three" not in shown
    leave(child)


def test_the_talk_goes_on_from_what_was_said_and_clear_forgets_it(talk) -> None:
    child = talk(["a" * 50])
    sizes = []
    for line in ("q", "q", "/clear", "q"):
        shown = ask(child, line)
        if b"ctx " in shown:
            sizes.append(int(shown.split(b"ctx ")[1].split(b"/")[0]))
    assert sizes[1] > sizes[0]
    assert sizes[2] == sizes[0]
    leave(child)


def test_ctrl_c_stops_the_answer_and_keeps_the_talk(talk) -> None:
    slow = [{"tokens": ["word "], "repeat": 2000, "delay_ms": 10}]
    child = talk(slow, ["next answer"])
    child.sendline("go")
    child.expect_exact(b"word word ")
    child.sendintr()
    child.expect_exact(b"stopped; what came is kept")
    child.expect_exact(PROMPT)
    assert b"next answer" in ask(child, "and now?")
    assert leave(child) == 0


@pytest.mark.parametrize("gap_s", [0.0, 0.01])
def test_two_ctrl_c_in_a_row_do_no_harm(talk, gap_s: float) -> None:
    child = talk([{"tokens": ["word "], "repeat": 2000, "delay_ms": 10}], ["next answer"], env=FULL)
    child.delaybeforesend = None
    child.sendline("go")
    child.expect_exact(b"word word ")
    child.sendintr()
    time.sleep(gap_s)
    child.sendintr()
    child.expect_exact(PROMPT)
    time.sleep(1)  # the second may come at the prompt, and would take a line away
    child.sendline("and now?")
    child.expect_exact(b"next answer")
    child.expect_exact(PROMPT)
    assert leave(child) == 0


def test_ctrl_c_while_a_stopped_answer_is_put_away_does_no_harm() -> None:
    with CtrlC().installed() as ctrl_c:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt), ctrl_c.heard():
                signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):  # and it is as it was
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_before_the_first_word_leaves_no_trace_in_the_talk(talk) -> None:
    child = talk({"steps": ["late"], "prefill_ms": 3000}, ["next answer"], ["third"])
    first = time.monotonic()
    child.sendline("go")
    time.sleep(1.0)
    child.sendintr()
    child.expect_exact(b"stopped")
    child.expect_exact(PROMPT)
    assert time.monotonic() - first < 6
    assert b"next answer" in ask(child, "q")
    leave(child)


def test_ctrl_c_at_the_prompt_says_how_to_leave(talk) -> None:
    child = talk(["answer"])
    child.sendintr()
    child.expect_exact(b"Ctrl-D or /exit leaves")
    child.expect_exact(PROMPT)
    child.send("half a line")
    child.sendintr()
    child.expect_exact(PROMPT)
    assert b"answer" in ask(child, "q")
    assert leave(child) == 0


def test_ctrl_c_while_the_model_loads_ends_with_130(talk) -> None:
    child = talk(["x"], load={"delay_ms": 20_000})  # the prompt is there before the model
    child.sendline("q")
    time.sleep(1.0)
    child.sendintr()
    assert seen(child)[1] == 130


def test_a_failed_answer_is_said_and_the_talk_goes_on(talk) -> None:
    child = talk(["par", {"fail": "nan"}], ["good answer"])
    shown = ask(child, "q")
    assert b"par" in shown
    assert b"NaN" in shown
    assert b"good answer" in ask(child, "q")
    assert leave(child) == 0


def test_too_long_a_question_is_refused_and_the_talk_goes_on(talk) -> None:
    child = talk(["fine"], context=200)
    assert b"tokens long; the context holds 200" in ask(child, "s" * 300)
    assert b"fine" in ask(child, "q")
    leave(child)


def test_an_engine_that_dies_ends_the_talk_with_its_reason(talk) -> None:
    child = talk(["par", {"kill": "SIGKILL"}])
    child.sendline("q")
    shown, code = seen(child)
    assert b"killed by SIGKILL" in shown
    assert code == 1


def test_thinking_is_shown_and_told_apart(talk) -> None:
    child = talk(["Let me see", {"control": "</think>"}, "The answer"], args=())
    shown = ask(child, "q")
    assert b"Let me see\r\n\r\nThe answer\r\n" in shown
    ask(child, "/set show_thinking false")
    shown = ask(child, "q")
    assert b"Let me see" not in shown
    assert b"The answer" in shown
    assert b"thinking" in shown  # counted all the same
    leave(child)


def test_a_full_terminal_has_a_line_editor_and_is_left_as_it_was(ling: Program, write_script: Write) -> None:
    script = write_script(["answer"])
    child = watch(ling, "chat", "--plain", "--engine", "scripted", "-m", script, "--no-think")
    child.expect_exact("› ".encode())
    child.sendline("哈哈哈\x7f\x7f\x7fx")
    child.expect_exact(b"answer")
    child.expect_exact("› ".encode())
    child.sendline("/exit")
    shown, code = seen(child)
    assert code == 0
    assert b"\x1b[?1049h" not in shown


def test_stdout_in_a_file_holds_the_answers_only(ling: Program, write_script: Write, tmp_path: Path) -> None:
    import pexpect

    script = write_script(["first"], ["second"])
    target = tmp_path / "out.txt"
    line = f"{' '.join(COMMAND)} chat --engine scripted -m '{script}' --no-think > '{target}'"
    child = pexpect.spawn("bash", ["-c", line], env=ling.environment(), timeout=30)
    for question in ("one", "two"):
        child.expect_exact(PROMPT)
        child.sendline(question)
    child.expect_exact(PROMPT)
    child.sendeof()
    seen(child)
    assert target.read_bytes() == b"first\nsecond\n"
    assert ESC not in target.read_bytes()


def test_json_without_a_prompt_is_refused_on_a_terminal(ling: Program, write_script: Write) -> None:
    shown, code = seen(watch(ling, "chat", "--engine", "scripted", "-m", write_script(["x"]), "--json"))
    assert code == 2
    assert b"--json needs a prompt" in shown


def test_a_terminal_that_goes_away_leaves_no_process(ling: Program, write_script: Write) -> None:
    script = write_script([{"tokens": ["word "], "repeat": 100_000, "delay_ms": 5}])
    child = watch(ling, "chat", "--plain", "--engine", "scripted", "-m", script, "--no-think", env=FULL)
    child.expect_exact("› ".encode())
    child.sendline("go")
    child.expect_exact(b"word word")
    pid = child.pid
    child.close(force=False)  # SIGHUP
    end = time.monotonic() + 10
    while not group_is_gone(pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert group_is_gone(pid)


def test_figures_can_be_switched_off(ling: Program, write_script: Write) -> None:
    script = write_script(["answer"])
    child = watch(ling, "chat", "--engine", "scripted", "-m", script, "--no-think", "--no-stats", env={"TERM": "dumb"})
    child.expect_exact(PROMPT)
    assert b"tok" not in ask(child, "q")
    leave(child)


def test_a_line_of_bytes_that_are_no_utf8_does_not_end_the_talk(talk) -> None:
    child = talk(["answer"])
    child.send(b"a\xff\xfeb\n")
    child.expect_exact(b"answer")
    child.expect_exact(PROMPT)
    assert leave(child) == 0


def test_piped_questions_are_one_prompt(ling: Program, write_script: Write) -> None:
    done = subprocess.run(
        [*COMMAND, "chat", "--engine", "scripted", "-m", str(write_script(["once"], ["twice"])), "--no-think"],
        input=b"line one\nline two\n",
        capture_output=True,
        env=ling.environment(),
        timeout=30,
    )
    assert done.stdout == b"once\n"
