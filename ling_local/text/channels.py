"""Thinking, answer and tool calls told apart in a stream of text; tool calls parsed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

from ling_local.errors import ModelError
from ling_local.text.clean import check_text
from ling_local.text.tags import (
    CALL,
    CALL_END,
    KEY,
    KEY_END,
    THINK,
    THINK_END,
    TURN_END,
    VALUE,
    VALUE_END,
    held_length,
    pattern,
)
from ling_local.types import Channel, Message, ToolCall

Pieces = list[tuple[Channel, str]]

# A newline before a call is the template's separator, so it goes with the call and not with the answer.
_OPENING = (CALL, "\n" + CALL)
_CLOSING = {Channel.THINKING: (THINK_END,), Channel.ANSWER: (), Channel.TOOL: (CALL_END,)}
_LEADING = (THINK, THINK_END)  # tags of an answer's very start: thinking opened or closed once more


class Channels:
    """Splits generated text as it streams in. The joined text of each channel is the same for any split.

    has_calls False: no tool was offered, so <tool_call> is text like any other; someone may have asked about it.

    Thinking ends at </think>, or at <tool_call> where the closing tag is missing; the answer's leading newlines
    after </think> are dropped, as the template does. Tool calls come with their tags and the blanks around
    them, piece by piece, in the channel TOOL; complete ones are in `calls`. Text after a call is answer. No
    text is lost but think tags and those newlines. <|role_end|> spelt out as the very last text ends the turn:
    it is not shown; followed by more text it is an ordinary quote.
    """

    def __init__(self, first: Channel, *, has_calls: bool = True) -> None:
        self._has_calls = has_calls
        self._channel = first
        self._held = ""  # a suffix of the stream that may be the beginning of a tag, shorter than the longest
        self._blank: list[str] = []  # blanks after a call: part of the calls, or of an answer that follows
        self._after_call = False
        self._fresh = first is Channel.ANSWER  # nothing but blanks in this answer yet
        self._strip = False  # drop newlines, since </think> was just read
        self._call: list[str] = []
        self._calls: list[str] = []

    @property
    def channel(self) -> Channel:
        """Where the next text belongs, as far as is known."""
        return self._channel

    @property
    def calls(self) -> tuple[str, ...]:
        """The text of each complete tool call so far, tags included."""
        return tuple(self._calls)

    def push(self, text: str) -> Pieces:
        """Pieces that are certain, in order; neighbours are of different channels, none is empty."""
        out: Pieces = []
        data, at = self._held + text, 0
        while True:
            tags = self._tags()
            found = pattern(tags).search(data, at)
            if found is None:
                break
            self._plain(data[at : found.start()], out)
            if self._tags() == tags:  # else the text before it ended the answer's start, where it was a tag
                self._tag(found[0], out)
                at = found.end()
            else:
                at = found.start()
        keep = held_length(data, at, (*self._tags(), TURN_END))
        self._plain(data[at : len(data) - keep], out)
        self._held = data[len(data) - keep :] if keep else ""
        return out

    def close(self) -> Pieces:
        """What was still held back, at the end of the stream."""
        out: Pieces = []
        held, self._held = self._held, ""
        if held != TURN_END:
            self._plain(held, out)
        self._add(Channel.TOOL, "".join(self._blank), out)
        self._blank.clear()
        return out

    def _tags(self) -> tuple[str, ...]:
        leading = _LEADING if self._channel is Channel.ANSWER and self._fresh else ()
        opening = _OPENING if self._has_calls and self._channel is not Channel.TOOL else ()
        return _CLOSING[self._channel] + opening + leading

    def _plain(self, text: str, out: Pieces) -> None:
        """Text without tags, into the channel at hand."""
        if self._strip:
            text = text.lstrip("\n")
            self._strip = not text
        if not text:
            return
        if self._channel is Channel.ANSWER:
            blank = text.isspace()
            if blank and self._after_call:
                self._blank.append(text)
                return
            self._fresh = self._fresh and blank
            if not blank:
                self._after_call = False
                text = "".join(self._blank) + text
                self._blank.clear()
        elif self._channel is Channel.TOOL:
            self._call.append(text)
        self._add(self._channel, text, out)

    def _tag(self, tag: str, out: Pieces) -> None:
        if self._strip:
            tag = tag.lstrip("\n")
            self._strip = False
        self._add(Channel.TOOL, "".join(self._blank), out)
        self._blank.clear()
        if tag == THINK:
            self._channel = Channel.THINKING
        elif tag == THINK_END:
            self._channel, self._strip = Channel.ANSWER, True
            self._fresh, self._after_call = False, False
        elif tag == CALL_END:
            self._add(Channel.TOOL, tag, out)
            self._calls.append("".join(self._call) + tag)
            self._call.clear()
            self._channel, self._after_call, self._fresh = Channel.ANSWER, True, True
        else:
            self._add(Channel.TOOL, tag, out)
            self._channel = Channel.TOOL
            self._call.append(CALL)

    @staticmethod
    def _add(channel: Channel, text: str, out: Pieces) -> None:
        if not text:
            return
        if out and out[-1][0] is channel:
            out[-1] = channel, out[-1][1] + text
        else:
            out.append((channel, text))


_NAME = re.compile(r"\s*(?:<tool_call>)?\s*(.*?)(?=\s|<arg_key>|</tool_call>|\Z)", re.DOTALL)


def parse_tool_call(text: str, tools: Sequence[str] = ()) -> ToolCall:
    """One call as the model wrote it, with or without its outer tags. ModelError where it has no name.

    tools are the JSON schemas that the prompt offered: a value whose type there is "string" stays text. Other
    values are decoded as JSON where they are JSON. A call that was cut off keeps the arguments it got.
    """
    head = _NAME.match(text)
    name = head[1] if head else ""
    if not name:
        raise ModelError("the model wrote a tool call without a name", "ask again, or rephrase the question")
    types = argument_types(tools, name)
    arguments: dict[str, Any] = {}
    at = head.end() if head else 0
    while (key_at := text.find(KEY, at)) >= 0:
        key, at = _until(text, key_at + len(KEY), KEY_END)
        value_at = text.find(VALUE, at)
        if value_at < 0 or text[at:value_at].strip():  # a key that has no value of its own
            continue
        value, at = _until(text, value_at + len(VALUE), VALUE_END)
        arguments[key.strip()] = read_value(value, types.get(key.strip(), ()))
    return ToolCall(check_text(name), check_text(json.dumps(arguments, ensure_ascii=False)))


def reads_as(text: str, first: Channel, turn: Message, tools: Sequence[str] = ()) -> Channel | None:
    """Where the text of a whole turn ends, if it says, as generated, what the message says: thinking, answer, calls."""
    channels = Channels(first, has_calls=bool(tools or turn.tool_calls))
    said = dict.fromkeys(Channel, "")
    for channel, piece in [*channels.push(text), *channels.close()]:
        said[channel] += piece
    if said[Channel.ANSWER] != turn.content:
        return None
    if said[Channel.THINKING].strip("\n") != (turn.reasoning or "").strip("\n"):
        return None
    try:
        calls = [parse_tool_call(call, tools) for call in channels.calls]
    except ModelError:
        return None
    if said[Channel.TOOL].count(CALL) != len(turn.tool_calls) or _meanings(calls) != _meanings(turn.tool_calls):
        return None
    return channels.channel


def _meanings(calls: Sequence[ToolCall]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


def _until(text: str, start: int, end: str) -> tuple[str, int]:
    """The text from start up to the end tag, and where it goes on; cut-off text runs to the call's end."""
    stop = text.find(end, start)
    if stop >= 0:
        return text[start:stop], stop + len(end)
    return text[start:].removesuffix(CALL_END).removesuffix("\n"), len(text)


