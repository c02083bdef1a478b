"""The front side of the engine door: a proxy to a worker process, so that torch stays out of this one.

The worker ends when its pipe closes, however this process ends. Its stdout and stderr go to a bounded buffer.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from queue import SimpleQueue

from ling_local.engine.protocol import EngineInfo, EngineSpec, Progress, ProgressFn
from ling_local.errors import EngineBusy, EngineDied, EngineError
from ling_local.types import StepResult, TokenRequest

_TAIL_BYTES = 64 * 1024
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
        self._tail: deque[bytes] = deque()
        self._socket, theirs = socket.socketpair()
        self._connection = Connection(self._socket.dup().detach())
        try:
            self._process = _start_worker(theirs)
        finally:
            theirs.close()
        self._drain = _thread(self._drain_output, "engine-output")
        self._reader = _thread(self._read, "engine-messages")
        self._send(spec)

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

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
        return b"".join(tuple(self._tail))[-_TAIL_BYTES:].decode("utf-8", "replace")

    def close(self) -> None:
        """End the worker and wait until it is gone. Running requests end with an EngineError."""
        with self._close_lock:
            self._closing = True
            with contextlib.suppress(OSError):  # closed before, or the worker is gone
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes both readers, ours and the worker's
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if threading.current_thread() is not self._reader:
                self._reader.join(_END_S)
            self._socket.close()

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

    def _read(self) -> None:
        """Body of the reader thread: hand on what arrives until the pipe closes."""
        try:
            while True:
                self._receive(self._connection.recv())
        except (EOFError, OSError):
            self._fail(self._end_error())
        except Exception as error:  # a progress function that raises, a message that cannot be read
            self._fail(error)
        finally:
            self._connection.close()

    def _receive(self, message: object) -> None:
        inbox = self._inbox
        match message:
            case Progress():
                if self._progress:
                    self._progress(message)
            case Ready(info):
                self._info = info
                self._ready.set()
            case Failed(0, error):
                self._fail(error)
            case Stepped(number, result) if inbox and number == inbox.number:
                if result.finish is not None:
                    inbox.over.set()
                inbox.messages.put(result)
            case Accepted(number) if inbox and number == inbox.number:
                inbox.messages.put(message)
            case Failed(number, error) if inbox and number == inbox.number:
                inbox.over.set()
                inbox.messages.put(error)

    def _fail(self, error: Exception) -> None:
        """The first error stays: a failed load is not overwritten by the end of the process after it."""
        self._error = self._error or error
        self._ready.set()
        if self._inbox is not None:
            self._inbox.over.set()
            self._inbox.messages.put(self._error)

    def _end_error(self) -> EngineError:
        if self._closing:
            return EngineError("the engine was closed", "Open it again.")
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._drain.join(1.0)  # a grandchild could hold the pipe open
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        lines = [line for line in self.output_tail().splitlines() if line.strip()]
        last = f": {lines[-1].strip()}" if lines else ""
        hint = "Start again; with --debug its last output is shown."
        if code == -signal.SIGKILL:
            hint = "If nobody killed it, memory ran out: try a smaller model, or a smaller --ctx."
        error = EngineDied(f"the engine process {how}{last}", hint)
        if lines:
            error.add_note("last output of the engine process:\n" + "\n".join(lines[-20:]))
        return error

    def _drain_output(self) -> None:
        """Body of the output thread. Bounded: a library that warns for ever costs no memory."""
        stream = self._process.stdout
        assert stream is not None
        size = 0
        while chunk := stream.read1(4096):
            self._tail.append(chunk)
            size += len(chunk)
            while size - len(self._tail[0]) >= _TAIL_BYTES:
                size -= len(self._tail.popleft())
        stream.close()


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


def _start_worker(theirs: socket.socket) -> subprocess.Popen[bytes]:
    # -P: a random.py in the working directory is not for the worker. SIGINT stays blocked in it until it has
    # said that it ignores it, or a Ctrl-C while Python starts up would end it.
    command = [sys.executable, "-P", "-m", "ling_local.engine.worker", str(theirs.fileno())]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(),),
        )
    except OSError as error:
        raise EngineError(f"the engine process could not be started: {error}", "Free some memory.") from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _thread(body: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread
