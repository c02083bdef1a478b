"""Ids as they are made to text by channel, up to a stop: of a raw continuation, and of an assistant's turn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ling_local.text.channels import Channels
from ling_local.text.code_stop import CodeStop
from ling_local.text.stops import Stops
from ling_local.text.stream import StreamText
from ling_local.text.tags import CALL, CALL_END, KEY, KEY_END, THINK, THINK_END, VALUE, VALUE_END
from ling_local.types import Channel

if TYPE_CHECKING:  # tokenizers costs time
    from ling_local.text.tokenizer import Tokens

_TAGS = (THINK, THINK_END, CALL, CALL_END, KEY, KEY_END, VALUE, VALUE_END)  # of channels


class RawText:
    """Ids of a raw continuation to text: all of it answer, control tokens not shown."""

    channel = Channel.ANSWER

    def __init__(self, tokens: Tokens, stop: tuple[str, ...], code: str | None) -> None:
        """code: the prompt, where the end of the block that it left open is the end; `read_prompt` comes first."""
        self._tokens = tokens
        self._stream = StreamText()
        self._stops = Stops(stop)
        self._prompt = code
        self._code: CodeStop | None = None

    def read_prompt(self) -> None:
        """Takes a millisecond a kilobyte."""
        self._code = CodeStop(self._prompt) if self._prompt is not None else None

    @property
    def hit(self) -> bool:
        """A stop is complete; what follows it is not wanted."""
        return bool(self._stops.hit) or (self._code is not None and bool(self._code.hit))

    def push(self, token_id: int) -> list[tuple[Channel, str]]:
        if self._tokens.is_control(token_id):
            return []
        text = self._stops.push(self._stream.push(self._tokens.token_bytes(token_id)))
        return self._answer(self._code.push(text) if self._code else text)

    def close(self) -> list[tuple[Channel, str]]:
        """Text that still waited for what might follow."""
        text = self._stops.push(self._stream.close()) + self._stops.close()
        return self._answer(self._code.push(text) + self._code.close() if self._code else text)

    def _answer(self, text: str) -> list[tuple[Channel, str]]:
        return [(Channel.ANSWER, text)] if text else []


class ChatText:
    """Ids of an assistant turn to text by channel. Control tokens other than tags of channels are not shown.

    Stop strings are looked for in the answer only: thoughts and the arguments of a call are not the place
    where a person wants to end. After a tool call only more calls may follow; answer text there is the model
    playing the other side, and ends the turn.
    """

    def __init__(self, tokens: Tokens, stop: tuple[str, ...], channels: Channels) -> None:
        self._tokens = tokens
        self._tags = {tokens.control[tag] for tag in _TAGS if tag in tokens.control}
        self._stream = StreamText()
        self._channels = channels
        self._stop = stop
        self._stops = Stops(stop)
        self._last = channels.channel
        self._has_call = False
        self._over = False

    @property
    def channel(self) -> Channel:
        """Where text belongs now."""
        return self._channels.channel

    @property
    def hit(self) -> bool:
        return self._over or bool(self._stops.hit)

    def push(self, token_id: int) -> list[tuple[Channel, str]]:
        if self._tokens.is_control(token_id) and token_id not in self._tags:
            return []
        return self._sort(self._channels.push(self._stream.push(self._tokens.token_bytes(token_id))))

    def close(self) -> list[tuple[Channel, str]]:
        if self.hit:
            return []
        rest = self._sort([*self._channels.push(self._stream.close()), *self._channels.close()])
        return rest if self.hit else rest + self._answer(self._stops.close())

    def _sort(self, pieces: Iterable[tuple[Channel, str]]) -> list[tuple[Channel, str]]:
        result: list[tuple[Channel, str]] = []
        for channel, text in pieces:
            if channel is not Channel.ANSWER:
                if self._last is Channel.ANSWER:  # a stop string does not reach across a call
                    result += self._answer(self._stops.close())
                    self._stops = Stops(self._stop)
                self._has_call = self._has_call or channel is Channel.TOOL
                result.append((channel, text))
            elif not self._has_call:
                result += self._answer(self._stops.push(text))
            elif text.strip():
                self._over = True
            self._last = channel
            if self.hit:
                break
        return result

    def _answer(self, text: str) -> list[tuple[Channel, str]]:
        return [(Channel.ANSWER, text)] if text else []
