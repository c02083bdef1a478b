"""Runs the examples of a page of documentation, as a reader would who types them.

An example is a fenced block that begins with ```console. Lines that begin with `$ ` are commands for a shell, in an
empty folder and home of the block's own, with `ling` on the PATH; a line that begins with `> ` goes on with the
command above. The lines below a command are fragments that must occur in what it prints, in that order; `...` in them
stands for anything on that line. `# exit N` at a command's end: it ends with that exit code, else with 0. Words after
```console are names of pytest marks, such as gpu.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from forks import forks
from program import Program

ROOT = Path(__file__).parents[1]
_FENCE = re.compile(r"^```console([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_EXIT = re.compile(r"\s+# exit (\d+)$")
_TIMEOUT_S = 240


@dataclass(frozen=True, slots=True)
class Command:
    """What is typed, the exit code it ends with, and fragments of what it prints."""

    text: str
    code: int
    shown: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One block of a page. line: where it begins."""

    page: str
    line: int
    marks: tuple[str, ...]
    commands: tuple[Command, ...]


def examples(page: Path) -> list[Example]:
    """The blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Example(page.name, line, tuple(match[1].split()), commands(match[2], f"{page.name}:{line}")))
    return found


def commands(block: str, where: str) -> tuple[Command, ...]:
    """The commands of a block. Raises ValueError where it begins with something else."""
    made: list[Command] = []
    for line in block.splitlines():
        if line.startswith("$ "):
            code = _EXIT.search(line)
            made.append(Command(_EXIT.sub("", line[2:]), int(code[1]) if code else 0, ()))
        elif not made:
            raise ValueError(f"{where}: the block does not begin with a command")
        elif line.startswith("> "):
            last = made.pop()
            made.append(Command(f"{last.text}\n{line[2:]}", last.code, last.shown))
        elif line.strip():
            last = made.pop()
            made.append(Command(last.text, last.code, (*last.shown, line.strip())))
    return tuple(made)


def parameters(*pages: str) -> list[pytest.param]:
    """For `pytest.mark.parametrize`: the examples of pages named from the repository's root."""
    rows = []
    for page in pages:
        for example in examples(ROOT / page):
            marks = [getattr(pytest.mark, name) for name in example.marks]
            rows.append(pytest.param(example, id=f"{example.page}:{example.line}", marks=marks))
    return rows


def run(example: Example, folder: Path) -> None:
    """Type the commands of a block. Fails with what was printed where that is not what the page shows."""
    home = folder / "home"
    place, programs = folder / "work", folder / "bin"
    for made in (home, place, programs):
        made.mkdir()
    ling = programs / "ling"
    ling.write_text(f'#!/bin/sh\nexec {" ".join(forks().command)} "$@"\n')
    ling.chmod(0o755)
    env = Program(home).environment({"OMP_NUM_THREADS": "1"})
    env["PATH"] = f"{programs}:{Path(sys.executable).parent}:{env['PATH']}"
    for command in example.commands:
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command.text],
            cwd=place,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_TIMEOUT_S,
        )
        printed = done.stdout.decode("utf-8", "replace")
        assert done.returncode == command.code, f"$ {command.text}\n{printed}"
        assert (miss := missing(command.shown, printed)) is None, f"$ {command.text}\n{printed}\nhas not: {miss}"


def missing(fragments: tuple[str, ...], printed: str) -> str | None:
    """The first fragment that does not come, after those before it; None where all do."""
    at = 0
    for fragment in fragments:
        parts = [re.escape(part).replace(r"\ ", " +") for part in fragment.split("...")]
        found = re.compile("[^\n]*".join(parts)).search(printed, at)
        if found is None:
            return fragment
        at = found.end()
    return None


def named_options(page: Path) -> set[tuple[str, str]]:
    """(command, long option) of each `ling command --option` that the page names, in blocks and in running text."""
    text = re.sub(r"\\\n", " ", page.read_text(encoding="utf-8"))
    found: set[tuple[str, str]] = set()
    for command, rest in re.findall(r"\bling ([a-z]+)([^`\n|;<>]*)", text):
        found |= {(command, option) for option in re.findall(r"(?<=\s)--[a-z][a-z-]+", rest)}
    return found
