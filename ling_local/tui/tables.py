"""Tables as lines: columns by cells, and rows one below the other where the terminal is too narrow for columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from ling_local.tui.wrap import wrap

_GAP = "  "
_MIN_COLUMN = 6
_HEAD = Style(bold=True)
_RULE = Style(dim=True)


def table_lines(head: Sequence[Text], rows: Sequence[Sequence[Text]], aligns: Sequence[str], width: int) -> list[Text]:
    """A table of at most width cells, blanks at line ends left out. aligns: "left", "right", "center" or ""."""
    for cell in head:
        cell.stylize_before(_HEAD)
    table = [head, *rows]
    wanted = [max(_cell_width(row[column]) for row in table) for column in range(len(head))]
    widths = _shrunk(wanted, width - len(_GAP) * (len(head) - 1))
    if widths is None:
        return _stacked(head, rows, width)
    lines = _row(head, widths, aligns)
    lines.append(Text(_GAP.join("─" * size for size in widths), _RULE))
    for row in rows:
        lines += _row(row, widths, aligns)
    return lines


def _cell_width(cell: Text) -> int:
    return max((line.cell_len for line in cell.split("\n")), default=0)


def _shrunk(wanted: Sequence[int], room: int) -> list[int] | None:
    """Column widths whose sum fits; the widest give way first. None where columns would be too narrow to read."""
    if sum(wanted) <= room:
        return list(wanted)
    narrow = [min(size, _MIN_COLUMN) for size in wanted]
    if sum(narrow) > room:
        return None
    low, high = 0, max(wanted)
    while high - low > 1:  # the widest limit that fits
        limit = (low + high) // 2
        low, high = (limit, high) if sum(min(size, limit) for size in wanted) <= room else (low, limit)
    widths = [min(size, max(low, _MIN_COLUMN)) for size in wanted]
    left = room - sum(widths)
    for column, size in enumerate(wanted):
        if left > 0 and size > widths[column]:
            widths[column] += 1
            left -= 1
    return widths


def _row(row: Sequence[Text], widths: Sequence[int], aligns: Sequence[str]) -> list[Text]:
    columns = [wrap(cell, size) for cell, size in zip(row, widths, strict=True)]
    lines: list[Text] = []
    for index in range(max(map(len, columns), default=0)):
        line = Text()
        for column, (parts, size, align) in enumerate(zip(columns, widths, aligns, strict=True)):
            part = parts[index] if index < len(parts) else Text()
            blank = size - part.cell_len
            before = {"right": blank, "center": blank // 2}.get(align, 0)
            line.append((_GAP if column else "") + " " * before)
            line.append_text(part)
            line.append(" " * (blank - before))
        line.rstrip()
        lines.append(line)
    return lines


def _stacked(head: Sequence[Text], rows: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """One line a cell, `head: cell`, rows apart by a blank line."""
    lines: list[Text] = []
    for index, row in enumerate(rows):
        if index:
            lines.append(Text())
        for name, cell in zip(head, row, strict=True):
            lines += wrap(Text.assemble(name, ": ", cell) if name.plain else cell, width)
    return lines or [line for cell in head for line in wrap(cell, width)]
