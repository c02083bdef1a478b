"""Faults that people met in other tools, across several commands: each kind in one place."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ling_local import paths
from program import COMMAND, ESC, Program, seen, watch

Write = Callable[..., Path]
TURN = {"steps": [{"tokens": ["a", "b"], "delay_ms": 1}], "loop": True}
RUN = ("--tokens", "6", "-r", "2")


def test_json_is_one_document_whatever_else_is_said(ling: Program, write_script: Write) -> None:
    """C063: a banner of the driver, warnings of libraries, of the config and of the measurement itself."""
    ling.config("temprature = 1\n")
    script = write_script([{"text": "ab", "stderr": "FutureWarning: noise"}], stderr="driver banner", clock="virtual")
    env = {"LING_TEMPRATURE": "1", "PYTHONWARNINGS": "always"}
    done = ling("bench", "--engine", "scripted", "-m", script, *RUN, "--warmup", "0", "--json", env=env)
    assert done.code == 0
    assert json.loads(done.out)["schema"] == 1
    assert done.err.count("temprature") + done.err.count("LING_TEMPRATURE") >= 2
    assert "no warm-up" in done.err


def test_a_reader_of_a_report_that_leaves_is_no_failure(ling: Program, write_script: Write) -> None:
    """C057."""
    program = " ".join(map(shlex.quote, COMMAND))
    script = shlex.quote(str(write_script(TURN, clock="virtual")))
    for line in (
        f"{program} bench --engine scripted -m {script} {' '.join(RUN)} | head -1",
        f"{program} bench --engine scripted -m {script} {' '.join(RUN)} --json | true",
        f"{program} list | true",
        f"{program} help settings | head -1",
        f"{program} doctor --timeout 30 | head -1",
    ):
        command = ["bash", "-o", "pipefail", "-c", line]
        done = subprocess.run(command, capture_output=True, env=ling.environment(), timeout=90)
        assert b"Traceback" not in done.stderr, line
        assert b"Broken" not in done.stderr, line
        assert done.returncode in (0, 141) or "doctor" in line, line


def test_a_saved_report_survives_a_reader_that_left(ling: Program, write_script: Write, tmp_path: Path) -> None:
    program = " ".join(map(shlex.quote, COMMAND))
    script = shlex.quote(str(write_script(TURN, clock="virtual")))
    line = f"{program} bench --engine scripted -m {script} {' '.join(RUN)} --save kept.json | true"
    subprocess.run(["bash", "-c", line], capture_output=True, env=ling.environment(), cwd=tmp_path, timeout=60)
    assert json.loads((tmp_path / "kept.json").read_text("utf-8"))["schema"] == 1


def test_too_long_a_prompt_is_refused_in_the_same_words_on_every_route(ling: Program, write_script: Write) -> None:
    """C067, C069: the server's routes have a test of their own."""
    script = write_script(["never"], context=50)
    base = ("--engine", "scripted", "-m", script)
    for args in (
        ("complete", *base, "-p", "x" * 60),
        ("chat", *base, "-p", "x" * 60),
        ("bench", *base, "--prompt-tokens", "60"),
        ("bench", *base, "--task", "random", "--prompt-tokens", "60", "--tokens", "1"),
    ):
        done = ling(*args, stdin=None)
        assert (done.code, done.out) == (2, b""), args
        assert "tokens long; the context holds 50, at least one of them new" in done.err, args
        assert "never" not in done.err


def test_a_second_process_measures_the_same_thing(ling: Program) -> None:
    """C097, C099: nothing of a prompt is kept on disk."""
    env = {"OMP_NUM_THREADS": "1"}
    run = ("bench", "--speculation", "off", "--tokens", "4", "-r", "2", "--warmup", "0", "--json", "--quiet")
    lengths = []
    for _ in range(2):
        document = ling(*run, env=env).json
        assert document["prefill"]["cached_tokens"] == 0
        assert [sample["cached_tokens"] for sample in document["samples"]] == [0, 0]
        lengths.append([sample["prompt_tokens"] for sample in document["samples"]])
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize("name", ["a b 張", "it's 50%20", "-dash [/x] :smile:"])
def test_a_home_of_any_name_works(tmp_path: Path, name: str) -> None:
    """C115: everything that is kept lies below it, and the model too."""
    home = tmp_path / name
    models = home / ".local" / "share" / "ling" / "models"
    models.mkdir(parents=True)
    (models / "my model").symlink_to(paths.demo_dir())
    ling = Program(home)
    ling.config("max_tokens = 3\n")
    done = ling("complete", "-m", "my model", "-p", "x = ", "--json", env={"OMP_NUM_THREADS": "1"})
    assert done.code == 0
    assert done.json["usage"]["completion_tokens"] == 3
    assert ling("models").code == ling("config").code == 0


@pytest.mark.parametrize("env", [{"TERM": "dumb"}, {"TERM": None}], ids=str)
def test_no_command_redraws_on_a_terminal_that_cannot(
    ling: Program, write_script: Write, env: dict[str, str | None]
) -> None:
    """C029: the commands with a bar or a line that is replaced."""
    script = write_script(TURN, clock="virtual")
    runs: tuple[tuple[Any, ...], ...] = (
        ("bench", "--engine", "scripted", "-m", script, *RUN),
        ("pull", "nosuch/repository-of-nobody", "--offline"),
        ("doctor", "--timeout", "30"),
        ("pull", "--help"),
        ("serve", "--help"),
        ("help", "speed"),
    )
    for args in runs if env["TERM"] else runs[:2]:
        shown = seen(watch(ling, *args, env=env))[0]
        assert shown, args
        assert ESC not in shown, args
        assert b"\r" not in shown.replace(b"\r\n", b""), args
