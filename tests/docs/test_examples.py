"""Every example of these pages runs and prints what the page shows; every option that they name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from doc_examples import ROOT, Command, Example, commands, examples, missing, named_options, parameters, run
from program import Program

PAGES = tuple(f"docs/{name}.md" for name in ("quick-start", "models", "speed", "speculation", "troubleshooting"))
ALL_PAGES = ("README.md", *(f"docs/{file.name}" for file in sorted((ROOT / "docs").glob("*.md"))))


@pytest.mark.parametrize("example", parameters(*PAGES))
def test_an_example_does_what_the_page_says(example: Example, tmp_path: Path) -> None:
    run(example, tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_examples(page: str) -> None:
    assert len(examples(ROOT / page)) >= 4


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The long options of each command."""
    ling = Program(tmp_path_factory.mktemp("home"))
    names = re.findall(r"^  ([a-z]+) ", ling("--help").text.partition("Commands:")[2], re.MULTILINE)
    return {name: set(re.findall(r"--[a-z][a-z-]+", ling(name, "--help").text)) for name in names}


@pytest.mark.parametrize("page", ALL_PAGES)
def test_every_option_that_a_page_names_exists(options: dict[str, set[str]], page: str) -> None:
    for command, option in named_options(ROOT / page):
        assert option in options.get(command, {option}), f"{page}: ling {command} {option}"


def test_the_floors_of_the_page_are_those_of_the_program() -> None:
    text = (ROOT / "docs/speed.md").read_text(encoding="utf-8")
    rows = {"tiny": "Ling-3.0-tiny, one GPU", "flash4": "Ling-3.0-flash, each of four GPUs"}
    for shape, name in rows.items():
        command = [sys.executable, ROOT / "kernels/bench/floors.py", "--shape", shape, "--rows", "1", "9"]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        few, many = (float(cell) / 1000 for cell in re.findall(r"\| all \| \| ([\d.]+)", printed))
        cells = [f"{few:.2f}", f"{many:.2f}"]
        cells += [f"{few / rate:.2f} / {many / rate:.2f}" for rate in (1.8, 4.25, 8.0)]
        assert f"| {name} | {' | '.join(cells)} |" in text


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without its head."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_what_is_modelled_of_other_gpus_follows_from_what_was_measured() -> None:
    gigabytes = (2.3973, 7.7050, 1.83)  # one row, nine rows (floors.py), the draft
    measured, *others = rows_of("docs/speed.md", "What to expect of a machine")
    steps = [float(measured[column]) for column in (1, 3, 4)]
    seams = [step - size / 4.25 for step, size in zip(steps, gigabytes, strict=True)]
    assert [round(seam, 2) for seam in seams] == [0.30, 0.48, 0.10]
    for row, bandwidth in zip([measured, *others], (4.25, 8.0, 1.8), strict=True):
        one, nine, draft = (size / bandwidth + seam for size, seam in zip(gigabytes, seams, strict=True))
        shown = [float(cell.replace(",", "")) for cell in row[1:]]
        assert shown == pytest.approx([one, 1000 / one, nine, draft, (nine + draft) / 3.6], rel=0.01)


def test_the_model_of_four_ranks_adds_up() -> None:
    command = [sys.executable, ROOT / "kernels/bench/floors.py", "--shape", "flash4", "--rows", "1", "9"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    steps = [float(cell) / 1000 for cell in re.findall(r"\| all \| \| ([\d.]+)", printed)]
    rows = rows_of("docs/several-gpus.md", "Flash at four ranks on B200, modelled")
    assert [float(row[1]) for row in rows] == pytest.approx([*steps, steps[1] + 0.82], abs=0.005)
    for _, size, floor, seams, launches, model in rows:
        assert float(floor) == pytest.approx(float(size) / 8, abs=0.006)
        assert float(model) == pytest.approx(float(floor) + float(seams), abs=0.011)
        if found := re.fullmatch(r"(\d+) x ([\d.]+)", launches):
            assert float(seams) == pytest.approx(int(found[1]) * float(found[2]) / 1000, abs=0.03)


def test_the_runner_reads_a_block() -> None:
    block = "$ ling x \\\n> --y\nfirst\n"
    assert commands("$ false  # exit 1\nsecond ... line\n\n$ true\n", "here") == (
        Command("false", 1, ("second ... line",)),
        Command("true", 0, ()),
    )
    assert commands(block, "here") == (Command("ling x \\\n--y", 0, ("first",)),)
    with pytest.raises(ValueError, match="here"):
        commands("output first\n", "here")


def test_the_runner_notices_what_is_not_printed(tmp_path: Path) -> None:
    assert missing(("a", "c ... e"), "x a\nc d e\n") is None
    assert missing(("c", "a"), "a\nc\n") == "a"
    assert missing(("a ... c",), "a\nc\n") == "a ... c"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    with pytest.raises(AssertionError, match="has not: bye"):
        run(Example("x.md", 1, (), (Command("echo hi", 0, ("bye",)),)), tmp_path / "one")
    with pytest.raises(AssertionError, match="exit 3"):
        run(Example("x.md", 1, (), (Command("exit 3", 0, ()),)), tmp_path / "two")
