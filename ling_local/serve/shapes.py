"""Answers in OpenAI's shapes: whole documents, chunks of a stream, usage, the list of models. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ling_local.serve.turn import Delta, Turn
from ling_local.types import Stats

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Head:
    """What all chunks of one answer share."""

    answer_id: str
    created: int
    model: str
    fingerprint: str
    is_chat: bool

    def document(self, choice: Mapping[str, Any] | None, *, is_chunk: bool) -> dict[str, Any]:
        """A document with that choice; None: with no choice."""
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": [] if choice is None else [{"index": 0, "logprobs": None, **choice}],
        }

    def first(self) -> dict[str, Any]:
        """The chunk that says whose turn it is."""
        return self.document({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, is_chunk=True)

    def piece(self, delta: Delta) -> dict[str, Any]:
        """A chunk with a piece of the answer."""
        content = {"delta": _delta(delta)} if self.is_chat else {"text": delta.content}
        return self.document({**content, "finish_reason": None}, is_chunk=True)

    def last(self, finish_reason: str) -> dict[str, Any]:
        """The chunk that says why it ended."""
        content: dict[str, Any] = {"delta": {}} if self.is_chat else {"text": ""}
        return self.document({**content, "finish_reason": finish_reason}, is_chunk=True)

    def whole(self, turn: Turn, finish_reason: str, stats: Stats) -> dict[str, Any]:
        """The answer in one document."""
        content: dict[str, Any] = {"message": _message(turn)} if self.is_chat else {"text": turn.content}
        made = self.document({**content, "finish_reason": finish_reason}, is_chunk=False)
        return {**made, "usage": usage(stats)}


def _delta(delta: Delta) -> dict[str, Any]:
    if delta.call is None:
        return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}
    call: dict[str, Any] = {"index": delta.call.index, "function": {"arguments": delta.call.arguments}}
    if delta.call_id:
        call |= {"id": delta.call_id, "type": "function"}
        call["function"]["name"] = delta.call.name
    return {"tool_calls": [call]}


def _message(turn: Turn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": turn.content, "refusal": None}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["content"] = turn.content or None
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": said.arguments}}
            for call, said in zip(turn.calls, turn.tool_calls, strict=True)
        ]
    return message


def usage(stats: Stats) -> dict[str, Any]:
    """Token counts under OpenAI's names, and under `ling` the figures of speculation and of time."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.tokens,
        "total_tokens": stats.prompt_tokens + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": stats.thinking_tokens},
        "ling": {
            "steps": stats.steps,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "accept_length": None if stats.accept_length is None else round(stats.accept_length, 3),
            "prefill_ms": _ms(stats.prefill_s),
            "ttft_ms": _ms(stats.ttft_s),
            "tpot_ms": _ms(stats.tpot_s),
        },
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def model_entry(name: str, created: int, context_limit: int) -> dict[str, Any]:
    """The model in the list of models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "ling", "context_length": context_limit}


def event(document: Mapping[str, Any]) -> bytes:
    """A server-sent event. ASCII only: some clients take U+2028 and its like for the end of a line."""
    return b"data: " + json.dumps(document, ensure_ascii=True, allow_nan=False).encode("ascii") + b"\n\n"


def comment(text: str) -> bytes:
    """A line that clients skip; it shows a person, and every proxy between, that the connection lives."""
    return f": {text}\n\n".encode()
