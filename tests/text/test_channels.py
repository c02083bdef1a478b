"""Thinking, answer and tool calls in a stream; tool calls parsed."""

from __future__ import annotations

import json
from time import perf_counter

import pytest

from ling_local.errors import ModelError
from ling_local.text.channels import Channels, parse_tool_call
from ling_local.types import Channel, ToolCall

THINKING, ANSWER, TOOL = Channel.THINKING, Channel.ANSWER, Channel.TOOL
CALL = "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"
END = "<|role_end|>"


def _split(first: Channel, text: str, size: int) -> list[tuple[Channel, str]]:
    channels = Channels(first)
    pieces = [p for i in range(0, len(text), size) for p in channels.push(text[i : i + size])]
    pieces += channels.close()
    merged: list[tuple[Channel, str]] = []
    for channel, piece in pieces:
        assert piece
        if merged and merged[-1][0] is channel:
            merged[-1] = channel, merged[-1][1] + piece
        else:
            merged.append((channel, piece))
    return merged


CASES = {
    "thinking, then answer": (THINKING, "\nhm\n</think>\n\nyes", [(THINKING, "\nhm\n"), (ANSWER, "yes")]),
    "no thinking": (ANSWER, "\n yes </b>", [(ANSWER, "\n yes </b>")]),
    "empty thinking": (THINKING, "</think>yes\n", [(ANSWER, "yes\n")]),
    "cut in thinking": (THINKING, "hm</thi", [(THINKING, "hm</thi")]),
    "only leading newlines are dropped": (THINKING, "a</think>\n \nb", [(THINKING, "a"), (ANSWER, " \nb")]),
    "answer and call": (ANSWER, "wait\n" + CALL, [(ANSWER, "wait"), (TOOL, "\n" + CALL)]),
    "two calls": (ANSWER, CALL + "\n" + CALL, [(TOOL, CALL + "\n" + CALL)]),
    "calls with any blanks between": (ANSWER, CALL + " \n\n" + CALL + "\n", [(TOOL, CALL + " \n\n" + CALL + "\n")]),
    "text after a call": (ANSWER, CALL + "\n\nso", [(TOOL, CALL), (ANSWER, "\n\nso")]),
    "call in open thinking": (THINKING, "hm" + CALL, [(THINKING, "hm"), (TOOL, CALL)]),  # C157
    "thinking closed after its call": (
        THINKING,
        "hm" + CALL + "</think>\nok",
        [(THINKING, "hm"), (TOOL, CALL), (ANSWER, "ok")],
    ),
    "call right after thinking": (THINKING, "a</think>\n" + CALL, [(THINKING, "a"), (TOOL, CALL)]),
    "thinking opened by the model": (ANSWER, "<think>hm</think>yes", [(THINKING, "hm"), (ANSWER, "yes")]),
    "think tags in the middle are text": (ANSWER, "use <think>x</think>", [(ANSWER, "use <think>x</think>")]),
    "an unfinished call": (ANSWER, "<tool_call>f\n<arg", [(TOOL, "<tool_call>f\n<arg")]),
    "the end spelt out": (ANSWER, "yes" + END, [(ANSWER, "yes")]),  # C159
    "the end spelt out in thinking": (THINKING, "hm" + END, [(THINKING, "hm")]),
    "the end spelt out after a call": (ANSWER, CALL + END, [(TOOL, CALL)]),
    "a quoted end is kept": (ANSWER, f"`{END}` ends\n{END} it", [(ANSWER, f"`{END}` ends\n{END} it")]),
    "a part of the end is kept": (ANSWER, "yes<|role_en", [(ANSWER, "yes<|role_en")]),
    "nothing": (THINKING, "", []),
    "markup stays": (ANSWER, "[/INST] <b> List<int> :smile: <", [(ANSWER, "[/INST] <b> List<int> :smile: <")]),
    "nested starts": (ANSWER, "<<tool_call><\n<tool_call>x", [(ANSWER, "<"), (TOOL, "<tool_call><\n<tool_call>x")]),
    "other newlines stay": (ANSWER, "a\n\n\n" + CALL, [(ANSWER, "a\n\n"), (TOOL, "\n" + CALL)]),
}


@pytest.mark.parametrize("name", CASES)
def test_channels_are_told_apart_for_any_split(name: str) -> None:
    first, text, expected = CASES[name]
    for size in (1, 2, 3, 5, 8, 13, 1000):
        assert _split(first, text, size) == expected


def test_only_what_may_be_a_tag_is_held_back() -> None:
    channels = Channels(ANSWER)
    assert channels.push("a <") == [(ANSWER, "a ")]
    assert channels.push("b") == [(ANSWER, "<b")]
    assert channels.push("\n") == []
    assert channels.push("c<|role_end") == [(ANSWER, "\nc")]
    assert channels.push("|>") == []
    assert channels.push(" d") == [(ANSWER, "<|role_end|> d")]


