"""Markdown as lines for a terminal. What the model wrote is text: no tags, no entities, no escape codes, no links.

Prose is wrapped, code is not: its lines stand as they are, without a frame or blanks at their ends, and a line
that is too long is left to the terminal, so that what is copied is what was written. Line breaks inside a
paragraph stay. `Rendered` makes the lines for the width that it is printed at; print it with `crop=False`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text

from ling_local.text.clean import visible
from ling_local.tui.blocks import LITERAL_RULES, MAX_NESTING, Block, code_of, list_start, with_item_before
from ling_local.tui.code import highlight
from ling_local.tui.tables import table_lines
from ling_local.tui.wrap import wrap

if TYPE_CHECKING:  # reading the parser takes time, and the prompt shall stand at once
    from markdown_it import MarkdownIt
    from markdown_it.token import Token
    from markdown_it.tree import SyntaxTreeNode

MAX_INLINE = 50_000  # characters; a longer paragraph is shown as it was written
_MIN_WIDTH = 8  # inside quotes and lists in quotes, however narrow the terminal
_STYLES = {
    "strong": Style(bold=True),
    "em": Style(italic=True),
    "s": Style(strike=True),
    "code_inline": Style(color="cyan"),
    "link": Style(underline=True),
    "url": Style(dim=True),
    "h1": Style(bold=True, underline=True),
    "quote": Style(dim=True),
    "mark": Style(color="cyan", dim=True),
}


@dataclass(frozen=True, slots=True)
class Rendered:
    """A finished block for Rich."""

    block: Block

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.block.gap:
            yield Text()
        for line in render_lines(self.block, options.max_width):
            yield from line.render(console, end="\n")


def render_lines(block: Block, width: int) -> list[Text]:
    """The block's lines for a width in cells, without the gap before it. Only code may be wider."""
    if block.fence is not None:
        return highlight(code_of(block, block.fence), block.fence.language, block.before)
    source = block.text.strip("\n")
    if len(source) > MAX_INLINE and "\n" not in source:
        return wrap(Text(source), width)
    return _laid_out(block, width, every_gap=True)


def open_lines(block: Block, width: int) -> list[Text]:
    """The open block's lines: prose as it will look, a half fence or table as it was written."""
    block = replace(block, text=block.text.lstrip("\n"))
    return _laid_out(block, width, every_gap=False, as_written=("fence", "code_block", "table_open"))


def _laid_out(block: Block, width: int, every_gap: bool, as_written: Sequence[str] = ()) -> list[Text]:
    """Lines of what the parser finds in a block; its source where that holds a token of as_written, or is nested so
    deep that the parser leaves out what is inside."""
    from markdown_it.tree import SyntaxTreeNode

    source, added = with_item_before(block)
    tokens = _parser().parse(source)
    if any(token.level >= MAX_NESTING - 2 or token.type in as_written for token in tokens):
        return wrap(Text(block.text.rstrip("\n")), width)
    page = _Page(source.split("\n"), block.number, added)
    return page.children(SyntaxTreeNode(tokens), width, every_gap=every_gap)


