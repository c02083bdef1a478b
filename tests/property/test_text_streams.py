"""Any split of a stream gives the same text, stops, code end and channels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ling_local.text.channels import Channels
from ling_local.text.clean import Newlines, read_text, visible
from ling_local.text.code_stop import CodeStop
from ling_local.text.stops import Stops
from ling_local.text.stream import StreamText
from ling_local.types import Channel

TAGS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|role_end|>",
    "<arg_key>",
    "\n",
    "\n\n",
    " ",
    "<",
    "x<t",
]
CODE = [
    "def f(a):",
    "class A:",
    "if x:",
    "else:",
    "try:",
    "except E:",
    "return 1",
    "x = (",
    ")",
    "'''",
    '"',
    "#c",
    "\\",
]
CODE += ["\n", "\n", "\n    ", "\n        ", "\n\t", "\n\n\n", " ", "@d", "import os", ":", "[", "]", "it's", "\r\n"]

mixed = st.lists(st.sampled_from(TAGS) | st.text(max_size=4), max_size=25).map("".join)
code = st.lists(st.sampled_from(CODE), max_size=30).map("".join)
cuts = st.lists(st.integers(min_value=0, max_value=200), max_size=30)


def pieces(data: Any, at: Sequence[int]) -> list[Any]:
    """data cut at these places, empty pieces included."""
    edges = [0, *sorted(min(cut, len(data)) for cut in at), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def joined(stream: Any, parts: Sequence[Any]) -> str:
    return "".join(map(stream.push, parts)) + stream.close()


@given(st.binary(max_size=120), cuts)
def test_bytes_in_any_split_give_the_text_of_all_at_once(data: bytes, at: list[int]) -> None:
    assert joined(StreamText(), pieces(data, at)) == data.decode("utf-8", "replace")


@given(st.text(max_size=60), cuts)
def test_valid_text_survives_any_split_of_its_bytes(text: str, at: list[int]) -> None:
    assert joined(StreamText(), pieces(text.encode(), at)) == text


def test_two_thousand_splits_of_a_long_text_give_one_text() -> None:  # C003
    text = "日本語のテキスト🙂と👩‍👩‍👧、e\u0301 и ещё. " * 8
    data, rng = text.encode(), Random(3)
    for _ in range(2000):
        at = [rng.randrange(len(data)) for _ in range(rng.randrange(60))]
        assert joined(StreamText(), pieces(data, at)) == text


def _expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """The definition: of all occurrences the one that ends first, and of those the one that starts first."""
    ends = range(1, len(text) + 1)
    found = [(end, end - len(stop), stop) for stop in stops if stop for end in ends if text.endswith(stop, 0, end)]
    if not found:
        return text, None
    _, start, stop = min(found)
    return text[:start], stop


@given(st.lists(st.text("ab<", max_size=5), max_size=6), st.text("ab<", max_size=40), cuts)
def test_stops_cut_by_definition_in_any_split(stops: list[str], text: str, at: list[int]) -> None:
    ends = Stops(stops)
    shown = joined(ends, pieces(text, at))
    assert (shown, ends.hit) == _expected(stops, text)


@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.text("abc", max_size=40))
def test_stops_hold_back_no_more_than_could_become_one(stops: list[str], text: str) -> None:
    ends, shown = Stops(stops), 0
    for at, char in enumerate(text, 1):
        shown += len(ends.push(char))
        if ends.hit is not None:
            return
        held = text[shown:at]
        lengths = [n for n in range(at + 1) for stop in stops if n < len(stop) and stop.startswith(text[at - n : at])]
        assert len(held) == max(lengths)


@given(code, code, cuts)
@settings(max_examples=300)
def test_code_ends_at_the_same_place_in_any_split(prompt: str, text: str, at: list[int]) -> None:
    whole, split = CodeStop(prompt), CodeStop(prompt)
    expected = joined(whole, [text])
    assert joined(split, pieces(text, at)) == expected
    assert split.hit == whole.hit
    assert text.startswith(expected)
    assert whole.hit is not None or expected == text


@given(code, code)
def test_a_reader_that_stops_early_has_seen_a_prefix(prompt: str, text: str) -> None:
    stop, shown = CodeStop(prompt), ""
    final = joined(CodeStop(prompt), [text])
    for char in text:
        shown += stop.push(char)
        assert final.startswith(shown)


@given(st.lists(st.sampled_from(["One fine day", "it's (so", "he said:", "\n", "\n\n\n", 'and "then']), max_size=20))
def test_text_without_indentation_or_code_is_never_cut(parts: list[str]) -> None:
    text = "".join(parts)
    assert joined(CodeStop("Once upon a time"), [text]) == text


def _channels(first: Channel, parts: list[str]) -> tuple[list[tuple[Channel, str]], tuple[str, ...]]:
    channels = Channels(first)
    got = [piece for part in parts for piece in channels.push(part)] + channels.close()
    merged: list[tuple[Channel, str]] = []
    for channel, text in got:
        if merged and merged[-1][0] is channel:
            merged[-1] = channel, merged[-1][1] + text
        else:
            merged.append((channel, text))
    return merged, channels.calls


@given(st.sampled_from([Channel.THINKING, Channel.ANSWER]), mixed, cuts)
@settings(max_examples=400)
def test_channels_are_the_same_in_any_split(first: Channel, text: str, at: list[int]) -> None:
    whole = _channels(first, [text])
    assert _channels(first, pieces(text, at)) == whole
    assert _channels(first, list(text)) == whole


@given(st.sampled_from([Channel.THINKING, Channel.ANSWER]), mixed)
def test_channels_lose_nothing_but_think_tags_and_newlines(first: Channel, text: str) -> None:
    out, _ = _channels(first, [text])
    shown = "".join(piece for _, piece in out)
    kept = text.removesuffix("<|role_end|>")
    rest = iter(kept)
    assert all(char in rest for char in shown)  # in order
    lost = Counter(kept.replace("\n", "")) - Counter(shown.replace("\n", ""))
    closed, opened = lost["/"], lost["t"] - lost["/"]
    assert lost == Counter("</think>" * closed + "<think>" * opened)


@given(st.text("a\r\n", max_size=30), cuts)
def test_line_ends_go_back_in_any_split(text: str, at: list[int]) -> None:
    newlines = Newlines(crlf=True)
    out = "".join(map(newlines.push, pieces(text, at)))
    assert out == Newlines(crlf=True).push(text)
    assert out.replace("\r\n", "\n") == text.replace("\r\n", "\n")


@given(st.text(max_size=40))
def test_crlf_input_comes_back_as_it_was(text: str) -> None:
    lines = text.replace("\r", "").replace("\0", "").removeprefix("\ufeff") + "\n"
    cleaned = read_text(lines.replace("\n", "\r\n").encode())
    assert cleaned.text == lines
    assert Newlines(cleaned.crlf).push(cleaned.text) == lines.replace("\n", "\r\n")


@given(st.binary(max_size=60))
def test_any_bytes_are_text_or_a_clear_refusal(data: bytes) -> None:
    data = data.replace(b"\0", b"")
    cleaned = read_text(data)
    cleaned.text.encode()
    try:
        data.decode()
    except UnicodeDecodeError:
        assert cleaned.warnings
    else:
        assert not cleaned.warnings


@given(st.text(st.characters(), max_size=40), cuts)
def test_visible_text_is_the_same_in_any_split_and_safe(text: str, at: list[int]) -> None:
    shown = visible(text)
    assert "".join(map(visible, pieces(text, at))) == shown
    assert not [c for c in shown if (ord(c) < 32 and c not in "\t\n") or 127 <= ord(c) < 160]
