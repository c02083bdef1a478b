"""Markdown to try the chat screen with, and how it comes apart into blocks."""

from __future__ import annotations

from hypothesis import strategies as st

from ling_local.tui.blocks import Block, Blocks, close, push
from ling_local.tui.markdown import render_lines

SOURCES = [
    "# Head\ntext under it\nand more\n\nnext\n",
    "- a\n- b\n  more\n\n  para\n- c\n\nend",
    "1. one\n2. two\n   ```py\n   x = 1\n\n   y = 2\n   ```\n3. three\n",
    "```python\ndef f():\n\n    return 1\n```\nafter",
    "````md\n```\ninner\n```\n````\nafter\n",
    "~~~\n```\nnot closed by ticks\n```\n~~~\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\ntext",
    "> quote\nlazy\n\n> another\n",
    "    indented\n\n    code\n\ntext",
    "title\n=====\nother\n---\n***\nlast",
    "\n\n  \nleading blanks\n\n\n\ntrailing\n\n",
    "* star\n- dash\n+ plus\n1) one\n2) two",
    "```\nnever closed\n\n",
    "# a | b\n|-|-|\n| 1 | 2 |\n",
    "# a | b\n# c\n\ntext\n# d | e\n|-|-|\n",
    "```a|b\n|-|-|\n| 1 | 2 |\n\n```\nafter\n```\n",
    "text\n\n\n\n```a|b\n|-|-|\n\n```\nafter\n```\n",
    "```a|b\ncode\n\nmore\n```\nafter\n",
    "10. |-|-|\n10. a | b\n|-|-|\n",
    "  - a\n   - b\n- c\n\n  d\n",
    "before\n| a |\n:---\n| 1 |\nafter\n\nend",
    "10. ten\n  lazy\n    inside\n\n    more\n\n  out\n11. next\n",
    "-\n  a\n-   b\n\n  c\n\n    d\n-      code\n  e\n",
    "",
    "\n",
]
PIECES = [
    "word", " ", "\n", "\n\n", "- ", "1. ", "2. ", "* ", "# ", "```", "````", "~~~", "py\n", "> ", "|", "---",
    "|-|-|\n", "    ", "  ", "\t", "**b**", "`c`", "中文", "👍🏽", "=", "a | b\n", "[x](y)", "<b>", "\\", "[a]: b\n",
    ":---\n", "| a |\n", "10. ", "\n  ", "\n    ",
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=60).map("".join)


def split(source: str, *cuts: int) -> list[Block]:
    """All blocks of the source, pushed in pieces that end at these indices."""
    blocks, done = Blocks(), []
    for start, end in zip((0, *cuts), (*cuts, len(source)), strict=True):
        blocks, some = push(blocks, source[start:end])
        done += some
    return [*done, *close(blocks)]


def one_by_one(source: str) -> list[Block]:
    return split(source, *range(1, len(source)))


def rendered(source: str, width: int = 80) -> list[str]:
    """The lines of a full render, without styles."""
    return [line.plain for line in render_lines(Block(source), width)]
