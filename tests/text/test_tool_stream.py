"""Tool calls in pieces: for any split the same calls as `parse_tool_call` reads from the whole text."""

from __future__ import annotations

import json
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_local.text.channels import parse_tool_call
from ling_local.text.tool_stream import CallPiece, ToolStream

SCHEMA = json.dumps(
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "maybe": {"type": ["string", "null"]},
                    "perhaps": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                }
            },
        },
    }
)


def argument(key: str, value: str, gap: str = "") -> str:
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>{gap}"


def call(*arguments: str, name: str = "f") -> str:
    return f"<tool_call>{name}\n{''.join(arguments)}\n</tool_call>"


class Read:
    """What a stream gave, cut into pieces of some size."""

    def __init__(self, text: str, size: int, *, ended: bool = True) -> None:
        stream = ToolStream((SCHEMA,))
        given = [piece for i in range(0, len(text), size) for piece in stream.push(text[i : i + size])]
        self.given = given + stream.close(ended=ended)
        self.pieces = [piece for piece in self.given if isinstance(piece, CallPiece)]
        self.text = "".join(piece for piece in self.given if isinstance(piece, str))
        self.names = [piece.name for piece in self.pieces if piece.name]
        self.arguments = [
            "".join(piece.arguments for piece in self.pieces if piece.index == index)
            for index in range(len(self.names))
        ]
        self.done = {piece.index for piece in self.pieces if piece.is_last}


CASES = {
    "no arguments": call(),
    "no arguments, no newline": "<tool_call>f</tool_call>",
    "a text and a number": call(argument("text", "two\nlines "), argument("count", "3")),
    "newlines between arguments": call(argument("text", "a", "\n"), argument("count", "[1, 2]", " \n")),
    "quotes, backslashes and runes": call(argument("text", '"\\\n\t\x01 🌍 </arg> <arg_valu')),
    "a null that may be one": call(argument("maybe", "null"), argument("text", "null")),
    "an optional text that looks like a number": call(argument("perhaps", "12")),
    "an undeclared argument": call(argument("other", '{"a": [1, null]}'), argument("more", "plain")),
    "no number where one is declared": call(argument("count", "many")),
    "infinity is no JSON": call(argument("count", "1e999"), argument("other", "NaN")),
    "half of a rune, escaped": call(argument("other", '"\\ud83d"')),
    "blanks around the key": call(argument(" text ", " kept ")),
    "a key without a value": call("<arg_key>text</arg_key>", argument("count", "1")),
    "junk where a value should be": call("<arg_key>text</arg_key>junk<arg_value>x</arg_value>", argument("count", "1")),
    "a value that is not closed": call("<arg_key>text</arg_key>\n<arg_value>cut\n\n"),
    "a number that is not closed": call("<arg_key>count</arg_key>\n<arg_value>12"),
    "a key that is not closed": call("<arg_key>text"),
    "blanks before the name": "<tool_call>\n f \n" + argument("text", "x") + "\n</tool_call>",
    "words after the name": "<tool_call>f with words" + argument("text", "x") + "</tool_call>",
    "another function": call(argument("text", "12"), name="g"),
}


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_a_call_is_what_the_whole_text_says(name: str, size: int) -> None:
    read = Read(CASES[name], size)
    whole = parse_tool_call(CASES[name], (SCHEMA,))
    assert read.names == [whole.name]
    assert read.arguments == [whole.arguments]
    assert read.done == {0}
    assert read.text == ""


@given(st.text(alphabet='<>/arg_keyvlu"\\\n tolc', max_size=60), st.integers(1, 9))
def test_any_value_survives_any_split(value: str, size: int) -> None:
    text = call(argument("text", value), argument("count", value))
    if "</arg_value>" in value or "</tool_call>" in value:
        return
    read = Read(text, size)
    assert read.arguments == [parse_tool_call(text, (SCHEMA,)).arguments]
    assert json.loads(read.arguments[0])["text"] == value


@given(st.text(alphabet='<>/arg_keyvlu"\\\n tolc', max_size=80), st.integers(1, 9))
def test_whatever_stands_in_a_call_is_split_the_same(inside: str, size: int) -> None:
    text = f"<tool_call>{inside}</tool_call>"
    pieces, whole = Read(text, size), Read(text, len(text))
    assert (pieces.names, pieces.arguments, pieces.text) == (whole.names, whole.arguments, whole.text)
    assert all(isinstance(json.loads(arguments), dict) for arguments in pieces.arguments)


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_several_calls_are_numbered(size: int) -> None:
    read = Read(call(argument("text", "a")) + "\n\n" + call(argument("text", "b"), name="g") + "\n", size)
    assert read.names == ["f", "g"]
    assert read.arguments == ['{"text": "a"}', '{"text": "b"}']
    assert read.text == ""


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_call_without_a_name_comes_out_as_text(size: int) -> None:
    text = "<tool_call>\n<arg_key>a</arg_key></tool_call>"
    read = Read(text + "\n" + call(), size)
    assert read.text == text
    assert read.names == ["f"]


@pytest.mark.parametrize("size", [1, 6, 1000])
def test_a_call_that_the_limit_cut_is_not_made_whole(size: int) -> None:
    """Half a file must not look like a whole one."""
    read = Read("<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>half of", size, ended=False)
    assert read.arguments == ['{"text": "half of']
    assert read.done == set()
    assert Read("<tool_call>f", size, ended=False).names == []
    assert Read("<tool_call>f", size, ended=False).text == "<tool_call>f"


@pytest.mark.parametrize("size", [1, 6, 1000])
def test_a_call_that_the_model_left_open_is_closed(size: int) -> None:
    read = Read("<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>all of it", size, ended=True)
    assert read.arguments == ['{"text": "all of it"}']
    assert read.done == {0}
    assert Read("<tool_call>f", size).arguments == ["{}"]


def test_a_declared_text_goes_out_as_it_comes() -> None:
    stream = ToolStream((SCHEMA,))
    assert stream.push("<tool_call>f\n<arg") == [CallPiece(0, "f")]
    stream.push("_key>text</arg_key>\n<arg_value>")
    assert stream.push('say "a') == [CallPiece(0, "", 'say \\"a')]


def test_a_long_file_is_linear_work() -> None:
    """C161: a file write of 60 KiB in small pieces."""

    def cost(size: int) -> float:
        text = call(argument("text", "line of a file\n" * (size // 15)), argument("other", "word " * (size // 5)))
        begun = perf_counter()
        read = Read(text, 3)
        assert len(json.loads(read.arguments[0])["text"]) >= size - 15
        return perf_counter() - begun

    cost(1000)
    assert cost(60 * 1024) < 10 * 6 * cost(10 * 1024)
