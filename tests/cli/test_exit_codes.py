"""What the exit code and stderr say when something is wrong; with --json an error object as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from program import Program

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--fromat"], "no such option '--fromat'"),
        (["bench", "--fromat", "json"], "no such option '--fromat'. Did you mean '--format'?"),
        (["complete", "--temprature", "1"], "Did you mean '--temperature'?"),
        (["complete", "--temprature=1"], "no such option '--temprature'. Did you mean '--temperature'?"),
        (["complete", "-z"], "no such option '-z'. See `ling complete --help`."),
        (["chatt"], "no such command 'chatt'. Did you mean 'chat'?"),
        (["frobnicate"], "no such command 'frobnicate'. See `ling --help`."),
        (["chat", "-p"], "option '-p' needs a value"),
        (["chat", "--json=yes", "-p", "x"], "option '--json' takes no value"),
        (["complete", "a", "b"], "unexpected argument: b"),
        (["complete", "-t", "hot", "-p", "x"], "--temperature: 'hot' is not a number"),
        (["complete", "-n", "-1", "-p", "x"], "--max-tokens: -1 is out of range"),
        (["complete", "--until", "blok", "-p", "x"], "Did you mean 'block'?"),
        (["bench", "--task", "cod"], "Did you mean 'code'?"),
        (["bench", "--tokens", "0"], "--tokens: 0 is out of range: must be at least 1"),
        (["bench", "--csv", "--md"], "more than one format: csv, md"),
        (["complete", "-p", "x", "--engine", "scripted"], "the scripted engine needs a script"),
        (["complete", "-p", "x", "--engine", "scriptd"], "Did you mean 'scripted'?"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(ling: Program, args: list[str], words: str) -> None:
    done = ling(*args)
    assert (done.code, done.out) == (2, b"")
    assert done.err.startswith("ling: ")
    assert done.err.count("\n") == 1
    assert words in done.err


def test_a_model_that_is_not_here_is_exit_1_with_here_and_get_lines(ling: Program) -> None:
    done = ling("chat", "-p", "hi", "-m", "ling-tiny", stdin=None)
    assert (done.code, done.out) == (1, b"")
    lines = done.err.splitlines()
    assert lines[0] == "ling: model 'ling-tiny' is not on this machine."
    assert lines[1].startswith("  here:  ")
    assert lines[2].startswith("  get:   ling pull inclusionAI/Ling-3.0-tiny ")


@pytest.mark.parametrize("command", ["chat", "complete", "bench"])
def test_a_failure_with_json_has_an_error_object_and_a_message(ling: Program, command: str) -> None:
    prompt = [] if command == "bench" else ["-p", "hi"]
    done = ling(command, *prompt, "-m", "nosuch", "--json", stdin=None)
    assert done.code == 1
    assert done.json["error"]["kind"] == "ModelError"
    assert "nosuch" in done.json["error"]["message"]
    assert "nosuch" in done.err


def test_a_usage_error_with_json_has_an_error_object_too(ling: Program) -> None:
    done = ling("complete", "--json", "--fromat")
    assert done.code == 2
    assert done.json["error"]["kind"] == "UsageError"


@pytest.mark.parametrize("args", [["--fromat"], [], ["-p", "hi", "-n", "x"]], ids=str)
def test_a_failure_of_chat_with_json_is_an_event_on_a_line_from_the_flags_on(ling: Program, args: list[str]) -> None:
    done = ling("chat", "--json", *args)
    assert done.code == 2
    assert [(event["event"], event["error"]["kind"]) for event in done.events] == [("error", "UsageError")]


def test_a_prompt_that_reads_like_a_flag_is_a_prompt(ling: Program) -> None:
    done = ling("complete", "-p", "--json", "-m", "nosuch")
    assert (done.code, done.out) == (1, b"")


@pytest.mark.parametrize("command", ["chat", "complete", "bench"])
def test_a_load_that_fails_is_exit_1(ling: Program, write_script: Write, command: str) -> None:
    script = write_script(
        ["x"], load={"fail": {"kind": "OutOfMemory", "message": "needs 61.2 GiB", "hint": "try: less"}}
    )
    prompt = [] if command == "bench" else ["-p", "hi"]
    done = ling(command, "--engine", "scripted", "-m", script, *prompt, stdin=None)
    assert (done.code, done.out) == (1, b"")
    assert done.err == "ling: needs 61.2 GiB\n  try: less\n"


def test_a_damaged_script_and_a_damaged_checkpoint_are_exit_1(ling: Program, tmp_path: Path) -> None:
    script = tmp_path / "bad.json"
    script.write_text("{")
    done = ling("complete", "--engine", "scripted", "-m", script, "-p", "x")
    assert done.code == 1
    assert "is not JSON" in done.err
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    done = ling("complete", "-m", folder, "-p", "x")
    assert done.code == 1
    assert "weights" in done.err


def test_the_unforeseen_is_one_line_and_a_trace_in_a_private_file(ling: Program) -> None:
    # a room that breaks: a module of ours replaced by one that fails in a way nobody planned
    broken = ling.home / "sitecustomize.py"
    broken.write_text("import ling_local.hub\nling_local.hub.find_model = lambda *name, **more: 1 / 0\n")
    env = {"PYTHONPATH": str(ling.home)}
    done = ling("complete", "-p", "x", env=env)
    assert (done.code, done.out) == (1, b"")
    assert done.err.count("\n") == 1
    assert "ZeroDivisionError" in done.err
    file = ling.home / ".local/state/ling/last-failure.txt"
    assert str(file) in done.err
    assert "Traceback" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert "Traceback" in ling("complete", "-p", "x", "--debug", env=env).err


def test_debug_shows_the_trace_of_a_known_failure(ling: Program) -> None:
    assert "Traceback" not in ling("complete", "-p", "x", "-m", "nosuch").err
    assert "Traceback" in ling("complete", "-p", "x", "-m", "nosuch", "--debug").err
    assert "Traceback" in ling("complete", "-p", "x", "-m", "nosuch", env={"LING_DEBUG": "1"}).err
    assert "Traceback" not in ling("complete", "-p", "x", "-m", "nosuch", "--no-debug", env={"LING_DEBUG": "1"}).err


def test_ctrl_c_while_the_program_is_imported_leaves_no_trace(ling: Program) -> None:
    (ling.home / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = ling("--help", env={"PYTHONPATH": str(ling.home)})
    assert (done.code, done.out, done.err) == (130, b"", "")
