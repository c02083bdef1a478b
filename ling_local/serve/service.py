"""What all requests share: the engine and its slot, the model's name, what was said before."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from ling_local import __version__
from ling_local.engine.protocol import Engine, EngineInfo
from ling_local.errors import EngineDied, LingError, UsageError
from ling_local.generate import TextModel, check_prompt, generate
from ling_local.serve.errors import ApiError, retry_later, stopping
from ling_local.serve.memory import Memory
from ling_local.serve.shapes import Head
from ling_local.serve.slot import Slot, Ticket
from ling_local.serve.wire import Call
from ling_local.settings import Settings
from ling_local.types import Event, Finish, TokenEvent

_LOAD_RETRY_S = 2
_KEPT_CONTEXTS = 4  # as many ids are remembered as fill the context so many times


@dataclass(slots=True)
class Service:
    """The model that is served. `info` and `memory` are set once it is loaded.

    names     what a request may call the model; the first is what we call it
    say       writes a line to the log
    on_fatal  is told of a failure after which no request can succeed
    """

    engine: Engine
    text_model: TextModel
    settings: Settings
    names: tuple[str, ...]
    slot: Slot
    say: Callable[[str], None]
    on_fatal: Callable[[LingError], None] = field(default=lambda error: None)
    info: EngineInfo | None = None
    memory: Memory = field(default_factory=lambda: Memory(0))
    created: int = field(default_factory=lambda: int(time.time()))

    def loaded(self, info: EngineInfo) -> None:
        """The weights are in: requests are answered from now on."""
        self.memory = Memory(_KEPT_CONTEXTS * info.context_limit)
        self.info = info

    def ready(self) -> EngineInfo:
        """What is loaded. Raises ApiError while nothing is and when the server is stopping, EngineDied."""
        if self.slot.is_closed:
            raise stopping()
        if self.info is None:
            raise retry_later("the model is still loading", "loading", _LOAD_RETRY_S)
        return self.engine.info

    def head(self, call: Call) -> Head:
        """Name and number of the next answer."""
        kind = "chatcmpl" if call.is_chat else "cmpl"
        info = self.ready()
        fingerprint = f"ling-{__version__}-{info.dtype}-{info.device}"
        return Head(f"{kind}-{uuid.uuid4().hex}", int(time.time()), self.names[0], fingerprint, call.is_chat)

    async def prepare(self, call: Call) -> tuple[Call, tuple[int, ...]]:
        """The call with what its earlier turns were made of, and its ids.

        Raises ContextTooLong, UsageError, ModelError: before a place in the queue is taken.
        """
        prompt = call.request.prompt
        if not isinstance(prompt, str):
            call = replace(call, request=replace(call.request, prompt=self.memory.recall(prompt)))
        ids = await asyncio.to_thread(self.text_model.encode, call.request)  # takes time: not for the event loop
        check_prompt(ids, self.ready().context_limit)
        return call, tuple(ids)

    def failed(self, error: BaseException) -> None:
        """Write to the log what the client was told, and the trace of what nobody foresaw. The engine's end is ours."""
        if isinstance(error, EngineDied):
            self.on_fatal(error)
        elif isinstance(error, UsageError):
            return
        elif isinstance(error, LingError):
            self.say(f"ling: {error.message}")
        elif not isinstance(error, ApiError):
            self.say("".join(traceback.format_exception(error)).rstrip())

    async def run(self, call: Call, ids: Sequence[int], ticket: Ticket) -> AsyncIterator[TokenEvent | Finish | None]:
        """Events of a request that has the slot; None where nothing has come for some seconds.

        The pump runs in a thread of its own, which never waits for us; the slot is free as soon as the engine is,
        though the client may still be reading. Raises what generate raises.
        """
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event | BaseException] = asyncio.Queue()

        def hand_over(action: Callable[..., object], *args: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
                loop.call_soon_threadsafe(action, *args)

        def pump() -> None:
            try:
                for event in generate(self.engine, self.text_model, call.request, ticket.cancel, ids=ids):
                    if isinstance(event, TokenEvent | Finish):
                        hand_over(events.put_nowait, event)
            except BaseException as error:
                hand_over(events.put_nowait, error)
            finally:
                hand_over(self.slot.leave, ticket)

        ticket.is_pumped = True
        threading.Thread(target=pump, name="pump", daemon=True).start()
        while True:
            event = await _next(events)
            if isinstance(event, BaseException):
                raise event
            yield event
            if isinstance(event, Finish):
                return


QUIET_S = 10.0


async def _next(events: asyncio.Queue[Event | BaseException]) -> TokenEvent | Finish | BaseException | None:
    try:
        return events.get_nowait()  # most often one waits, and a timer costs more than it
    except asyncio.QueueEmpty:
        pass
    try:
        return await asyncio.wait_for(events.get(), QUIET_S)
    except TimeoutError:
        return None


def fresh_seed() -> int:
    """A seed for a request that names none."""
    return random.SystemRandom().getrandbits(31)
