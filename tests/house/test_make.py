"""What `make demo` runs exists and prints a continuation."""

from __future__ import annotations

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
