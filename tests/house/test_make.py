"""What `make demo` runs exists and prints a continuation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_demo_of_the_makefile_continues_its_example() -> None:
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(r"\$\(BIN\)/ling complete --stats (\S+)", recipe)
    assert found
    example = ROOT / found[1]
    command = [sys.executable, "-m", "ling_local", "complete", "--stats", str(example)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    compile(example.read_text(encoding="utf-8") + done.stdout, str(example), "exec")
    assert "return" in done.stdout
    assert re.search(r"TPOT .* accept \d", done.stderr)


def test_a_clone_may_lie_in_a_folder_with_spaces(tmp_path: Path) -> None:
    clone = tmp_path / "a b 張"
    python = clone / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> asked\n')
    python.chmod(0o755)
    subprocess.run(
        ["sh", str(ROOT / "setup.sh"), "."], cwd=clone, env={**os.environ, "PYTHON": sys.executable}, check=True
    )
    assert (clone / "asked").read_text().endswith("-m pip --disable-pip-version-check install -q -e .\n")
