"""What was said here is known again when it comes back, and nothing else is."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ling_local.serve.memory import Memory
from ling_local.serve.service import Service
from ling_local.serve.slot import Slot
from ling_local.serve.wire import Call
from ling_local.types import Message, Request, ToolCall

BEFORE = (Message("system", "be brief"), Message("user", "one"))
SAID = Message("assistant", "yes", "hm", (ToolCall("f", '{"a": 1, "b": [2]}'),), (1, 2, 3))
SENT = replace(SAID, reasoning=None, ids=())


@pytest.fixture
def memory() -> Memory:
    made = Memory(10)
    made.keep(BEFORE, SAID)
    return made


def test_a_turn_that_comes_back_gets_its_thinking_and_ids_again(memory: Memory) -> None:
    after = Message("tool", "done")
    assert memory.recall((*BEFORE, SENT, after)) == (*BEFORE, SAID, after)


def test_arguments_may_come_back_in_another_spelling(memory: Memory) -> None:
    respelt = replace(SENT, tool_calls=(ToolCall("f", '{"b":[2],"a":1}'),))
    assert memory.recall((*BEFORE, respelt))[2].ids == (1, 2, 3)


@pytest.mark.parametrize(
    "messages",
    [
        (*BEFORE, replace(SENT, content="yes ")),
        (*BEFORE, replace(SENT, tool_calls=())),
        (*BEFORE, replace(SENT, reasoning="another thought")),
        (*BEFORE, replace(SENT, reasoning="")),
        (BEFORE[0], Message("user", "two"), SENT),
        (BEFORE[1], SENT),
        (*BEFORE, Message("user", "more"), SENT),
        (*BEFORE, replace(SENT, role="user")),
    ],
)
def test_another_turn_or_another_place_gets_nothing(memory: Memory, messages: tuple[Message, ...]) -> None:
    assert memory.recall(messages) == messages


def test_a_client_that_keeps_the_thinking_gets_its_ids(memory: Memory) -> None:
    assert memory.recall((*BEFORE, replace(SENT, reasoning="\nhm\n")))[2].ids == (1, 2, 3)


def test_later_turns_are_found_behind_earlier_ones(memory: Memory) -> None:
    more = (*BEFORE, SENT, Message("user", "again"))
    memory.keep(memory.recall(more), replace(SAID, ids=(7,)))
    recalled = memory.recall((*more, SENT))
    assert [message.ids for message in recalled] == [(), (), (1, 2, 3), (), (7,)]


def test_the_oldest_turns_go_when_there_is_too_much(memory: Memory) -> None:
    for number in range(3):
        memory.keep((Message("user", str(number)),), replace(SAID, ids=(0,) * 4))
    assert memory.recall((*BEFORE, SENT))[2].ids == ()
    assert memory.recall((Message("user", "0"), SENT))[1].ids == ()
    assert memory.recall((Message("user", "1"), SENT))[1].ids == (0,) * 4
    memory.keep(BEFORE, replace(SAID, ids=(0,) * 11))  # more than there is room for: nothing is kept of it
    assert memory.recall((*BEFORE, SENT))[2].ids == ()


def test_a_turn_that_is_used_stays(memory: Memory) -> None:
    memory.keep((Message("user", "0"),), replace(SAID, ids=(0,) * 4))
    memory.recall((*BEFORE, SENT))
    memory.keep((Message("user", "1"),), replace(SAID, ids=(0,) * 4))
    assert memory.recall((*BEFORE, SENT))[2].ids == (1, 2, 3)
    assert memory.recall((Message("user", "0"), SENT))[1].ids == ()


def test_one_thread_looks_and_keeps_though_texts_are_encoded_in_another() -> None:
    """While a turn is looked up, none may be dropped."""
    threads: list[int] = []
    recalling = SimpleNamespace(recall=lambda messages: threads.append(threading.get_ident()) or messages)
    encoding: Any = SimpleNamespace(encode=lambda request: threads.append(threading.get_ident()) or [1])
    engine = SimpleNamespace(info=SimpleNamespace(context_limit=9))
    about: Any = {"engine": engine, "settings": {}, "say": None, "info": engine.info}
    service = Service(text_model=encoding, names=("m",), slot=Slot(1), memory=recalling, **about)
    asyncio.run(service.prepare(Call(Request(BEFORE), is_chat=True)))
    assert threads[0] == threading.get_ident() != threads[1]
