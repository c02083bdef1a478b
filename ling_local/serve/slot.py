"""One slot and the queue before it. All of it runs in the event loop's thread."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque

from ling_local.generate import CancelToken
from ling_local.serve.errors import ApiError, retry_later, stopping

_MAX_RETRY_S = 60
_FIRST_GUESS_S = 2.0


class Ticket:
    """A request's place. `changed` is set when it moves up, when its client leaves and when the server stops.

    is_pumped: its pump runs, or has run; the pump leaves the slot when the engine is free.
    """

    def __init__(self) -> None:
        self.cancel = CancelToken()
        self.changed = asyncio.Event()
        self.has_left = False
        self.is_pumped = False

    def leave(self) -> None:
        """The client is gone: a running answer ends within a step."""
        self.has_left = True
        self.cancel.cancel()
        self.changed.set()


class Slot:
    """Who is answered, and who waits. At most `bound` requests wait; the next one is refused."""

    def __init__(self, bound: int) -> None:
        self.is_closed = False
        self._bound = bound
        self._running: Ticket | None = None
        self._since_s = 0.0
        self._mean_s: float | None = None
        self._waiting: deque[Ticket] = deque()

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def enter(self) -> Ticket:
        """A place at the end of the queue, or the slot itself. Raises ApiError: 429 where the queue is full."""
        if self.is_closed:
            raise stopping()
        if self._running is not None and len(self._waiting) >= self._bound:
            raise self._refusal()
        ticket = Ticket()
        self._waiting.append(ticket)
        self._advance()
        return ticket

    def position(self, ticket: Ticket) -> int:
        """0: it is being answered; 1: it is next."""
        return 0 if ticket is self._running else self._waiting.index(ticket) + 1

    def leave(self, ticket: Ticket) -> None:
        """Give up a place in the queue, or the slot; nothing where it has neither any more."""
        if ticket is self._running:
            took_s = time.monotonic() - self._since_s
            self._mean_s = took_s if self._mean_s is None else (3 * self._mean_s + took_s) / 4
            self._running = None
        elif ticket in self._waiting:
            self._waiting.remove(ticket)
        self._advance()

    def close(self) -> None:
        """Nobody enters any more; the running answer is cancelled, and everyone in the queue is woken."""
        self.is_closed = True
        if self._running is not None:
            self._running.cancel.cancel()
        for ticket in [*self._waiting, *([self._running] if self._running else [])]:
            ticket.changed.set()

    def _advance(self) -> None:
        if self._running is None and self._waiting and not self.is_closed:
            self._running = self._waiting.popleft()
            self._since_s = time.monotonic()
            self._running.changed.set()
        for ticket in self._waiting:
            ticket.changed.set()

    def _refusal(self) -> ApiError:
        mean_s = _FIRST_GUESS_S if self._mean_s is None else self._mean_s
        seconds = min(max(math.ceil(mean_s), 1), _MAX_RETRY_S)  # a place is free when the running one is done
        waiting = f"{len(self._waiting)} wait" if len(self._waiting) != 1 else "one waits"
        message = f"the queue is full: one request is being answered and {waiting}"
        return retry_later(message, "queue_full", seconds, status=429)
