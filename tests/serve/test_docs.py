"""Every example of docs/serving.md runs: its programs, its curl lines and its command lines."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from program import Program
from served import READY, Server, serving

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "serving.md").read_text("utf-8")
ADDRESS = "http://127.0.0.1:5464"
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.S)
LINES = [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S) for line in block.splitlines()]
CURLS = [line for line in LINES if line.startswith("curl ")]
INLINE = re.findall(r"`((?:LING_\w+=\S+ )?ling serve [^`]+)`", TEXT)
FLAGS = re.findall(r"`(--[a-z][^`]*)`", TEXT)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(Program(tmp_path_factory.mktemp("home")), env={"OMP_NUM_THREADS": "1"}) as running:
        yield running


def test_the_page_has_what_is_run_here() -> None:
    assert (len(PROGRAMS), len(CURLS), LINES[0]) == (2, 4, "ling serve")
    assert len(LINES) == 5
    assert len(INLINE) >= 2
    assert ADDRESS in TEXT


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs(server: Server, tmp_path: Path, number: int) -> None:
    program = PROGRAMS[number].replace(f"{ADDRESS}/v1", server.url)
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()


@pytest.mark.parametrize("line", CURLS)
def test_a_curl_line_is_answered(server: Server, line: str) -> None:
    """Read as curl reads it, so that no curl is needed here."""
    words = shlex.split(line)[1:]
    url = words.pop(0)
    headers, body = {}, None
    while words:
        option, value = words.pop(0), words.pop(0)
        if option == "-H":
            name, _, text = value.partition(": ")
            headers[name.replace("-", "_").lower()] = text
        else:
            assert option == "-d"
            body = value.encode()
    assert url.startswith(ADDRESS)
    reply = server.ask("POST" if body else "GET", url.removeprefix(ADDRESS), body, **headers)
    assert reply.status == 200
    assert reply.json.get("choices") or reply.json.get("data") or reply.json["status"] == "ok"


@pytest.mark.parametrize("line", ["ling serve", *INLINE])
def test_a_command_line_starts_a_server(ling: Program, write_script, line: str) -> None:
    words = shlex.split(line)
    env = dict(word.split("=", 1) for word in words if word.startswith("LING_"))
    args = words[words.index("serve") + 1 :]
    with serving(ling, "--engine", "scripted", "-m", write_script(["x"]), *args, env=env) as running:
        assert running.health()["status"] == "ok"


def test_the_flags_of_the_page_are_flags_of_the_command(ling: Program) -> None:
    page = ling("serve", "--help").text
    for flag in FLAGS:
        assert re.search(rf"{flag.split()[0]}\b", page), flag
    for name, value in (word.split() for word in FLAGS if " " in word):
        with serving(ling, name, value, "--engine", "scripted", "-m", _script(ling.home)) as running:
            assert running.health()["status"] == "ok"


def _script(folder: Path) -> Path:
    path = folder / "one.json"
    path.write_text('[["x"]]')
    return path


def test_the_measurement_shows_what_the_page_says(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Short of its times, which are another machine's: each call reads a few new tokens, the cold one all of them."""
    measure = runpy.run_path(str(ROOT / "docs" / "measure_serving.py"))["measure"]
    measure.__globals__["QUESTIONS"] = measure.__globals__["QUESTIONS"][:3]
    measure(server.url)
    shown = [line.split("|")[1:5] for line in TEXT.splitlines() if re.match(r"\| \d", line)]
    measured = [line.split("|")[1:5] for line in capsys.readouterr().out.splitlines() if re.match(r"\| \d", line)]
    assert (len(measured), len(shown)) == (4, 7)
    for name, num, cached, new in measured[1:-1]:
        assert int(new) < 40 < int(cached), name
        assert int(num) == int(cached) + int(new)
    assert measured[-1][2].strip() == "0"


def test_the_ready_line_is_as_the_page_shows_it() -> None:
    shown = re.search(r"```text\n(ling: .*)\n```", TEXT)
    assert shown
    assert READY.search(shown[1])
