"""Lines that fit a width in cells. CJK breaks between any two characters, and nothing is torn inside a glyph."""

from __future__ import annotations

from rich.cells import cell_len, chop_cells, split_graphemes
from rich.text import Text

TAB = 4
_NOT_FIRST = frozenset("、。，．：；！？）］｝〉》」』】〕〗〙〟’”…‥ー々ゝゞ゛゜％!),.:;?]}%")
_NOT_LAST = frozenset("（［｛〈《「『【〔〖〘〝‘“([{")


def wrap(text: Text, width: int) -> list[Text]:
    """The text as lines of at most width cells, without blanks at their ends. Its own line ends stay.

    A word that is wider than a line is cut where the line is full. Lines joined with the blanks at which they
    were broken are the text.
    """
    if "\t" in text.plain:
        text = text.copy()
        text.expand_tabs(TAB)
    lines: list[Text] = []
    for line in text.split("\n", allow_blank=True):
        fits = cell_len(line.plain) <= width
        for part in [line] if fits else line.divide(_breaks(line.plain, width)):
            part.rstrip()
            lines.append(part)
    return lines


def fold(text: str, width: int) -> list[str]:
    """Text cut into lines of at most width cells, as a terminal does it: after the last glyph that fits."""
    lines: list[str] = []
    for line in text.expandtabs(TAB).split("\n"):
        lines += [part for part in chop_cells(line, max(width, 1)) if part] or [line]
    return lines


def clip(text: str, width: int) -> str:
    """The text's beginning that fits into width cells, with an ellipsis where something is missing."""
    if cell_len(text) <= width:
        return text
    kept = fold(text, width - 1)[0] if width > 1 else ""
    return kept + "…"


def _breaks(line: str, width: int) -> list[int]:
    """Where to cut one line, as indices into it."""
    cuts: list[int] = []
    start = cells = 0  # of the line under way: its first index, and its cells up to here
    can, cells_at_can = 0, 0  # the latest place in it where it may break
    last, last_size = "", 0
    for begin, end, size in split_graphemes(line)[0]:
        glyph = line[begin:end]
        if glyph != " ":
            if begin > start and _may_break(last, last_size, glyph, size):
                can, cells_at_can = begin, cells
            if cells + size > width and begin > start:
                if can > start:
                    cells -= cells_at_can
                    start = can
                else:
                    cells, start = 0, begin
                cuts.append(start)
        cells += size
        last, last_size = glyph, size
    return cuts


def _may_break(before: str, before_size: int, after: str, after_size: int) -> bool:
    if before == " ":
        return True
    wide = before_size == 2 or after_size == 2
    return wide and before not in _NOT_LAST and after not in _NOT_FIRST
