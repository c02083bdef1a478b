"""What the model said in earlier turns, so that a growing conversation goes on from the engine's state.

A client sends its whole conversation each time, and of an assistant's turn only text: mostly without the thinking,
and never with the ids. Where a turn comes back in the same place of the same conversation, it gets both back.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ling_local.types import Message, ToolCall


@dataclass(frozen=True, slots=True)
class _Said:
    reasoning: str
    ids: tuple[int, ...]


class Memory:
    """Turns of this server's own making. The oldest go when there are more than `max_ids` ids in all.

    Used in the event loop's thread only.
    """

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self._num_ids = 0
        self._turns: OrderedDict[bytes, _Said] = OrderedDict()

    def keep(self, before: Sequence[Message], turn: Message) -> None:
        """Remember a turn, with its reasoning and ids, that was made after those messages."""
        key = _key(_digest(before), turn)
        self._drop(key)
        self._turns[key] = _Said(turn.reasoning or "", turn.ids)
        self._num_ids += len(turn.ids)
        while self._num_ids > self._max_ids and self._turns:
            self._drop(next(iter(self._turns)))

    def recall(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The same messages; turns that were made here have their reasoning and ids again.

        A turn with another reasoning than it was made with is the client's own, and stays as it is.
        """
        recalled: list[Message] = []
        digest = hashlib.sha256()
        for message in messages:
            made = message
            if message.role == "assistant":
                key = _key(digest, message)
                said = self._turns.get(key)
                if said is not None and _same_thought(message.reasoning, said.reasoning):
                    self._turns.move_to_end(key)
                    made = replace(message, reasoning=said.reasoning or None, ids=said.ids)
            recalled.append(made)
            _add(digest, message)
        return tuple(recalled)

    def _drop(self, key: bytes) -> None:
        said = self._turns.pop(key, None)
        if said is not None:
            self._num_ids -= len(said.ids)


def _same_thought(given: str | None, said: str) -> bool:
    return given is None or given.strip("\n") == said.strip("\n")


def _digest(messages: Sequence[Message]) -> hashlib._Hash:
    digest = hashlib.sha256()
    for message in messages:
        _add(digest, message)
    return digest


def _add(digest: hashlib._Hash, message: Message) -> None:
    """Role, text and calls; the reasoning is left out, since clients leave it out, too."""
    calls = [(call.name, _canonical(call)) for call in message.tool_calls]
    digest.update(json.dumps([message.role, message.content, calls]).encode())


def _key(digest: hashlib._Hash, message: Message) -> bytes:
    at = digest.copy()
    _add(at, message)
    return at.digest()


def _canonical(call: ToolCall) -> str:
    """The arguments in one spelling: clients read them and write them anew."""
    try:
        return json.dumps(json.loads(call.arguments), sort_keys=True)
    except ValueError:
        return call.arguments
