"""Every command line of the README runs, with fewer tokens where it would take long."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from doc_examples import ROOT, Command, Example, run

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
LINES = [re.split(r"\s+#", line)[0] for block in BLOCKS for line in block.splitlines() if line.strip()]
ELSEWHERE = {  # what needs a terminal, a network or another machine, and where it is tried
    "make demo": "tests/house/test_make.py",
    "make test": "Makefile",
    "pip install .": "Makefile",
    "ling chat": "tests/terminal/test_screen_talk.py",
    "ling chat --resume last": "tests/terminal/test_screen_sessions.py",
    "ling serve": "tests/serve/test_docs.py",
    "ling chat --engine sglang -m Ling-3.0-flash": "tests/cli/test_sglang.py",
    "ling pull tiny": "tests/cli/test_pull.py",
}
PREPARE = (
    "printf 'def add(a, b):\\n' > half.py",
    "git init -q && git add half.py && printf '    return a\\n' >> half.py",
    "ling bench --tokens 4 -r 1 --warmup 0 --speculation off --quiet --save before.json",
)


def test_the_readme_has_commands_and_each_exception_is_one_of_them() -> None:
    assert len(LINES) > 15
    assert set(ELSEWHERE) <= set(LINES)
    assert all((ROOT / file).is_file() for file in ELSEWHERE.values())


@pytest.mark.parametrize("line", [line for line in LINES if line not in ELSEWHERE])
def test_a_command_of_the_readme_runs(line: str, tmp_path: Path) -> None:
    assert shutil.which("git")
    text = line
    if "ling bench" in line:  # short runs, and for a check short prompts
        text = re.sub(r" --tokens \d+", "", line) + " --tokens 4 --prompt-tokens 16 --quiet"
        text += "" if "--check" in line else " -r 1"
        text += " --ctx 512" if "--dummy" in line else ""
    prepare = PREPARE if "before.json" in line else PREPARE[:2]
    commands = [Command(part, 0, ()) for part in (*prepare, text)]
    if "doctor" in line:  # what it finds here is this machine's affair, but it ends
        commands[-1] = Command(f"{text}; test $? -le 1", 0, ())
    run(Example("README.md", 1, (), tuple(commands)), tmp_path)