def read_value(text: str, kinds: Sequence[Any]) -> Any:
    """An argument as the model wrote it, as its declared JSON types have it; text where it is nothing else."""
    if "string" in kinds and not ("null" in kinds and text.strip() == "null"):
        return text
    try:
        value = json.loads(text, parse_constant=_no_constant)
        json.dumps(value, allow_nan=False)  # 1e999 is read as infinity, which is no JSON
        return value
    except (ValueError, RecursionError):
        return text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def argument_types(tools: Sequence[str], name: str) -> Mapping[str, Sequence[Any]]:
    """Argument name -> declared types, from the schema of the tool with this name."""
    for tool in tools:
        schema = _schema(tool)
        function = schema.get("function", schema)
        if function.get("name") == name:
            fields = (function.get("parameters") or {}).get("properties")
            return {key: _kinds(field) for key, field in fields.items()} if isinstance(fields, dict) else {}
    return {}


@lru_cache(maxsize=256)
def _schema(tool: str) -> dict[str, Any]:
    return json.loads(tool)


def _kinds(field: Any) -> list[Any]:
    """The types that a schema allows; those of its alternatives where it has none itself, as for an optional text."""
    if not isinstance(field, dict):
        return []
    kinds = field.get("type")
    if kinds is None:
        choices = [field[key] for key in ("anyOf", "oneOf") if isinstance(field.get(key), list)]
        return [kind for choice in choices for option in choice for kind in _kinds(option)]
    return kinds if isinstance(kinds, list) else [kinds]
