"""What stdout and stderr may hold, by what they are: terminals, dumb terminals, pipes, readers that leave."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from program import COMMAND, ESC, Program, group_is_gone, seen, watch

Write = Callable[..., Path]
LONG = [{"tokens": ["word "], "repeat": 1_000_000, "delay_ms": 1}]
COMMANDS = ("", "complete", "chat", "bench", "doctor", "models", "config", "help")


def on_terminal(ling: Program, env: dict[str, str | None], *args: str | Path) -> bytes:
    return seen(watch(ling, *args, env=env))[0]


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": None}, {"NO_COLOR": "1"}], ids=str)
def test_no_escape_where_the_terminal_or_the_person_wants_none(
    ling: Program, write_script: Write, env: dict[str, str | None]
) -> None:
    script = write_script(["Hm", {"control": "</think>"}, "answer"])
    runs = [
        ["--help"],
        ["complete", "--help"],
        ["complete", "--fromat"],
        ["chat", "-m", "no-such-model", "-p", "q"],
        ["chat", "--engine", "scripted", "-m", script, "-p", "q", "--stats"],
        ["complete", "--engine", "scripted", "-m", script, "-p", "q", "--stats"],
        ["models"],
        ["config"],
    ]
    if env.get("TERM") != "dumb":  # the other ways to want none: where the most is drawn
        runs = [["complete", "--help"], ["chat", "-m", "no-such-model", "-p", "q"], runs[4]]
    for args in runs:
        shown = on_terminal(ling, env, *args)
        assert shown, args
        assert ESC not in shown, args
        if "NO_COLOR" not in env:
            assert b"\r" not in shown.replace(b"\r\n", b""), args  # no line is redrawn


def test_every_help_page_is_plain_on_a_dumb_terminal(ling: Program) -> None:
    for name in COMMANDS:
        shown = on_terminal(ling, {"TERM": "dumb"}, *([name] if name else []), "--help")
        assert b"Usage: ling" in shown
        assert ESC not in shown


@pytest.mark.parametrize("env", [{}, {"NO_COLOR": ""}], ids=["plain", "empty NO_COLOR"])
def test_a_terminal_gets_colour_by_default(ling: Program, env: dict[str, str | None]) -> None:
    assert b"\x1b[1mUsage:" in on_terminal(ling, env, "--help")
    assert ESC in on_terminal(ling, env, "complete", "--fromat")


def test_color_beats_everything(ling: Program) -> None:
    assert ESC in ling("--color", "always", "--help", env={"TERM": "dumb", "NO_COLOR": "1"}).out
    assert ESC in ling("complete", "--fromat", "--color=always").err.encode()
    assert ESC not in on_terminal(ling, {}, "models", "--color", "never")
    assert ESC not in on_terminal(ling, {"LING_COLOR": "never"}, "chat", "-m", "nosuch", "-p", "q")
    assert ling("models", "--color", "sometimes").code == 2


def test_a_pipe_gets_no_escape(ling: Program) -> None:
    for args in (["--help"], ["models"], ["config"], ["complete", "--fromat"]):
        done = ling(*args)
        assert ESC not in done.out + done.err.encode()


def test_an_answer_cannot_drive_the_terminal(ling: Program, write_script: Write) -> None:
    evil = "\x1b[2J\x1b]0;title\x07\x1b]52;c;eA==\x07\x1bc\x08\x9b\ra"
    script = write_script(["\x1b[2Jthought", {"control": "</think>"}, evil])
    for command in ("chat", "complete"):
        shown, code = seen(watch(ling, command, "--engine", "scripted", "-m", script, "-p", "q", "--color", "never"))
        assert code == 0
        for byte in (ESC, b"\x07", b"\x08", "\x9b".encode()):
            assert byte not in shown
        assert "␛]0;title␇".encode() in shown
        assert "␍a".encode() in shown


def test_names_in_messages_cannot_drive_the_terminal(ling: Program) -> None:
    shown, code = seen(watch(ling, "chat", "-m", "no\x1b]0;t\x07such", "-p", "q", "--color", "never"))
    assert code == 1
    assert ESC not in shown
    assert "no␛]0;t␇such".encode() in shown


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_reader_that_leaves_ends_us_quietly(ling: Program, write_script: Write, command: str) -> None:
    more = ["--no-think", "--stdin-wait", "0"] if command == "chat" else []
    args = [command, "--engine", "scripted", "-m", write_script(LONG), "-p", "q", "-n", "100000"]
    process = ling.start(*args, *more)
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(10)
    process.stdout.close()
    assert process.wait(10) == 141
    assert process.stderr.read() == b""
    assert group_is_gone(process.pid)  # the engine is released


def test_head_and_true_as_readers(ling: Program, write_script: Write) -> None:
    import shlex

    script = shlex.quote(str(write_script(LONG)))
    program = " ".join(map(shlex.quote, COMMAND))
    for line in (
        f"echo x | {program} complete --engine scripted -m {script} | head -c 10",
        f"{program} models | true",
        f"{program} --help | true",
        f"{program} config | head -1",
    ):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", line], capture_output=True, env=ling.environment(), timeout=60
        )
        assert b"Traceback" not in done.stderr, line
        assert b"rror" not in done.stderr, line
        assert done.returncode in (0, 141), line


def test_a_full_disk_behind_stdout_is_one_line(ling: Program, write_script: Write) -> None:
    script = write_script(["answer"])
    with open("/dev/full", "wb") as full:
        for args in (("complete", "--engine", "scripted", "-m", script, "-p", "q"), ("models",), ("--help",)):
            process = ling.start(*args, stdout=full)
            _, err = process.communicate(timeout=30)
            assert process.returncode == 1, args
            assert err.startswith(b"ling: cannot write: No space left on device"), args
            assert err.count(b"\n") == 1


def test_closed_streams_are_no_reason_to_fall(ling: Program, write_script: Write) -> None:
    program = " ".join(COMMAND)
    script = write_script(["answer"])
    for stderr in ("2>&-", "2>/dev/full"):
        line = f"{program} complete --engine scripted -m '{script}' -p q --stats {stderr}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, env=ling.environment(), timeout=60)
        assert (done.returncode, done.stdout) == (0, b"answer")
    done = subprocess.run(
        ["bash", "-c", f"{program} chat -p q <&- -m nosuch"], capture_output=True, env=ling.environment(), timeout=60
    )
    assert done.returncode == 1
    assert b"Traceback" not in done.stderr
    done = subprocess.run(
        ["bash", "-c", f"{program} models >&-"], capture_output=True, env=ling.environment(), timeout=60
    )
    assert done.returncode == 0


def test_complete_at_a_terminal_says_that_it_waits_and_takes_what_is_typed(ling: Program, write_script: Write) -> None:
    child = watch(ling, "complete", "--engine", "scripted", "-m", write_script(["answer"]), env={"TERM": "dumb"})
    child.expect_exact(b"waiting for the end of the text on stdin")
    child.sendline("x = 1")
    child.sendeof()
    shown, code = seen(child)
    assert code == 0
    assert b"answer\r\n" in shown


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_run_and_its_engine(ling: Program, write_script: Write, number: int, code: int) -> None:
    process = ling.start("complete", "--engine", "scripted", "-m", write_script(LONG), "-p", "q", "-n", "100000")
    assert process.stdout is not None
    assert process.stdout.read(5) == b"word "
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=10)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert set(out.split()) <= {b"word"}
    assert group_is_gone(process.pid)


def test_ctrl_c_while_the_model_loads_ends_at_once(ling: Program, write_script: Write) -> None:
    script = write_script(["x"], load={"delay_ms": 20_000})
    process = ling.start("complete", "--engine", "scripted", "-m", script, "-p", "q")
    time.sleep(1.5)
    started = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the whole group
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (130, b"")
    assert time.monotonic() - started < 5
    assert group_is_gone(process.pid)


def test_an_interrupted_json_run_is_still_a_document(ling: Program, write_script: Write) -> None:
    import json

    script = write_script(LONG)
    process = ling.start("complete", "--engine", "scripted", "-m", script, "-p", "q", "-n", "100000", "--json")
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert json.loads(out)["finish"] == "cancelled"


def test_text_streams_as_it_is_made(ling: Program, write_script: Write) -> None:
    script = write_script(["first", {"tokens": ["second"], "delay_ms": 3000}])
    process = ling.start("complete", "--engine", "scripted", "-m", script, "-p", "q")
    assert process.stdout is not None
    assert process.stdout.read(5) == b"first"
    arrived = time.monotonic()
    assert process.stdout.read() == b"second"
    assert time.monotonic() - arrived > 1.5
    process.communicate()
