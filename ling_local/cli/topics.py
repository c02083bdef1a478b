"""Pages of `ling help`: Markdown in the package's data, laid out for the width of the terminal.

A page that is a part of the documentation, too, is a link to its file in docs/, so that there is one text. It begins
with a heading, which is its summary. What is understood: sections, paragraphs, code in fences or behind four spaces,
lists, tables, links. List items that all begin with code and a colon, and tables of two columns, become two columns.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ling_local.cli.pages import section

FOLDER = Path(__file__).parents[1] / "data" / "help"
VERBATIM = "    "
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_TERM = re.compile(r"- ((?:`[^`]+`(?:, )?)+): (.*)")
_RULE = re.compile(r"\|[\s|:-]*-[\s|:-]*\|")


def page_names() -> tuple[str, ...]:
    """The pages there are, by name."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.md")))


def summary(name: str) -> str:
    """The page's heading, as a sentence."""
    with open(FOLDER / f"{name}.md", encoding="utf-8") as file:
        return file.readline().removeprefix("# ").strip().removesuffix(".").replace("`", "") + "."


def body(name: str, width: int) -> str:
    """The page without its heading, wrapped; "" where there is none or it has nothing else."""
    file = FOLDER / f"{name}.md"
    return layout(file.read_text(encoding="utf-8").partition("\n")[2], width) if file.is_file() else ""


def layout(text: str, width: int) -> str:
    """Lay a page's text out for width columns."""
    return "\n\n".join(_block(kind, lines, width) for kind, lines in _blocks(text))


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """(kind, lines) of each block: code, section, table, list or text. Code is indented already."""
    fenced, lines = False, []
    for line in [*text.split("\n"), ""]:
        if line.startswith("```"):
            if fenced:
                yield "code", lines
            elif lines:
                yield _kind(lines), lines
            fenced, lines = not fenced, []
        elif fenced:
            lines.append(f"{VERBATIM}{line}".rstrip())
        elif line.strip():
            lines.append(line)
        elif lines:
            yield _kind(lines), lines
            lines = []


def _kind(lines: list[str]) -> str:
    starts = {VERBATIM: "code", "#": "section", "|": "table", "- ": "list"}
    return next((kind for start, kind in starts.items() if lines[0].startswith(start)), "text")


def _block(kind: str, lines: list[str], width: int) -> str:
    if kind == "code":
        return "\n".join(lines)
    if kind == "section":
        title = _plain(lines[0].lstrip("# "))
        return title if title.endswith("?") else f"{title}:"
    if kind == "table":
        return _table([_cells(line) for line in lines if not _RULE.fullmatch(line)], width)
    if kind == "list":
        return _list(lines, width)
    return _fill(_plain(" ".join(line.strip() for line in lines)), width)


def _list(lines: list[str], width: int) -> str:
    items: list[str] = []
    for line in lines:
        if line.startswith("- "):
            items.append(line)
        else:
            items[-1] += f" {line.strip()}"
    terms = [_TERM.fullmatch(item) for item in items]
    if all(terms):
        rows = [(term[1].replace("`", ""), _plain(term[2])) for term in terms if term]
        return section("", rows, width).removeprefix("\n")
    return "\n".join(_fill(_plain(item), width, "  ") for item in items)


def _cells(line: str) -> list[str]:
    return [_plain(cell.strip()) for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]


def _table(rows: list[list[str]], width: int) -> str:
    """Two columns as a list; more side by side where they fit, else a few lines a row."""
    head, *rest = rows
    if len(head) == 2:
        return section("", [(first.replace("`", ""), second) for first, second in rest], width).removeprefix("\n")
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    if sum(widths) + 2 * len(widths) <= width:
        lines = ("  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(f"  {line}".rstrip() for line in lines)
    lines = []
    for first, *others in rest:
        lines.append(_fill(first, width))
        named = zip(head[1:], others, strict=True)
        lines += [_fill(f"  {name}: {cell}", width, "    ") for name, cell in named if cell]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Running text without what only a browser shows. A link to a page of help becomes its command."""
    return _LINK.sub(_link, text).replace("**", "")


def _link(match: re.Match[str]) -> str:
    words, target = match[1], match[2]
    page = Path(target.partition("#")[0]).stem
    place = f"`ling help {page}`" if (FOLDER / f"{page}.md").is_file() else target
    return place if words == target else f"{words} ({place})"


def _fill(text: str, width: int, later: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=later, break_on_hyphens=False)
