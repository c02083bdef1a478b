"""One request through the pump on a script, and what it gave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ling_local.engine.protocol import EngineSpec
from ling_local.engine.scripted import ScriptedEngine
from ling_local.generate import TextModel, generate
from ling_local.types import Channel, Event, Finish, FinishReason, Message, Request, TokenEvent

Write = Callable[..., Path]
EOS = {"control": "<|role_end|>"}
CHAT = (Message("user", "hi"),)


class Played:
    """What one request gave."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.tokens = [event for event in events if isinstance(event, TokenEvent)]
        self.finish = next((event for event in events if isinstance(event, Finish)), None)

    def text(self, channel: Channel = Channel.ANSWER) -> str:
        return "".join(event.text for event in self.tokens if event.channel is channel)

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token_id for event in self.tokens for token_id in event.ids)

    @property
    def reason(self) -> FinishReason:
        assert self.finish is not None
        return self.finish.reason


def opened(path: Path) -> tuple[ScriptedEngine, TextModel]:
    spec = EngineSpec(str(path), "scripted")
    return ScriptedEngine.load(spec), TextModel.load(spec)


def play(path: Path, prompt: str | tuple[Message, ...] = "go", **fields: Any) -> Played:
    engine, text_model = opened(path)
    return Played(list(generate(engine, text_model, Request(prompt, **fields))))
