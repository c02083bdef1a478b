"""One answer as it comes: events of the pump sorted into content, reasoning and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from ling_local.text.tool_stream import CallPiece, ToolStream
from ling_local.types import Channel, FinishReason, TokenEvent, ToolCall


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer; one of the three is set. call_id comes with the first piece of a call."""

    content: str = ""
    reasoning: str = ""
    call: CallPiece | None = None
    call_id: str = ""


@dataclass(slots=True)
class MadeCall:
    """A tool call so far."""

    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Turn:
    """Collects an answer and says what each event adds to it.

    tools: the schemas offered. Without any, what looks like a call is content: nobody could take it otherwise.
    is_parallel False: the turn is over after one call, and `is_over` says so.
    """

    def __init__(self, tools: Sequence[str] = (), *, is_parallel: bool = True) -> None:
        self.is_over = False
        self.calls: list[MadeCall] = []
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._tools = ToolStream(tools) if tools else None
        self._is_parallel = is_parallel

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(ToolCall(call.name, "".join(call.arguments)) for call in self.calls)

    def take(self, event: TokenEvent) -> list[Delta]:
        """What this event adds."""
        if self.is_over or not event.text:
            return []
        if event.channel is Channel.THINKING:
            self._reasoning.append(event.text)
            return [Delta(reasoning=event.text)]
        if event.channel is Channel.TOOL and self._tools is not None:
            return self._sort(self._tools.push(event.text))
        return self._sort([event.text])

    def close(self, reason: FinishReason) -> list[Delta]:
        """What was still waiting when the answer ended."""
        if self._tools is None or self.is_over:
            return []
        return self._sort(self._tools.close(ended=reason in (FinishReason.EOS, FinishReason.STOP)))

    def finish_reason(self, reason: FinishReason) -> str:
        """Why it ended, in OpenAI's words."""
        if reason is FinishReason.LENGTH:
            return "length"
        return "tool_calls" if self.calls else "stop"

    def _sort(self, pieces: Sequence[CallPiece | str]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if isinstance(piece, str):
                self._content.append(piece)
                deltas.append(Delta(content=piece))
                continue
            call_id = ""
            if piece.name:
                call_id = f"call_{uuid.uuid4().hex[:24]}"
                self.calls.append(MadeCall(call_id, piece.name))
            self.calls[piece.index].arguments.append(piece.arguments)
            deltas.append(Delta(call=piece, call_id=call_id))
            if piece.is_last and not self._is_parallel:
                self.is_over = True
                break
        return deltas
