"""Help, version and usage errors: fast, without torch and its like, and working where torch is broken."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ling_local import __version__
from ling_local.settings import TABLE
from program import COMMAND, Program

COMMANDS = ("complete", "chat", "bench", "doctor", "models", "pull", "config", "help")
FAST = (
    ["--help"],
    ["--version"],
    [],
    *([name, "--help"] for name in COMMANDS),
    ["help", "settings"],
    ["help", "scripted"],
    ["--fromat"],
    ["complete", "--fromat"],
    ["chatt"],
    ["complete", "-t", "hot", "-p", "x"],
    ["chat", "-m", "nosuch", "-p", "x", "--stdin-wait", "0"],
)
HEAVY = (
    "torch",
    "transformers",
    "huggingface_hub",
    "numpy",
    "rich",
    "tokenizers",
    "jinja2",
    "prompt_toolkit",
    "safetensors",
)
TESTS = Path(__file__).parents[1]


@pytest.fixture
def ling(tmp_path: Path) -> Program:
    return Program(tmp_path)


@pytest.mark.parametrize("args", FAST, ids=" ".join)
def test_nothing_heavy_is_imported(ling: Program, args: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:], *args],
        capture_output=True,
        env=ling.environment(),
        stdin=subprocess.DEVNULL,
        timeout=60,
        text=True,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert "ling_local" in imported
    assert imported.isdisjoint(HEAVY)


def test_help_and_usage_errors_are_fast(ling: Program) -> None:
    def best(*args: str) -> float:
        times = []
        for _ in range(4):
            started = time.perf_counter()
            ling(*args)
            times.append(time.perf_counter() - started)
        return min(times)

    start = min(_bare_python() for _ in range(4))
    for args in (["--help"], ["--version"], ["chat", "--help"], ["complete", "--fromat"]):
        # 0.3 s on an idle machine; a busy one shows in the time that Python itself takes to start
        assert best(*args) < max(0.3, 12 * start), args


def _bare_python() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.perf_counter() - started


def test_help_works_where_torch_is_broken(ling: Program, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is damaged')\n")
    env = {"PYTHONPATH": str(tmp_path)}
    assert ling("--help", env=env).code == 0
    assert ling("complete", "--help", env=env).code == 0
    assert ling("complete", "--fromat", env=env).code == 2


def test_the_version(ling: Program) -> None:
    assert ling("--version").text == f"ling {__version__}\n"


def test_ling_alone_and_ling_help_show_the_commands(ling: Program) -> None:
    page = ling("--help")
    assert (page.code, page.err) == (0, "")
    assert ling().out == page.out
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", page.text, re.MULTILINE)
    assert page.text in ling("help").text
    assert ling("-h").out == page.out


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_has_all_its_parts_and_fits(ling: Program, name: str) -> None:
    page = ling(name, "--help", env={"COLUMNS": "80"})
    assert page.code == 0
    order = [page.text.index(part) for part in (f"Usage: ling {name}", "Options:", "Examples:", "Exit codes:")]
    assert order == sorted(order)
    assert page.text.split("\n\n")[0].endswith(".")
    options = page.text[page.text.index("Options:") : page.text.index("Examples:")]
    assert max(map(len, options.splitlines())) <= 80
    assert ling("help", name, env={"COLUMNS": "80"}).out == page.out
    assert ling(name, "-h", env={"COLUMNS": "80"}).out == page.out


def test_options_show_default_and_variable(ling: Program) -> None:
    page = " ".join(ling("complete", "--help").text.split())
    assert "-t, --temperature X 0 is greedy. [default: 0; LING_TEMPERATURE]" in page
    assert "[default: 256; LING_MAX_TOKENS]" in page
    assert "[default: 1024; LING_MAX_TOKENS]" in " ".join(ling("chat", "--help").text.split())
    assert "--device cpu|cuda" in page


def test_every_long_option_of_every_command_is_used_in_a_test(ling: Program) -> None:
    source = "".join(file.read_text() for folder in ("cli", "terminal") for file in (TESTS / folder).glob("test_*.py"))
    given = set(re.findall(r"--[a-z][a-z-]+", source))
    for name in COMMANDS:
        options = set(re.findall(r"(?<=[ ,])--[a-z][a-z-]+", ling(name, "--help").text.split("Examples:")[0]))
        assert options - given - {"--help"} == set(), name


def test_help_topics(ling: Program) -> None:
    listed = ling("help").text
    for topic in ("exit-codes", "settings", "scripted"):
        assert topic in listed
        assert ling("help", topic).code == 0
    codes = ling("help", "exit-codes").text
    for code in ("0 ", "1 ", "2 ", "130 ", "141 "):
        assert f"\n  {code}" in codes
    settings = ling("help", "settings").text
    for row in TABLE.values():
        assert (f"\n  {row.name} " in settings) == row.kept
        assert not row.kept or row.variable in " ".join(settings.split())
    assert '"turns"' in ling("help", "scripted").text
    assert ling("help", "exit-code").err == "ling: no help on 'exit-code'. Did you mean 'exit-codes'?\n"


def test_shell_completion_knows_the_commands(ling: Program) -> None:
    done = ling(env={"_LING_COMPLETE": "complete_bash", "COMP_WORDS": "ling c", "COMP_CWORD": "1"})
    assert set(done.text.split()) == {"complete", "chat", "config"}