@dataclass(frozen=True, slots=True)
class _Page:
    """Walks a syntax tree.

    source  the lines that were parsed; they say where blank lines were
    number  of the first item, where the first block is an ordered list
    added   items at the start of that list that are not shown
    """

    source: Sequence[str]
    number: int | None = None
    added: int = 0

    def children(self, node: SyntaxTreeNode, width: int, every_gap: bool = False) -> list[Text]:
        """Blocks one below the other. every_gap: a blank line between any two, else where the source has one."""
        lines: list[Text] = []
        for index, child in enumerate(node.children):
            if index and (every_gap or self._after_blank(child)):
                lines.append(Text())
            first = index == 0 and node.type == "root"
            lines += self._block(child, max(width, _MIN_WIDTH), first)
        return lines

    def _after_blank(self, node: SyntaxTreeNode) -> bool:
        at = node.map[0] if node.map else 0
        return at > 0 and not self.source[at - 1].strip(" \t>")

    def _block(self, node: SyntaxTreeNode, width: int, is_first: bool) -> list[Text]:
        match node.type:
            case "paragraph":
                return wrap(_inline(node), width)
            case "heading":
                text = _inline(node)
                text.stylize_before(_STYLES["h1"] if node.tag == "h1" else _STYLES["strong"])
                return wrap(text, width)
            case "fence":
                language = node.info.split()[0] if node.info.split() else ""
                return highlight(node.content, language)
            case "code_block":
                return highlight(node.content, "")
            case "hr":
                return [Text("─" * min(width, 40), _STYLES["url"])]
            case "blockquote":
                mark = Text.assemble(("│ ", _STYLES["quote"]))
                return _prefixed(self.children(node, width - 2), mark, mark)
            case "bullet_list" | "ordered_list":
                return self._list(node, width, is_first)
            case "table":
                return self._table(node, width)
        return wrap(Text(node.content), width)

    def _list(self, node: SyntaxTreeNode, width: int, is_first: bool) -> list[Text]:
        lines: list[Text] = []
        number = list_start(_opening(node))
        if is_first and number is not None and self.number is not None:
            number = self.number
        for index, item in enumerate(node.children[self.added if is_first else 0 :]):
            if index and self._after_blank(item):
                lines.append(Text())
            mark = Text.assemble((" • " if number is None else f" {number + index}. ", _STYLES["mark"]))
            body = self.children(item, width - len(mark)) or [Text()]
            lines += _prefixed(body, mark, Text(" " * len(mark)))
        return lines

    def _table(self, node: SyntaxTreeNode, width: int) -> list[Text]:
        rows = [row for part in node.children for row in part.children]
        cells = [[_inline(cell) for cell in row.children] for row in rows]
        aligns = [str(cell.attrs.get("style", "")).removeprefix("text-align:") for cell in rows[0].children]
        return table_lines(cells[0], cells[1:], aligns, width)


def _opening(node: SyntaxTreeNode) -> Token:
    if node.nester_tokens is None:
        raise TypeError(f"{node.type} has no opening token")
    return node.nester_tokens.opening


def _prefixed(lines: Sequence[Text], first: Text, others: Text) -> list[Text]:
    """The lines with something before each; a line that has nothing else ends where its prefix has its last mark."""
    result: list[Text] = []
    for index, line in enumerate(lines):
        whole = (others if index else first).copy()
        whole.append_text(line)
        if not line.plain:
            whole.rstrip()
        result.append(whole)
    return result


def _inline(node: SyntaxTreeNode) -> Text:
    """A paragraph's, heading's or cell's text with its styles."""
    text = Text()
    for child in node.children:
        tokens = child.token.children if child.type == "inline" and child.token else None
        _append(text, tokens or [])
    return text


def _append(text: Text, tokens: Sequence[Token]) -> None:
    styles: list[Style] = []
    links: list[tuple[str, int]] = []
    marks: list[str] = []
    for token in tokens:
        style = Style.combine([Style.null(), *styles])
        match token.type:
            case "text" | "text_special":
                text.append(token.content, style)
            case "code_inline":
                text.append(token.content, style + _STYLES["code_inline"])
            case "softbreak" | "hardbreak":
                text.append("\n")
            case "link_open":
                links.append((visible(str(token.attrs.get("href", ""))), len(text)))
                styles.append(_STYLES["link"])
            case "link_close":
                styles.pop()
                href, start = links.pop()
                if text.plain[start:] != href:  # where it leads is to be seen
                    text.append(f" ({href})", _STYLES["url"])
            case "image":
                text.append(f"{token.content} ({visible(str(token.attrs.get('src', '')))})", style)
            case _ if token.nesting == 1:
                is_mark = not _is_code_like(token, text.plain)
                marks.append("" if is_mark else token.markup)
                text.append(marks[-1], style)
                styles.append(_STYLES[token.type.removesuffix("_open")] if is_mark else Style.null())
            case _ if token.nesting == -1:
                styles.pop()
                text.append(marks.pop(), style)
            case _:
                text.append(token.content, style)


def _is_code_like(opening: Token, before: str) -> bool:
    """`__init__` and `2*3*4` mean themselves to a programmer."""
    return opening.markup == "__" or (opening.markup == "*" and before[-1:].isascii() and before[-1:].isalnum())


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"maxNesting": MAX_NESTING})
    parser.enable(["table", "strikethrough"]).disable(LITERAL_RULES)
    parser.normalizeLink = lambda url: url
    parser.normalizeLinkText = lambda url: url
    return parser
