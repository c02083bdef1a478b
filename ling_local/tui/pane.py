"""The part of the screen that is drawn anew: a tail of a few lines, with finished text printed above it for good."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.control import Control
from rich.segment import ControlType
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
        lines = [line.copy() for line in tail[: max(rows - 1, 1)]]
        for line in lines:
            line.truncate(columns)
        if not above and not lines and not self._widths:
            return
        body = Text("\n").join(lines)
        self._console.print(
            self._take_away(columns), Group(*above), body, end="", crop=False, no_wrap=True, overflow="ignore"
        )
        self._widths = [line.cell_len for line in lines]

    def erase(self) -> None:
        """Take the tail away."""
        self.draw(())

    def forget(self) -> None:
        """The cursor is on a fresh line: something else has written to the screen."""
        self._widths = []

    def _take_away(self, columns: int) -> Control:
        """Back to where the tail began, with its lines blank. A narrower terminal has broken them in two."""
        if not self._widths:
            return Control()
        height = sum(max(-(-width // columns), 1) for width in self._widths)
        moves: list[ControlType | tuple[ControlType, int]] = [ControlType.CARRIAGE_RETURN, _ERASE]
        for _ in range(height - 1):
            moves += [(ControlType.CURSOR_UP, 1), _ERASE]
        return Control(*moves)
