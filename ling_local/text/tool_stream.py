"""Tool calls as they stream: the text of the channel TOOL in, names and pieces of JSON arguments out.

The joined pieces of a call are the arguments that `parse_tool_call` reads from its whole text, for any split. A value
that the schema declares as a string goes out as it comes; others wait for their end, since their type decides how they
are written. The work is linear in the text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from ling_local.text.channels import argument_types, read_value
from ling_local.text.clean import check_text
from ling_local.text.tags import CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END, held_length, pattern


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of call number `index`. name comes whole, with the first piece; is_last: the call is complete."""

    index: int
    name: str = ""
    arguments: str = ""
    is_last: bool = False


class _At(Enum):
    """Where in a call the text stands."""

    OUTSIDE = auto()
    NAME = auto()
    NAMELESS = auto()
    BETWEEN = auto()
    KEY = auto()
    AFTER_KEY = auto()
    VALUE = auto()


_TAGS = {
    _At.OUTSIDE: (CALL,),
    _At.NAME: (KEY, CALL_END),
    _At.NAMELESS: (CALL_END,),
    _At.BETWEEN: (KEY, CALL_END),
    _At.KEY: (KEY_END, CALL_END),
    _At.AFTER_KEY: (VALUE, KEY, CALL_END),
    _At.VALUE: (VALUE_END, "\n" + CALL_END, CALL_END),
}
_ALL = (CALL, "\n" + CALL_END, CALL_END, KEY, KEY_END, VALUE, VALUE_END)


class ToolStream:
    """Splits the text of tool calls as it streams in. `tools` are the JSON schemas that the prompt offered.

    A call without a name is no call: its text comes out as it is.
    """

    def __init__(self, tools: Sequence[str] = ()) -> None:
        self.num_calls = 0
        self._tools = tools
        self._at = _At.OUTSIDE
        self._held = ""  # may be the beginning of a tag
        self._parts: list[str] = []  # of the name, the key, or a value that waits for its end
        self._raw: list[str] = []  # of a call that has no name yet
        self._types: Mapping[str, Sequence[Any]] = {}
        self._key = ""
        self._num_arguments = 0
        self._streams = False  # the value at hand goes out as it comes

    def push(self, text: str) -> list[CallPiece | str]:
        """What is certain after this text, in order."""
        out: list[CallPiece | str] = []
        data, at = self._held + text, 0
        while (found := pattern(_TAGS[self._at]).search(data, at)) is not None:
            before = self._at
            self._plain(data[at : found.start()], out)
            if self._at is before:
                self._tag(found[0], out)
                at = found.end()
            else:  # the text changed where we are, and with it what counts as a tag
                at = found.start()
        # Text may move us on, to where other tags count; what is held back is held for those, too.
        keep = held_length(data, at, _ALL)
        self._plain(data[at : len(data) - keep], out)
        self._held = data[len(data) - keep :]
        return out

    def close(self, *, ended: bool) -> list[CallPiece | str]:
        """The rest at the end of the stream.

        ended: the model was done, and a call that it left open is closed for it. Else the limit cut it: its arguments
        stay as they are, so that nobody takes half a file for a whole one.
        """
        out: list[CallPiece | str] = []
        held, self._held = self._held, ""
        if self._at in (_At.OUTSIDE, _At.NAMELESS):
            self._plain(held, out)
        elif ended:
            self._plain(held.removesuffix("\n") if self._at is _At.VALUE else held, out)
            self._tag(CALL_END, out)
        elif self._at is _At.NAME:
            out.append("".join([*self._raw, held]))
        self._at = _At.OUTSIDE
        return out

    def _plain(self, text: str, out: list[CallPiece | str]) -> None:
        if not text:
            return
        match self._at:
            case _At.OUTSIDE:
                if not text.isspace():
                    out.append(text)
            case _At.NAMELESS:
                out.append(text)
            case _At.NAME:
                self._raw.append(text)
                text = text if self._parts else text.lstrip()
                if text:
                    self._parts.append(text)
                if any(map(str.isspace, text)):
                    self._named(out)
            case _At.KEY:
                self._parts.append(text)
            case _At.AFTER_KEY if not text.isspace():
                self._at = _At.BETWEEN  # a key that has no value of its own
            case _At.VALUE if self._streams:
                self._arguments(_escaped(text), out)
            case _At.VALUE:
                self._parts.append(text)

    def _tag(self, tag: str, out: list[CallPiece | str]) -> None:
        leave: Mapping[_At, Callable[[str, list[CallPiece | str]], None]] = {
            _At.OUTSIDE: self._begin,
            _At.NAME: self._leave_name,
            _At.NAMELESS: self._leave_nameless,
            _At.VALUE: self._leave_value,
        }
        if self._at in leave:
            leave[self._at](tag, out)
        elif tag == CALL_END:
            self._end(out)
        elif tag == KEY_END:
            self._key = "".join(self._parts).strip()
            self._at = _At.AFTER_KEY
        elif tag == VALUE:
            self._enter_value(out)
        else:
            self._parts = []
            self._at = _At.KEY

    def _begin(self, tag: str, out: list[CallPiece | str]) -> None:
        self._at, self._parts, self._raw, self._num_arguments = _At.NAME, [], [tag], 0

    def _named(self, out: list[CallPiece | str]) -> None:
        """The name is known: say it, and look for arguments."""
        name = "".join(self._parts).split()[0]
        self._types = argument_types(self._tools, name)
        out.append(CallPiece(self.num_calls, name))
        self.num_calls += 1
        self._at, self._raw = _At.BETWEEN, []

    def _leave_name(self, tag: str, out: list[CallPiece | str]) -> None:
        if self._parts:
            self._named(out)
            self._tag(tag, out)
        else:
            out.append("".join([*self._raw, tag]))
            self._at = _At.OUTSIDE if tag == CALL_END else _At.NAMELESS

    def _leave_nameless(self, tag: str, out: list[CallPiece | str]) -> None:
        out.append(tag)
        self._at = _At.OUTSIDE

    def _enter_value(self, out: list[CallPiece | str]) -> None:
        kinds = self._types.get(self._key, ())
        self._streams = "string" in kinds and "null" not in kinds
        lead = ("{", ", ")[self._num_arguments > 0] + json.dumps(self._key, ensure_ascii=False) + ": "
        self._arguments(lead + '"' * self._streams, out)
        self._num_arguments += 1
        self._at, self._parts = _At.VALUE, []

    def _leave_value(self, tag: str, out: list[CallPiece | str]) -> None:
        if self._streams:
            self._arguments('"', out)
        else:
            value = read_value("".join(self._parts), self._types.get(self._key, ()))
            self._arguments(check_text(json.dumps(value, ensure_ascii=False)), out)
        self._at = _At.BETWEEN
        if tag != VALUE_END:
            self._end(out)

    def _end(self, out: list[CallPiece | str]) -> None:
        closing = "}" if self._num_arguments else "{}"
        out.append(CallPiece(self.num_calls - 1, "", closing, True))
        self._at = _At.OUTSIDE

    def _arguments(self, text: str, out: list[CallPiece | str]) -> None:
        out.append(CallPiece(self.num_calls - 1, "", text))


def _escaped(text: str) -> str:
    """The inside of a JSON string; pieces may be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
