"""The coding agent of docs/serving.md, as it stands there: on calls from a script, and on the demo model."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from program import Program
from served import THOUGHT, Server, scripted, serving, tool_call

Write = Callable[..., Path]
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
HALF = "def double(x):\n"
WHOLE = 'def double(x):\n    """Twice "x"."""\n    return 2 * x\n'


def agent(server: Server, folder: Path) -> list[str]:
    """Run the page's agent in the folder; the lines that it prints."""
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.S) if "tools" in block]
    (folder / "half.py").write_text(HALF)
    program = code.replace("http://127.0.0.1:5464/v1", server.url)
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.stdout.splitlines()


def cached(lines: list[str]) -> list[tuple[int, int]]:
    """(prompt tokens, cached ones) of each call."""
    return [(int(a), int(b)) for line in lines for a, b in re.findall(r"^call \d+: (\d+) in, (\d+) of them", line)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "project"
    made.mkdir()
    return made


@pytest.mark.parametrize("gap", ["", "\n"])  # the history has no newline between arguments, the prompt shows one
@pytest.mark.parametrize("block", [0, 5])
def test_an_agent_reads_writes_and_answers(
    ling: Program, write_script: Write, folder: Path, gap: str, block: int
) -> None:
    turns = (
        ["I read it first.", THOUGHT, "Let me see.\n", *tool_call("read_file", ("path", "half.py"), gap=gap)],
        ["Two lines ", "are missing", THOUGHT, *tool_call("write_file", ("path", "half.py"), ("text", WHOLE), gap=gap)],
        ["done", THOUGHT, "It doubles now."],
    )
    with scripted(ling, write_script(*turns, block=block), "--think") as server:
        lines = agent(server, folder)
        server.stop()
    assert (folder / "half.py").read_text() == WHOLE
    assert lines[-1] == "It doubles now."
    figures = cached(lines)
    assert len(figures) == 3
    made = [int(re.search(r"(\d+) out", line)[1]) for line in server.log if "out" in line]
    for (before, _), (now, kept), num in zip(figures, figures[1:], made, strict=False):
        assert kept == before + num - 1  # all that was read and made, but for the id that ended the turn
        assert now - kept < 150  # the end of that turn, the result, and the head of the next turn; a byte is an id


def test_a_call_that_is_wrong_is_told_and_tried_again(ling: Program, write_script: Write, folder: Path) -> None:
    turns = (
        tool_call("read_file", ("path", "nowhere.py")),
        tool_call("delete_file", ("path", "half.py")),
        tool_call("read_file", ("file", "half.py")),
        ["I give up."],
    )
    with scripted(ling, write_script(*turns)) as server:
        lines = agent(server, folder)
    assert lines[-1] == "I give up."
    assert len(cached(lines)) == 4
    assert (folder / "half.py").read_text() == HALF


def test_the_same_agent_on_the_demo_model(ling: Program, folder: Path) -> None:
    """It has never seen a tool: that it answers, and what the protocol makes of it, is what is tested."""
    with serving(ling, env={"OMP_NUM_THREADS": "1"}) as server:
        lines = agent(server, folder)
    assert cached(lines)[0] > (100, -1)
    assert lines[-1].strip()
