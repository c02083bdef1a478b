"""The front side of the engine door: a proxy to a worker process, so that torch stays out of this one.

The worker ends when its pipe closes, however this process ends. Its stdout and stderr go to a bounded buffer. Where a
model needs several GPUs there is a worker for each (ranks.py); this proxy speaks to rank 0, and when any of them ends
or hangs, all of them end.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from ling_local.engine.gpus import rank_devices
from ling_local.engine.protocol import EngineInfo, EngineSpec, Progress, ProgressFn
from ling_local.engine.ranks import start_all, start_thread
from ling_local.errors import EngineBusy, EngineError, NonFinite
from ling_local.types import StepResult, TokenRequest

_END_S = 2.0


@dataclass(frozen=True, slots=True)
class Start:
    """To the worker: run this request under this number."""

    number: int
    request: TokenRequest


@dataclass(frozen=True, slots=True)
class Cancel:
    """To the worker: end that request within a step. Unknown and finished numbers are fine."""

    number: int


@dataclass(frozen=True, slots=True)
class Ready:
    """From the worker: the engine is loaded."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Accepted:
    """From the worker: the request is good and runs."""

    number: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """From the worker: one step."""

    number: int
    result: StepResult


@dataclass(frozen=True, slots=True)
class Failed:
    """From the worker: a request failed; number 0: the load did. The error carries its trace as a note."""

    number: int
    error: EngineError


@dataclass(slots=True)
class _Inbox:
    """What arrives for one request. over: the worker is done with it; free: the front is, or gave it up."""

    number: int
    messages: SimpleQueue[Accepted | StepResult | Exception] = field(default_factory=SimpleQueue)
    over: threading.Event = field(default_factory=threading.Event)
    free: bool = False