def test_tool_calls_stream_as_they_are_made_and_are_collected() -> None:
    channels = Channels(THINKING)
    assert channels.push("hm<tool_call>f\n<arg_key>a</arg_key>") == [
        (THINKING, "hm"),
        (TOOL, "<tool_call>f\n<arg_key>a</arg_key>"),
    ]
    assert channels.calls == ()
    assert channels.channel is TOOL
    channels.push("<arg_value>1</arg_value></tool_call>\n")
    assert [parse_tool_call(call) for call in channels.calls] == [ToolCall("f", '{"a": 1}')]
    channels.push(CALL)
    assert len(channels.calls) == 2
    assert channels.calls[1] == CALL


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        (CALL, "f", {"a": 1}),
        ("now\n\n", "now", {}),
        ("<tool_call>now</tool_call>", "now", {}),
        ("<tool_call>\n now \n</tool_call>", "now", {}),
        ("f<arg_key>a</arg_key><arg_value>x</arg_value>", "f", {"a": "x"}),
        (
            "f\n<arg_key>a</arg_key>\n\n <arg_value>1</arg_value>\n<arg_key>b</arg_key><arg_value>2</arg_value>",
            "f",
            {"a": 1, "b": 2},
        ),
        ("f<arg_key>a</arg_key><arg_value>\n  two\nlines\n</arg_value>", "f", {"a": "\n  two\nlines\n"}),
        ("f<arg_key>a</arg_key><arg_value></arg_value>", "f", {"a": ""}),
        ('f<arg_key>a</arg_key><arg_value>[1, {"k": "é"}]</arg_value>', "f", {"a": [1, {"k": "é"}]}),
        ("f<arg_key>a</arg_key><arg_value>null</arg_value>", "f", {"a": None}),
        ('f<arg_key>a</arg_key><arg_value>"q"</arg_value>', "f", {"a": "q"}),
        ("f<arg_key>a</arg_key><arg_value>NaN</arg_value>", "f", {"a": "NaN"}),
        ("f<arg_key>a</arg_key><arg_value><arg_key>b</arg_value>", "f", {"a": "<arg_key>b"}),
        ("f<arg_key>a</arg_key><arg_value>cut off", "f", {"a": "cut off"}),
        ("f<arg_key>a</arg_key><arg_value>no end\n</tool_call>", "f", {"a": "no end"}),
        ("f<arg_key>none</arg_key><arg_key>b</arg_key><arg_value>2</arg_value>", "f", {"b": 2}),
        ("f<arg_key>cut", "f", {}),
        ("f<arg_key>a</arg_key><arg_value>" + "[" * 100_000 + "</arg_value>", "f", {"a": "[" * 100_000}),
        ("f<arg_key>a</arg_key><arg_value>" + "9" * 5000 + "</arg_value>", "f", {"a": "9" * 5000}),
    ],
)
def test_tool_calls_are_parsed(text: str, name: str, arguments: dict[str, object]) -> None:
    call = parse_tool_call(text)
    assert call.name == name
    assert json.loads(call.arguments) == arguments


def test_a_schema_that_says_string_keeps_the_text() -> None:
    fields = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": ["string", "null"]}}
    tool = {"name": "f", "parameters": {"type": "object", "properties": fields}}
    text = "f" + "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in (("a", 1), ("b", 2), ("c", 3)))
    for schema in (tool, {"type": "function", "function": tool}):
        call = parse_tool_call(text, [json.dumps({"name": "other"}), json.dumps(schema)])
        assert json.loads(call.arguments) == {"a": "1", "b": 2, "c": "3"}
    null = parse_tool_call("f<arg_key>c</arg_key><arg_value>null</arg_value>", [json.dumps(tool)])
    assert json.loads(null.arguments) == {"c": None}


@pytest.mark.parametrize(
    ("fields", "value"),
    [
        ({"a": {"anyOf": [{"type": "string"}, {"type": "null"}]}}, "123"),  # an optional text, as pydantic writes it
        ({"a": {"oneOf": [{"type": ["string", "null"]}]}}, "123"),
        ({"a": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, 123),
        ({"a": {"anyOf": "string"}}, 123),
        ({"a": True}, 123),
        (["a"], 123),
    ],
)
def test_types_are_found_where_a_schema_has_them(fields: object, value: object) -> None:
    schema = json.dumps({"name": "f", "parameters": {"properties": fields}})
    call = parse_tool_call("f<arg_key>a</arg_key><arg_value>123</arg_value>", [schema])
    assert json.loads(call.arguments) == {"a": value}


@pytest.mark.parametrize("text", ["", "<tool_call></tool_call>", "\n<arg_key>a</arg_key><arg_value>1</arg_value>"])
def test_a_call_without_a_name_is_an_error(text: str) -> None:
    with pytest.raises(ModelError, match="without a name"):
        parse_tool_call(text)


def test_lone_surrogates_in_arguments_do_not_stay() -> None:
    call = parse_tool_call('f<arg_key>a</arg_key><arg_value>"\\ud800"</arg_value>')
    call.arguments.encode()


def test_a_long_tool_argument_is_complete_and_takes_linear_time() -> None:  # C161
    def turn(size: int) -> float:
        body = ("line <b> of \\n a file\n" * (size // 20 + 1))[:size]
        text = f"hm<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{body}</arg_value>\n</tool_call>"
        began = perf_counter()
        channels = Channels(THINKING)
        shown = 0
        for i in range(0, len(text), 3):
            shown += sum(len(piece) for _, piece in channels.push(text[i : i + 3]))
            assert shown >= i - 12  # incremental: never more than a tag behind
        channels.close()
        (call,) = channels.calls
        assert json.loads(parse_tool_call(call).arguments) == {"text": body}
        return perf_counter() - began

    assert len([turn(60 * 1024) for _ in range(6)]) == 6
    short = min(turn(15 * 1024) for _ in range(3))
    assert min(turn(120 * 1024) for _ in range(2)) < 8 * 4 * short + 0.05
