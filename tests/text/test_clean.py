"""The edges: bytes in, arguments in, text to a terminal."""

from __future__ import annotations

import pytest

from ling_local.errors import UsageError
from ling_local.text.clean import Newlines, check_text, read_text, visible


def test_plain_utf8_is_unchanged() -> None:
    cleaned = read_text("é 日本\n\tx \n".encode())
    assert (cleaned.text, cleaned.crlf, cleaned.warnings) == ("é 日本\n\tx \n", False, ())


def test_a_bom_is_dropped_once_and_only_at_the_start() -> None:
    assert read_text(b"\xef\xbb\xbfa\xef\xbb\xbfb").text == "a\ufeffb"


def test_crlf_becomes_lf_and_is_remembered() -> None:  # C015
    cleaned = read_text(b"def f():\r\n    return 1\r\n")
    assert cleaned.text == "def f():\n    return 1\n"
    assert cleaned.crlf
    assert not cleaned.warnings


def test_the_more_frequent_line_end_is_the_style_of_mixed_input() -> None:
    assert read_text(b"a\r\nb\r\nc\n").crlf
    assert not read_text(b"a\nb\nc\r\n").crlf
    assert read_text(b"a\nb\nc\r\n").text == "a\nb\nc\n"


def test_a_bare_cr_stays() -> None:
    assert read_text(b"50 %\r60 %").text == "50 %\r60 %"


def test_invalid_bytes_are_marked_counted_and_located() -> None:  # C013
    cleaned = read_text("a\ufffd".encode() + b"\xff\xfeb\xe2\x82", "notes.txt")
    assert cleaned.text == "a\ufffd\ufffd\ufffdb\ufffd"
    (warning,) = cleaned.warnings
    assert "notes.txt" in warning
    assert "3 places" in warning
    assert "byte offset 4" in warning


def test_offsets_count_from_the_first_byte_also_behind_a_bom() -> None:
    (warning,) = read_text(b"\xef\xbb\xbfab\xff").warnings
    assert "1 place," in warning
    assert "byte offset 5" in warning


def test_a_nul_byte_is_refused_with_its_offset() -> None:  # C013
    with pytest.raises(UsageError, match="NUL byte at offset 5") as caught:
        read_text(b"a\xff\xfeb\n\x00c")
    assert caught.value.exit_code == 2
    assert "UTF-8" in caught.value.hint


def test_utf16_input_is_told_how_to_become_utf8() -> None:
    with pytest.raises(UsageError) as caught:
        read_text("hello".encode("utf-16"))
    assert "iconv" in caught.value.hint


def test_binary_input_is_read_in_linear_time_and_counted() -> None:
    cleaned = read_text(b"\xff" * 300_000)
    assert cleaned.text == "\ufffd" * 300_000
    assert "300000 places" in cleaned.warnings[0]


@pytest.mark.parametrize("split", range(1, 8))
def test_output_goes_back_to_crlf_over_any_split(split: int) -> None:
    text = "a\nb\r\n\n\rc\n"
    newlines = Newlines(crlf=True)
    pieces = [text[i : i + split] for i in range(0, len(text), split)]
    assert "".join(map(newlines.push, pieces)) == "a\r\nb\r\n\r\n\rc\r\n"


def test_lf_output_passes_unchanged() -> None:
    assert Newlines(crlf=False).push("a\nb\r\n") == "a\nb\r\n"


def test_lone_surrogates_of_arguments_do_not_stay() -> None:
    assert check_text("plain é 🙂") == "plain é 🙂"
    assert check_text("a\udcff\udcfeb") == "a\ufffd\ufffdb"
    assert check_text("caf\udcc3\udca9") == "café"
    assert check_text("x\ud83dy\udcff") == "x\ufffdy\ufffd"


def test_control_sequences_become_visible() -> None:  # C039
    shown = visible("\x1b[2J\x1b]0;t\x07\x1bc\b\rx\x7f\x9b\x85")
    assert shown == "␛[2J␛]0;t␇␛c␈␍x␡<U+009B><U+0085>"


def test_direction_overrides_become_visible() -> None:
    assert visible("a\u202eb\u2066c\u200fd\u2028e") == "a<U+202E>b<U+2066>c<U+200F>d<U+2028>e"


def test_what_a_terminal_shows_anyway_is_unchanged() -> None:  # C035
    for text in ("tab\tand\nnewline", "[/INST] [/] [bold list[int] :smile:", "👩‍👩‍👧 e\u0301 日本", "<U+202E>"):
        assert visible(text) == text


def test_a_lone_surrogate_can_be_shown() -> None:
    assert visible("a\ud800").encode() == "a\ufffd".encode()
