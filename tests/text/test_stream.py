"""Bytes to text: whole runes, no waiting for the impossible."""

from __future__ import annotations

from ling_local.text.stream import StreamText


def test_a_rune_over_two_tokens_appears_once_when_complete() -> None:  # C001
    stream = StreamText()
    assert stream.push(b"\xf0\x9f") == ""
    assert stream.push(b"\x8c\x8d!") == "🌍!"
    assert stream.close() == ""


def test_one_byte_at_a_time_gives_the_same_text() -> None:
    text = "日本語🙂 e\u0301"
    stream = StreamText()
    assert "".join(stream.push(bytes([byte])) for byte in text.encode()) == text
    assert stream.close() == ""


def test_impossible_bytes_do_not_wait() -> None:
    for data in (b"\xff", b"\xc0", b"\xf5", b"\x80"):
        assert StreamText().push(data) == "\ufffd"
    for first, second in ((b"\xe2", b"A"), (b"\xed", b"\xa0"), (b"\xf4", b"\x90"), (b"\xe0", b"\x80")):
        stream = StreamText()
        assert stream.push(first) == ""
        shown = stream.push(second)
        assert shown == (first + second).decode("utf-8", "replace")
        assert stream.close() == ""


def test_an_unfinished_rune_at_the_end_is_marked() -> None:
    stream = StreamText()
    assert stream.push(b"ok\xe2\x82") == "ok"
    assert stream.close() == "\ufffd"


def test_leading_spaces_and_newlines_are_kept() -> None:  # C005, C007
    stream = StreamText()
    assert [stream.push(piece) for piece in (b" ", b"\n    return", b" 1\n")] == [" ", "\n    return", " 1\n"]
