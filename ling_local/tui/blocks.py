"""Streamed Markdown cut into blocks that can be printed once and never touched again. Text only; no Rich.

markdown-it says where top-level blocks begin; a block is finished when the next one has begun, or earlier where
nothing can go on with it (a heading's line end, a fence's closing line, a blank line after a paragraph). Items
of a top-level list are blocks of their own, and a long fence is finished in parts, so that what is open stays
small. The source of all blocks, joined, is the text; where it was split while streaming makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from ling_local.tui.grown import Grown, newest_text

if TYPE_CHECKING:  # reading the parser takes time, and the prompt shall stand at once
    from markdown_it import MarkdownIt
    from markdown_it.token import Token

PART_LINES = 40  # of a fence; most that a model writes are shorter, and are coloured as a whole
CONTEXT_LINES = 300  # before a part, for the highlighter to know what is open: a string, a comment
MAX_NESTING = 20
_EAGER_LINES = 32  # up to here each line is looked at; from then on an eighth more lines each time: linear
# What could hide or change what the model wrote: tags vanish, entities may spell controls, references lose a line.
LITERAL_RULES = ("html_inline", "html_block", "entity", "autolink", "reference")
_FENCE = re.compile(r"( {0,3})(`{3,}|~{3,})")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_ENDED_BY_BLANK = ("paragraph_open", "table_open", "blockquote_open")
_MARKER = re.compile(r" {0,3}(?:[-+*]|\d{1,9}[.)])")
_ENDED_AT_ONCE = ("heading_open", "hr")


@dataclass(frozen=True, slots=True)
class Fence:
    """An open code fence. marker is its run of backticks or tildes, indent the blanks before it."""

    marker: str
    indent: int
    info: str

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info.split() else ""

    def is_closed_by(self, line: str) -> bool:
        """The line is the fence's end."""
        match = _FENCE.match(line)
        return bool(match) and match[2].startswith(self.marker) and not line[match.end() :].strip()

    def content(self, line: str) -> str:
        """A line of code without the fence's own indent."""
        blanks = len(line) - len(line.lstrip(" "))
        return line[min(blanks, self.indent) :]


