"""The screen on terminals that are not UTF-8."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len

from ling_local.tui.glyphs import install
from ling_local.tui.model import StepMark
from ling_local.tui.view import quiet_line, strip


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_every_glyph_of_the_screen_has_a_look_alike(encoding: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=install())
    bars = strip([StepMark(12, accepted) for accepted in range(13)], 20).plain
    text = f"{bars} › ▸ → │ • ── 中文 … {quiet_line([], 80).plain}"
    file.write(text)
    file.flush()
    shown = file.buffer.getvalue().decode(encoding)
    assert cell_len(shown) == cell_len(text)
    assert shown.count("?") == 4  # two characters of two cells that no one can draw


def test_ascii_bars_count_up() -> None:
    assert "▁▂▄▇█".encode("ascii", install()) == b"0136#"


def test_text_that_the_encoding_has_is_left_alone() -> None:
    assert "a·b é".encode("latin-1", install()) == b"a\xb7b \xe9"


def test_bad_bytes_are_still_an_error() -> None:
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("utf-8", install())
