"""Pages of `ling help`: texts in the package's data, wrapped to the width of the terminal.

A page begins with its one-line summary. Below it: `## ` opens a section, lines indented by four spaces stay as they
are, `term :: text` lines that follow each other are two columns, anything else is a paragraph a line.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from ling_local.cli.pages import section

FOLDER = Path(__file__).parents[1] / "data" / "help"
VERBATIM = "    "
_TERM = " :: "


def page_names() -> tuple[str, ...]:
    """The pages there are, by name."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.txt")))


def summary(name: str) -> str:
    """The page's first line."""
    with open(FOLDER / f"{name}.txt", encoding="utf-8") as file:
        return file.readline().strip()


def body(name: str, width: int) -> str:
    """The page without its summary, wrapped; "" where there is none or it has nothing else."""
    file = FOLDER / f"{name}.txt"
    return layout(file.read_text(encoding="utf-8").partition("\n")[2], width) if file.is_file() else ""


def layout(text: str, width: int) -> str:
    """Wrap a page's text to width columns."""
    blocks = [_block(block, width) for block in text.strip("\n").split("\n\n")]
    return "\n\n".join(block for block in blocks if block)


def _block(block: str, width: int) -> str:
    lines = block.splitlines()
    if not lines or all(line.startswith(VERBATIM) for line in lines):
        return block
    if len(lines) == 1 and block.startswith("## "):
        return f"{block[3:]}:"
    if all(_TERM in line for line in lines):
        rows = [(term, said) for term, _, said in (line.partition(_TERM) for line in lines)]
        return section("", rows, width).removeprefix("\n")
    return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines)