class RemoteEngine:
    """An engine in a worker process. The constructor returns while it loads."""

    def __init__(self, spec: EngineSpec, progress: ProgressFn | None = None) -> None:
        self._progress = progress
        self._info: EngineInfo | None = None
        self._error: Exception | None = None
        self._ready = threading.Event()
        self._inbox: _Inbox | None = None
        self._closing = False
        self._close_lock = threading.Lock()
        self._outbox: deque[object] = deque()
        self._send_lock = threading.Lock()
        devices = rank_devices(spec)
        self._worker, self._crew = start_all(spec, devices)
        self._connection = self._worker.connection
        self._reader = start_thread(lambda: self._read(_starting(spec, devices)), "engine-messages")
        if self._crew:
            self._crew.watch(self._show, self._ready.set, self._fail_all)

    @property
    def pid(self) -> int:
        """Process id of the worker, rank 0's where there are several."""
        return self._worker.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all ranks."""
        return tuple(process.pid for process in self._crew.processes) if self._crew else (self.pid,)

    @property
    def info(self) -> EngineInfo:
        return self.wait_ready()

    @property
    def is_ready(self) -> bool:
        """The load is over, well or not: `info` will not wait."""
        return self._ready.is_set()

    def wait_ready(self, timeout: float | None = None) -> EngineInfo:
        """Wait for the load. Raises its error, or TimeoutError. Ctrl-C while waiting ends the worker."""
        try:
            if not self._ready.wait(timeout):
                raise TimeoutError(f"the engine is still loading after {timeout} s")
        except KeyboardInterrupt:
            self.close()
            raise
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self._info

    def generate(self, request: TokenRequest) -> RemoteGeneration:
        """Wait for the load, the end of a cancelled request, and the worker's check of this one."""
        self.wait_ready()
        before = self._inbox
        if before is not None and not before.over.is_set() and before.free:
            before.over.wait()
        if before is not None and not before.free:
            raise EngineBusy("the engine is busy with another request", "Wait for it to end, or cancel it.")
        inbox = _Inbox(before.number + 1 if before else 1)
        self._inbox = inbox
        if self._error is not None:  # it died meanwhile: nobody would answer
            raise self._error
        self._send(Start(inbox.number, request))
        try:
            answer = inbox.messages.get()
        except KeyboardInterrupt:
            inbox.free = True
            self._send(Cancel(inbox.number))
            raise
        if isinstance(answer, Exception):
            inbox.free = True
            raise answer
        return RemoteGeneration(inbox, self._send)

    def output_tail(self) -> str:
        """The last of what the worker wrote to stdout and stderr, 64 KiB at most."""
        return self._worker.tail()

    def close(self) -> None:
        """End the worker and wait until it is gone. Running requests end with an EngineError."""
        with self._close_lock:
            self._closing = True
            if self._crew:
                self._crew.end()
            self._worker.hang_up()  # wakes both readers, ours and the worker's
            self._worker.wait_end()
            if self._crew:
                self._crew.join()
            if threading.current_thread() is not self._reader:
                self._reader.join(_END_S)

    def _send(self, message: object) -> None:
        # Also called from signal handlers, even while the same thread is sending: whoever holds the lock
        # sends what others have left.
        self._outbox.append(message)
        while self._outbox and self._send_lock.acquire(blocking=False):
            try:
                while self._outbox:
                    self._connection.send(self._outbox.popleft())
            except OSError:
                return  # the worker is gone; the reader thread says so with its reason
            finally:
                self._send_lock.release()

    def _read(self, starting: Progress | None) -> None:
        """Body of the reader thread: hand on what arrives until the pipe closes."""
        try:
            if starting:
                self._show(starting)
            while True:
                self._receive(self._connection.recv())
        except (EOFError, OSError):
            self._fail_all(self._end_error())
        except Exception as error:  # a progress function that raises, a message that cannot be read
            self._fail_all(error)
        finally:
            self._connection.close()

    def _receive(self, message: object) -> None:
        inbox = self._inbox
        match message:
            case Progress():
                self._show(self._crew.whole(0, message) if self._crew else message)
            case Ready(info):
                self._info = info
                if self._crew is None or self._crew.one_more_is_loaded():
                    self._ready.set()
            case Failed(0, error):
                self._fail_all(error)
            case Failed(_, error) if self._crew and _ends_ranks(error):
                self._fail_all(error)
            case Stepped(number, result) if inbox and number == inbox.number:
                if result.finish is not None:
                    inbox.over.set()
                inbox.messages.put(result)
            case Accepted(number) if inbox and number == inbox.number:
                inbox.messages.put(message)
            case Failed(number, error) if inbox and number == inbox.number:
                inbox.over.set()
                inbox.messages.put(error)

    def _show(self, progress: Progress) -> None:
        if self._progress:
            self._progress(progress)

    def _fail(self, error: Exception) -> None:
        """The first error stays: a failed load is not overwritten by the end of the process after it."""
        self._error = self._error or error
        self._ready.set()
        if self._inbox is not None:
            self._inbox.over.set()
            self._inbox.messages.put(self._error)

    def _fail_all(self, error: Exception) -> None:
        """The end: of several ranks none may go on alone."""
        self._fail(error)
        if self._crew:
            self._crew.end(at_once=True)

    def _end_error(self) -> EngineError:
        if self._closing:
            return EngineError("the engine was closed", "Open it again.")
        return self._worker.end_error()


def _starting(spec: EngineSpec, devices: Sequence[str]) -> Progress | None:
    """What to show until a process of ours speaks, which it does when it has imported torch: on a GPU after seconds."""
    if spec.engine != "native":
        return None
    return Progress(f"starting on {', '.join(devices)}", unit="bytes" if spec.device == "cpu" else "engines")


def _ends_ranks(error: Exception) -> bool:
    """After such an error of a request the ranks may stand at different places."""
    return isinstance(error, EngineError) and not isinstance(error, EngineBusy | NonFinite)


class RemoteGeneration:
    """A request that runs in the worker, which does not wait for the reader. It can be iterated once.

    Leaving the iterator early, or dropping the generation, cancels it.
    """

    def __init__(self, inbox: _Inbox, send: Callable[[object], None]) -> None:
        self._inbox = inbox
        self._send = send
        self._done = False

    def __iter__(self) -> Iterator[StepResult]:
        try:
            while not self._done:
                message = self._inbox.messages.get()
                if isinstance(message, Exception):
                    self._done = self._inbox.free = True
                    raise message
                assert isinstance(message, StepResult)
                if message.finish is not None:
                    self._done = self._inbox.free = True
                yield message
        finally:
            self.cancel()
            self._done = True

    def cancel(self) -> None:
        """The rest of the steps, up to one with finish CANCELLED, can still be read."""
        if not self._done:
            self._inbox.free = True
            self._send(Cancel(self._inbox.number))

    def __del__(self) -> None:
        self.cancel()
