"""The part of the screen that is drawn anew: a tail of a few lines, with finished text printed above it for good."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain

from rich.cells import cell_len
from rich.console import Console, ConsoleDimensions, ConsoleOptions, Group, RenderableType, RenderResult
from rich.control import Control
from rich.segment import ControlType, Segment
from rich.text import Text

_ERASE = (ControlType.ERASE_IN_LINE, 2)


class Pane:
    """Draws on a console. What it printed above stays; the tail is replaced by the next one.

    Everything of one `draw` is one write, so a terminal never shows half of it.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._widths: list[int] = []  # cells of each line of the tail that stands on the screen
        self.resize()

    def resize(self) -> tuple[int, int]:
        """Take the terminal's size as it is now; (columns, rows)."""
        try:
            size = os.get_terminal_size(self._console.file.fileno())
            columns, rows = size.columns or 80, size.lines or 24
        except (OSError, ValueError):
            columns, rows = 80, 24
        self._console.size = ConsoleDimensions(columns, rows)
        return columns, rows

    def draw(self, above: Sequence[RenderableType], tail: Sequence[Text] = ()) -> None:
        """Print `above` for good and put `tail`, cut to the screen, below it."""
        columns, rows = self.resize()
        options = self._console.options.update(width=columns, height=None)
        lines = self._console.render_lines(Group(*tail), options, pad=False)[: max(rows - 1, 1)] if tail else []
        if not above and not lines and not self._widths:
            return
        head = self._take_away(columns)
        body = chain.from_iterable(_with_break(line, last=line is lines[-1]) for line in lines)
        self._console.print(_Raw(head), Group(*above), _Raw(body), end="", crop=False)
        self._widths = [cell_len("".join(segment.text for segment in line)) for line in lines]

    def erase(self) -> None:
        """Take the tail away."""
        self.draw(())

    def forget(self) -> None:
        """The cursor is on a fresh line: something else has written to the screen."""
        self._widths = []

    def _take_away(self, columns: int) -> list[Segment]:
        """Back to where the tail began, with its lines blank. A narrower terminal has broken them in two."""
        if not self._widths:
            return []
        height = sum(max(-(-width // columns), 1) for width in self._widths)
        moves: list[ControlType | tuple[ControlType, int]] = [ControlType.CARRIAGE_RETURN, _ERASE]
        for _ in range(height - 1):
            moves += [(ControlType.CURSOR_UP, 1), _ERASE]
        return [Control(*moves).segment]


def _with_break(line: list[Segment], last: bool) -> Iterable[Segment]:
    return line if last else [*line, Segment.line()]


class _Raw:
    """Segments as they are."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._segments = segments

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments
