"""The processes of an engine, seen from the front: starting them, watching them, saying how one ended. No torch.

Every process ends when its socket to the front closes, however the front ends, and on Linux the kernel kills it with
the front as well. With several ranks the front also counts their signs of life (pulse.py).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from ling_local.engine.protocol import EngineSpec, Progress
from ling_local.engine.pulse import LOOK_S, Listener, Pulse, make_pulse
from ling_local.errors import EngineDied, EngineError, ExchangeTimeout

_TAIL_BYTES = 64 * 1024
_END_S = 2.0
SILENT_S = 4.0  # without a sign of life: a rank that is loaded
SILENT_LOADING_S = 120.0  # while it loads, when importing may hold Python's lock for long


@dataclass(frozen=True, slots=True)
class Seat:
    """What a process is told beside the EngineSpec: it is rank `rank` of `size`, on `device`.

    board, pulse   file descriptors of what the ranks share; -1 where there is one rank
    others         rank 0's pipes to the other ranks, or the one pipe of another rank to it
    bound          the kernel may end it with the thread that started it, which lives as long as the front
    """

    rank: int = 0
    size: int = 1
    device: str = ""
    board: int = -1
    pulse: int = -1
    others: tuple[int, ...] = ()
    bound: bool = False


class WorkerProcess:
    """One process of the engine, the socket to it, and the last of what it wrote to stdout and stderr."""

    def __init__(self, name: str, pass_fds: Sequence[int] = ()) -> None:
        self.name = name
        self._tail: deque[bytes] = deque()
        self._socket, theirs = socket.socketpair()
        self.connection = Connection(self._socket.dup().detach())
        try:
            self.process = _start(theirs, pass_fds)
        finally:
            theirs.close()
        self._drain = start_thread(self._drain_output, "engine-output")

    @property
    def pid(self) -> int:
        return self.process.pid

    def tail(self) -> str:
        """The last of what it wrote, 64 KiB at most."""
        return b"".join(tuple(self._tail))[-_TAIL_BYTES:].decode("utf-8", "replace")

    def hang_up(self) -> None:
        """Close the socket for both sides: the process ends, our reader wakes."""
        with contextlib.suppress(OSError):  # closed before, or the process is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait_end(self) -> None:
        """Until it is gone, killed if it does not go."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._socket.close()

    def end_error(self) -> EngineError:
        """How it ended, once its socket is closed."""
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self._drain.join(1.0)  # a grandchild could hold the pipe open
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        lines = [line for line in self.tail().splitlines() if line.strip()]
        last = f": {lines[-1].strip()}" if lines else ""
        hint = "Start again; with --debug its last output is shown."
        if code == -signal.SIGKILL:
            hint = "If nobody killed it, memory ran out: try a smaller model, or a smaller --ctx."
        error = EngineDied(f"{self.name} {how}{last}", hint)
        if lines:
            error.add_note("last output of the engine process:\n" + "\n".join(lines[-20:]))
        return error

    def _drain_output(self) -> None:
        """Body of the output thread. Bounded: a library that warns for ever costs no memory."""
        stream = self.process.stdout
        assert stream is not None
        size = 0
        while chunk := stream.read1(4096):
            self._tail.append(chunk)
            size += len(chunk)
            while size - len(self._tail[0]) >= _TAIL_BYTES:
                size -= len(self._tail.popleft())
        stream.close()


def start_all(spec: EngineSpec, devices: Sequence[str]) -> tuple[WorkerProcess, Crew | None]:
    """Start one process a device and tell each its seat: rank 0's, and the others'."""
    bound = threading.current_thread() is threading.main_thread()
    size = len(devices)
    if size == 1:
        alone = WorkerProcess("the engine process")
        alone.connection.send((spec, Seat(device=devices[0], bound=bound)))
        return alone, None
    board, pulse = os.memfd_create("ling-ranks", 0), make_pulse(size)
    pairs = [socket.socketpair() for _ in devices[1:]]
    ours, theirs = [[pair[side].fileno() for pair in pairs] for side in (0, 1)]
    processes: list[WorkerProcess] = []
    try:
        for rank, device in enumerate(devices):
            others = tuple(ours) if rank == 0 else (theirs[rank - 1],)
            seat = Seat(rank, size, device, board, pulse, others, bound)
            processes.append(WorkerProcess(f"rank {rank} ({device})", (board, pulse, *others)))
            processes[-1].connection.send((spec, seat))
        return processes[0], Crew(processes, Pulse(pulse, size))
    except BaseException:
        for process in processes:
            process.hang_up()
            process.wait_end()
        raise
    finally:
        for end in (end for pair in pairs for end in pair):
            end.close()
        os.close(board)
        os.close(pulse)