@dataclass(frozen=True, slots=True)
class Block:
    """A finished block: its source, line ends included.

    gap      a blank line comes before it
    number   of an item of an ordered list; its own marker may say something else
    item     it goes on with a list; what its lines are depends on that: see `with_item_before`
    fence    set where the source goes on in a fence that an earlier block opened; before: code of that fence
             that came before, newest lines only
    """

    text: str
    gap: bool = False
    number: int | None = None
    item: bool = False
    fence: Fence | None = None
    before: str = ""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where a stream of Markdown stands. `push` and `close` take it further.

    lines   complete lines of the open block; rest: pieces of the line under way
    opened  gap, number, fence and before of the open block, its text being empty
    fence   the fence that the open block is, once that is known
    look_at number of lines at which to look for blocks again
    """

    lines: Grown[str] = field(default_factory=Grown)
    rest: Grown[str] = field(default_factory=Grown)
    opened: Block = Block("")
    fence: Fence | None = None
    look_at: int = 0

    @property
    def tail(self) -> str:
        """The source of the open block."""
        return "".join(self.lines) + "".join(self.rest)

    def newest(self, num_chars: int) -> str:
        """The tail's last characters, in time that does not depend on the tail's length."""
        line = newest_text(self.rest, num_chars)
        return newest_text(self.lines, num_chars - len(line)) + line


def push(blocks: Blocks, text: str) -> tuple[Blocks, tuple[Block, ...]]:
    """Take in text without carriage returns; gives what is finished by it. Blocks are the same for any split."""
    if "\n" not in text:
        return (replace(blocks, rest=blocks.rest.add(text)) if text else blocks), ()
    *lines, rest = ("".join(blocks.rest) + text).split("\n")
    done: list[Block] = []
    for line in lines:
        blocks, some = _take_line(blocks, line + "\n")
        done += some
    return replace(blocks, rest=Grown([rest] if rest else ())), tuple(done)


def close(blocks: Blocks) -> tuple[Block, ...]:
    """The stream is at its end: the blocks that were still open."""
    rest = "".join(blocks.rest)
    lines = [*blocks.lines, rest] if rest else list(blocks.lines)
    if blocks.fence:
        return (replace(blocks.opened, text="".join(lines)),) if lines else ()
    return tuple(found.block for found in _top_level(lines, blocks.opened))


@dataclass(frozen=True, slots=True)
class _Found:
    """A top-level block in lines[start:]; token is what begins it."""

    start: int
    block: Block
    token: Token


def _take_line(blocks: Blocks, line: str) -> tuple[Blocks, list[Block]]:
    lines = blocks.lines.add(line)
    blocks = replace(blocks, lines=lines)
    if blocks.fence:
        return _in_fence(blocks, blocks.fence, line)
    is_blank = not line.strip()
    if len(lines) < blocks.look_at and not (is_blank and len(lines) < 4 * _EAGER_LINES):
        return blocks, []
    found = _top_level(list(lines), blocks.opened)
    blocks = replace(blocks, look_at=len(lines) + (1 if len(lines) < _EAGER_LINES else len(lines) // 8))
    if not found:
        return blocks, []
    last = found[-1]
    done = [each.block for each in found[:-1]]
    is_new = not any(lines[n].strip() for n in range(last.start, len(lines) - 1))
    may_head_a_table = is_new and "|" in line
    if last.token.type == "fence" and not may_head_a_table:
        return _enter_fence(last, list(lines.after(last.start)), done)
    ended = last.token.type in _ENDED_AT_ONCE and not may_head_a_table
    if ended or (last.token.type in _ENDED_BY_BLANK and is_blank):
        return _AFTER_A_BLOCK, [*done, last.block]
    if not done:
        return blocks, []
    return Blocks(Grown(lines.after(last.start)), opened=replace(last.block, text="")), done


def _enter_fence(last: _Found, lines: list[str], done: list[Block]) -> tuple[Blocks, list[Block]]:
    """The last block is a fence. Its lines, which came before that was known, are taken in as in an open one."""
    at = next(index for index, line in enumerate(lines) if line.strip())
    match = _FENCE.match(lines[at])
    fence = Fence(last.token.markup, len(match[1]) if match else 0, last.token.info)
    blocks = Blocks(Grown(lines[: at + 1]), Grown(), replace(last.block, text=""), fence)
    for line in lines[at + 1 :]:
        blocks, some = _take_line(blocks, line)
        done += some
    return blocks, done


def _in_fence(blocks: Blocks, fence: Fence, line: str) -> tuple[Blocks, list[Block]]:
    if fence.is_closed_by(line):
        return _AFTER_A_BLOCK, [replace(blocks.opened, text="".join(blocks.lines))]
    if len(blocks.lines) <= PART_LINES:
        return blocks, []
    lines = list(blocks.lines)
    cut = _cut_at(lines)
    block = replace(blocks.opened, text="".join(lines[:cut]))
    before = _LINE.findall(block.before + code_of(block, fence))
    opened = Block("", fence=fence, before="".join(before[_context_start(before) :]))
    return Blocks(Grown(lines[cut:]), Grown(), opened, fence), [block]


def _context_start(lines: Sequence[str]) -> int:
    """Where context for the next part begins, so that it stays short: best at the margin, seldom inside a string."""
    start = max(len(lines) - CONTEXT_LINES, 0)
    at_margin = (n for n in range(start, len(lines)) if not lines[n][0].isspace() and not lines[n - 1].strip())
    return next(at_margin, start) if start else 0


def code_of(block: Block, fence: Fence) -> str:
    """The code in the source of a fence or of a part of one: without the lines that open and close it."""
    lines = _LINE.findall(block.text)
    if block.fence is None:
        at = next((index for index, line in enumerate(lines) if line.strip()), 0)
        lines = lines[at + 1 :]
    if lines and fence.is_closed_by(lines[-1]):
        lines.pop()
    return "".join(fence.content(line) for line in lines)


def _cut_at(lines: Sequence[str]) -> int:
    """Where a long fence is best cut: before the last line that starts at the margin after a blank one."""
    after_blank = [n for n in range(len(lines) // 2, len(lines)) if lines[n].strip() and not lines[n - 1].strip()]
    at_margin = [n for n in after_blank if not lines[n][0].isspace()]
    return max(at_margin or after_blank or [len(lines)])


def _top_level(lines: Sequence[str], opened: Block) -> list[_Found]:
    """The top-level blocks in these lines, list items one by one; opened says what is known of the first one."""
    found: list[_Found] = []
    source, added = with_item_before(replace(opened, text="".join(lines)))
    first_number = None if opened.number is None else opened.number - added
    starts = [*_starts(_parser().parse(source), first_number)][added:]
    for index, (token, number, goes_on) in enumerate(starts):
        start = token.map[0] - added if index and token.map else 0
        after = starts[index + 1][0].map if index + 1 < len(starts) else None
        text = "".join(lines[start : after[0] - added if after else len(lines)])
        gap = opened.gap if index == 0 else not (goes_on and lines[start - 1].strip())
        found.append(_Found(start, Block(text, gap, number, goes_on), token))
    return found


def with_item_before(block: Block) -> tuple[str, int]:
    """The source to parse, and how many lines (and items) of it are none of the block's.

    An item that goes on with a list gets another one before it: alone, its first line might begin a table.
    """
    marker = _MARKER.match(block.text) if block.item else None
    return (f"{marker[0]} x\n{block.text}", 1) if marker else (block.text, 0)


def _starts(tokens: Sequence[Token], first_number: int | None) -> Iterator[tuple[Token, int | None, bool]]:
    """What begins a block: its token, its number in an ordered list, and whether it goes on with a list."""
    number: int | None = None
    goes_on = False
    for token in tokens:
        if token.level == 0 and token.type in ("bullet_list_open", "ordered_list_open"):
            number, goes_on = list_start(token), False
            if token is tokens[0] and first_number is not None:
                number = first_number
        elif token.level == 0 and token.nesting >= 0:
            yield token, None, False
        elif token.level == 1 and token.type == "list_item_open":
            yield token, number, goes_on
            number, goes_on = (None if number is None else number + 1), True


def list_start(token: Token) -> int | None:
    """The number of a list's first item; None where it has bullets."""
    return int(token.attrs.get("start", 1)) if token.type == "ordered_list_open" else None


def code_blocks(markdown: str) -> list[str]:
    """What stands in the fences of a text, in lists and quotes as well, each as it was meant: without their indent."""
    return [token.content for token in _parser().parse(markdown) if token.type == "fence"]


@lru_cache(maxsize=1)
def _parser() -> MarkdownIt:
    """A parser for the blocks only."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"maxNesting": MAX_NESTING}).enable("table").disable(LITERAL_RULES)
    parser.core.ruler.enableOnly(["normalize", "block"])
    return parser


_AFTER_A_BLOCK = Blocks(opened=Block("", gap=True))
