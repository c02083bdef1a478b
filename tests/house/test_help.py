"""Help, version and usage errors: fast, without torch and its like, and working where torch is broken."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ling_local import __version__
from ling_local.cli.topics import layout
from ling_local.settings import TABLE
from program import COMMAND, Program

COMMANDS = ("complete", "chat", "serve", "bench", "doctor", "models", "pull", "config", "help")
WRITTEN = (
    "chat",
    "complete",
    "serve",
    "bench",
    "models",
    "pull",
    "doctor",
    "config",
)  # commands with more than a list of flags
DOCS = ("engines", "models", "quick-start", "serving", "several-gpus", "speculation", "speed", "troubleshooting")
TOPICS = ("exit-codes", "files", "keys", "scripted", "settings", *(name for name in DOCS if name not in COMMANDS))
FAST = (
    ["--help"],
    ["--version"],
    [],
    *([name, "--help"] for name in COMMANDS),
    ["help", "settings"],
    ["help", "scripted"],
    ["help", "speed"],
    ["list"],
    ["pull"],
    ["pull", "fp8", "--offline"],
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
    "starlette",
    "uvicorn",
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


def test_an_answer_is_shown_without_torch(ling: Program) -> None:
    """The model computes in a process of its own: what it says of itself must not make this one import torch too."""
    command = [sys.executable, "-X", "importtime", *COMMAND[1:], "complete", "-n", "1", "-p", "x = "]
    done = subprocess.run(
        command, capture_output=True, env=ling.environment(), stdin=subprocess.DEVNULL, timeout=60, text=True
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == 0
    assert "ling_local.engine.remote" in imported
    assert "torch" not in imported


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
    assert ling("help", name, env={"COLUMNS": "80"}).out.startswith(page.out)
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
    for topic in TOPICS:
        assert f"\n  {topic} " in listed
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


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", sorted({*WRITTEN, *DOCS, "files"}))
def test_a_written_page_fits_the_terminal(ling: Program, name: str, width: int) -> None:
    page = ling("help", name, env={"COLUMNS": str(width)})
    written = page.text.rpartition("our reader left.\n")[2]
    free = [line for line in written.splitlines() if not line.startswith("    ") and "/" not in line]
    assert max(map(len, free)) <= width
    assert not re.search(r"^(#|```|\|)|\]\(|\*\*", "\n".join(free), re.MULTILINE)  # nothing that only a browser shows


@pytest.mark.parametrize("name", WRITTEN)
def test_the_page_of_a_command_says_more_than_its_flags(ling: Program, name: str) -> None:
    flags, whole = ling(name, "--help").text, ling("help", name).text
    assert len(whole) > len(flags) + 400


def test_every_option_and_command_that_a_page_names_exists(ling: Program) -> None:
    known = {option for name in COMMANDS for option in re.findall(r"--[a-z][a-z-]+", ling(name, "--help").text)}
    topics = {*TOPICS, *COMMANDS}
    for file in sorted((TESTS.parent / "ling_local" / "data" / "help").glob("*.md")):
        text = file.read_text(encoding="utf-8")
        if file.stem != "engines":  # which names flags of SGLang's
            assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - known == set(), file.name
        for command in re.findall(r"`ling ([a-z-]+)", text):
            assert command in COMMANDS, f"{file.name}: ling {command}"
        for topic in re.findall(r"ling help ([a-z-]+)", text):
            assert topic in topics, f"{file.name}: ling help {topic}"
        assert text.startswith("# ")


def test_a_page_of_the_documentation_is_the_page_of_help(ling: Program) -> None:
    """One text for both: the package has a link, whose contents a wheel gets."""
    for name in DOCS:
        page = TESTS.parent / "docs" / f"{name}.md"
        assert (TESTS.parent / "ling_local/data/help" / f"{name}.md").resolve() == page
        commands = re.findall(r"^\$ .*", page.read_text(encoding="utf-8"), re.MULTILINE)
        shown = ling("help", name).text
        assert all(f"\n    {command}\n" in shown for command in commands)


def test_what_the_pages_are_made_of_is_laid_out() -> None:
    text = """
Text that
goes on, **loud**, [a page](speed.md#x), [speed.md](speed.md), [a file](../README.md).

## Why?

- `one`, `two`: both
  of them
- `three`: [not](other.md)

- a
  b
- c

| | |
| --- | --- |
| `k` | v |

| h | i | j |
|---|---|---:|
| 1 | 2 | |

```sh
ls |  cat

```

    kept  so
"""
    wide = layout(text, 200).split("\n\n")
    assert wide[0] == "Text that goes on, loud, a page (`ling help speed`), `ling help speed`, a file (../README.md)."
    assert wide[1] == "Why?"
    assert [line.split() for line in wide[2].splitlines()] == [
        ["one,", "two", "both", "of", "them"],
        ["three", "not", "(other.md)"],
    ]
    assert wide[3] == "- a b\n- c"
    assert wide[4].split() == ["k", "v"]
    assert wide[5] == "  h  i  j\n  1  2"
    assert wide[6:] == ["    ls |  cat", "\n    kept  so"]
    assert "\n1\n  i: 2\n" in f"\n{layout(text[text.index('| h') : text.index('```')], 6)}\n"  # too narrow for columns


def complete(ling: Program, *words: str) -> set[str]:
    """What the shell would offer for the last word."""
    env = {"_LING_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    return set(ling(env=env).text.split())


def test_shell_completion_knows_commands_topics_names_and_values(ling: Program) -> None:
    (ling.home / ".local/share/ling/models/my-ling").mkdir(parents=True)
    assert complete(ling, "ling", "c") == {"complete", "chat", "config"}
    assert complete(ling, "ling", "help", "sp") == {"speculation", "speed"}
    assert complete(ling, "ling", "help", "mo") == {"models"}
    assert complete(ling, "ling", "chat", "-m", "") == {"ling-demo", "my-ling"}
    assert complete(ling, "ling", "chat", "--model", "m") == {"my-ling"}
    assert complete(ling, "ling", "pull", "") == {"tiny", "flash", "dspark"}
    assert complete(ling, "ling", "bench", "--modes", "off,m") == {"off,mtp"}
    assert complete(ling, "ling", "complete", "--until", "") == {"block", "eof"}
    assert complete(ling, "ling", "list", "--al") == {"--all"}


@pytest.mark.parametrize("words", ["ling chat -m l", "ling help s", "ling bench --modes o"])
def test_shell_completion_imports_nothing_heavy(ling: Program, words: str) -> None:
    more = {"_LING_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *COMMAND[1:]],
        capture_output=True,
        env=ling.environment(more),
        stdin=subprocess.DEVNULL,
        timeout=60,
        text=True,
    )
    assert done.stdout.strip()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert imported.isdisjoint(HEAVY)


def test_completion_installs_itself_in_a_real_shell(ling: Program, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "ling"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    script = (
        "ling --install-completion >/dev/null; . ~/.bash_completions/ling.sh; "
        "COMP_WORDS=(ling help sp) COMP_CWORD=2; _ling_completion ling; echo ${COMPREPLY[@]}"
    )
    env = ling.environment()
    env |= {"PATH": f"{program.parent}:{env['PATH']}", "SHELL": "/bin/bash"}
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, env=env, text=True, timeout=60)
    assert done.stdout.split() == ["speculation", "speed"], done.stderr
    assert "ling.sh" in (ling.home / ".bashrc").read_text()
    shown = subprocess.run(["bash", "-c", "ling --show-completion; true"], capture_output=True, env=env, text=True)
    assert "_LING_COMPLETE=complete_bash" in shown.stdout