class Crew:
    """The ranks beside rank 0, and a watch over all of them."""

    def __init__(self, processes: list[WorkerProcess], pulse: Pulse) -> None:
        self.processes = processes
        self._pulse = pulse
        self._ready = 0
        self._over = threading.Event()
        self._shown: dict[str, dict[int, Progress]] = {}
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def size(self) -> int:
        return len(self.processes)

    def watch(
        self, receive: Callable[[object], None], loaded: Callable[[], None], fail: Callable[[Exception], None]
    ) -> None:
        """Hand progress of the whole to receive, and the first thing that goes wrong to fail, from threads; call loaded
        where one of these ranks is the last to be."""
        for rank in range(1, self.size):
            body = partial(self._read, rank, receive, loaded, fail)
            self._threads.append(start_thread(body, f"rank-{rank}"))
        self._threads.append(start_thread(lambda: self._listen(fail), "ranks-pulse"))

    def whole(self, rank: int, progress: Progress) -> Progress:
        """One rank's bytes as part of all ranks'; what is no share of a whole stays."""
        if not _is_part(progress):
            return progress
        with self._lock:
            stage = self._shown.setdefault(progress.stage, {})
            stage[rank] = progress
            total = self.size * max(p.total for p in stage.values())
            return replace(progress, done=sum(p.done for p in stage.values()), total=total)

    def one_more_is_loaded(self) -> bool:
        """A rank says so. True: it was the last; all are expected to show signs of life often from now on."""
        with self._lock:
            self._ready += 1
            return self._ready == self.size

    def _read(
        self,
        rank: int,
        receive: Callable[[object], None],
        loaded: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Body of a reader thread; what a rank sends is told apart by its attributes, as in remote.py."""
        process = self.processes[rank]
        try:
            while True:
                message = process.connection.recv()
                if isinstance(message, Progress):
                    if _is_part(message):  # the rest rank 0 says for all
                        receive(self.whole(rank, message))
                elif (error := getattr(message, "error", None)) is not None:
                    if not isinstance(error, ExchangeTimeout):  # that one names the rank that failed
                        error.message = f"{process.name}: {error.message}"
                    fail(error)
                elif self.one_more_is_loaded():
                    loaded()
        except (EOFError, OSError):
            if not self._over.is_set():
                fail(process.end_error())
        except Exception as error:  # a progress function that raises, a message that cannot be read
            fail(error)
        finally:
            process.connection.close()

    def _listen(self, fail: Callable[[Exception], None]) -> None:
        listener = Listener(self._pulse, self.size)
        while not self._over.wait(LOOK_S):
            limit = SILENT_S if self._ready == self.size else SILENT_LOADING_S
            silent = listener.silent_for()
            if max(silent) >= limit:
                stuck = self.processes[silent.index(max(silent))]
                hint = "Its process was stopped, or its GPU hangs: look at nvidia-smi, then start again."
                fail(ExchangeTimeout(f"{stuck.name} has given no sign of life for {limit:g} s", hint))
                return

    def end(self, at_once: bool = False) -> None:
        """End all ranks. at_once: without asking, as when one of them hangs."""
        self._over.set()
        for process in self.processes:
            process.hang_up()
            if at_once:
                process.process.kill()

    def join(self) -> None:
        """Wait until the ranks beside rank 0, and the threads that watch, are gone."""
        for process in self.processes[1:]:
            process.wait_end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_END_S)


def _is_part(progress: Progress) -> bool:
    """Whether it tells of a part of the weights, which each rank has; other work all do alike, or one does for all."""
    return not progress.say and progress.unit == "bytes"


def _start(theirs: socket.socket, pass_fds: Sequence[int]) -> subprocess.Popen[bytes]:
    # -P: a random.py in the working directory is not for the worker. SIGINT stays blocked in it until it has
    # said that it ignores it, or a Ctrl-C while Python starts up would end it.
    command = [sys.executable, "-P", "-m", "ling_local.engine.worker", str(theirs.fileno())]
    # torch's threads sleep while they wait for each other: on a busy machine those that spin keep the core from the one
    # they wait for (a step of the demo on two threads took 870 ms, and so 54)
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(theirs.fileno(), *pass_fds),
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


def start_thread(body: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=body, name=name, daemon=True)
    thread.start()
    return thread
