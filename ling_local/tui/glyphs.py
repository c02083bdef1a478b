"""Glyphs of the screen for terminals that are not UTF-8: a codec error handler, so that nobody else has to ask."""

from __future__ import annotations

import codecs

from rich.cells import cell_len

HANDLER = "ling-glyphs"
_ASCII = str.maketrans(
    {
        "·": "-", "─": "-", "│": "|", "•": "*", "›": ">", "▸": ">", "→": ">", "…": "~",
        "▁": "0", "▂": "1", "▃": "2", "▄": "3", "▅": "4", "▆": "5", "▇": "6", "█": "#",
        "‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "-",
    }
)  # fmt: skip


def install() -> str:
    """Register the handler and return its name, for `stream.reconfigure(errors=...)`.

    What an encoding lacks becomes one ASCII character a cell: a look-alike where the screen draws the glyph
    itself, else a question mark, so that lines keep their width.
    """
    codecs.register_error(HANDLER, _replace)
    return HANDLER


def _replace(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_ASCII)
    return "".join(char if char.isascii() else "?" * cell_len(char) for char in text), error.end
