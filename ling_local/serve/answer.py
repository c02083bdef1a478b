"""One request from the queue to the last byte: a whole answer or a stream, and an end within a step if it is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from ling_local.serve import shapes
from ling_local.serve.errors import from_exception, stopping
from ling_local.serve.service import QUIET_S, Service
from ling_local.serve.slot import Ticket
from ling_local.serve.turn import Turn
from ling_local.serve.wire import Call
from ling_local.types import Finish, FinishReason, Message, Stats

FIGURES, LEFT = "ling.figures", "ling.left"  # of the scope: for the log
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Answer:
    """An ASGI response. Nothing is begun before it is called."""

    def __init__(self, service: Service, call: Call, ids: Sequence[int]) -> None:
        self._service = service
        self._call = call
        self._ids = ids
        self._head = service.head(call)
        self._turn = Turn(call.request.tools, is_parallel=call.is_parallel)
        self._finish: Finish | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        slot = self._service.slot
        try:
            ticket = slot.enter()
        except Exception as error:
            await error_response(error)(scope, receive, send)
            return
        watcher = asyncio.create_task(_watch(receive, ticket))
        try:
            await (self._stream if self._call.streams else self._whole)(scope, receive, send, ticket)
        except _Left:
            scope[LEFT] = True
        finally:
            watcher.cancel()
            ticket.cancel.cancel()  # nothing where the answer is over; else its pump ends, and leaves the slot
            if not ticket.is_pumped:
                slot.leave(ticket)

    async def _whole(self, scope: Scope, receive: Receive, send: Send, ticket: Ticket) -> None:
        try:
            async for _ in self._in_queue(ticket):
                pass
            async for _ in self._deltas(ticket):
                pass
            response = Document(self._document())
        except _Left:
            raise
        except Exception as error:
            self._service.failed(error)
            response = error_response(error)
        self._note(scope)
        await response(scope, receive, send)

    async def _stream(self, scope: Scope, receive: Receive, send: Send, ticket: Ticket) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            async for position in self._in_queue(ticket):
                await write(shapes.comment(f"waiting, position {position}"))
            if self._call.is_chat:
                await write(self._event(self._head.first()))
            async for delta in self._deltas(ticket):
                chunk = shapes.comment("working") if delta is None else self._event(self._head.piece(delta))
                await write(chunk)
            assert self._finish is not None
            await write(self._event(self._head.last(self._turn.finish_reason(self._finish.reason))))
            if self._call.include_usage:
                end = self._head.document(None, is_chunk=True)
                await write(shapes.event({**end, "usage": shapes.usage(self._stats)}))
            await write(shapes.DONE)
        except _Left:
            raise
        except Exception as error:
            self._service.failed(error)
            await write(shapes.event(from_exception(error).body()))
        finally:
            self._note(scope)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _in_queue(self, ticket: Ticket) -> AsyncIterator[int]:
        """Positions while it waits, each time one changes and now and then; ends when it has the slot."""
        slot, told, told_s = self._service.slot, 0, 0.0
        clock = asyncio.get_running_loop().time
        while True:
            ticket.changed.clear()
            if ticket.has_left:
                raise _Left
            if slot.is_closed:
                raise stopping()
            position = slot.position(ticket)
            if position == 0:
                return
            if position != told or clock() - told_s >= QUIET_S:
                told, told_s = position, clock()
                yield position
                continue  # things may have changed while it was said
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ticket.changed.wait(), QUIET_S)

    async def _deltas(self, ticket: Ticket) -> AsyncIterator[shapes.Delta | None]:
        """What the answer is made of; None where nothing has come for some seconds. Leaves `_finish` behind."""
        async for event in self._service.run(self._call, self._ids, ticket):
            if event is None:
                yield None
                continue
            if isinstance(event, Finish):
                self._end(event, ticket)
                made = self._turn.close(event.reason)
            else:
                made = self._turn.take(event)
                if self._turn.is_over:
                    ticket.cancel.cancel()
            for delta in made:
                yield delta
        self._remember()

    def _end(self, finish: Finish, ticket: Ticket) -> None:
        self._finish = finish
        if finish.reason is FinishReason.CANCELLED and not self._turn.is_over:
            raise _Left if ticket.has_left else stopping()

    def _remember(self) -> None:
        """An agent sends this turn back with its next call."""
        finish, prompt = self._finish, self._call.request.prompt
        if finish is None or isinstance(prompt, str) or finish.reason is FinishReason.CANCELLED:
            return
        turn = self._turn
        said = Message("assistant", turn.content, turn.reasoning, turn.tool_calls, finish.ids)
        self._service.memory.keep(prompt, said)

    @property
    def _stats(self) -> Stats:
        return self._finish.stats if self._finish else Stats()

    def _document(self) -> dict[str, Any]:
        assert self._finish is not None
        return self._head.whole(self._turn, self._turn.finish_reason(self._finish.reason), self._stats)

    def _event(self, document: dict[str, Any]) -> bytes:
        """A chunk; where usage was asked for, all but the last say that theirs is still to come."""
        return shapes.event({**document, "usage": None} if self._call.include_usage else document)

    def _note(self, scope: Scope) -> None:
        if self._finish is not None:
            scope[FIGURES] = self._finish.stats


class _Left(Exception):
    """The client is gone: nobody is told anything."""


async def _watch(receive: Receive, ticket: Ticket) -> None:
    """Wait for the client to leave."""
    while (await receive())["type"] != "http.disconnect":
        pass
    ticket.leave()


class Document(JSONResponse):
    """A JSON document. Half of a surrogate pair, which JSON can spell and UTF-8 cannot, stays the escape it came as."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "backslashreplace")


def error_response(error: BaseException) -> Document:
    """A failure in OpenAI's shape."""
    told = from_exception(error)
    return Document(told.body(), told.status, told.headers)
