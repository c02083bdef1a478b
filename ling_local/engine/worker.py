"""The far side of the engine door: ``python -m ling_local.engine.worker FD``, started by ranks.py only.

Loads the engine, runs one request at a time and answers in messages. It ignores SIGINT (the front decides
what Ctrl-C means) and ends at once when its pipe closes, also in the middle of a load or a step. With several ranks,
rank 0 does this, and the others do what it tells them (follow.py).
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from ling_local.engine.protocol import Engine, EngineSpec, Generation, ProgressFn
from ling_local.engine.pulse import Pulse, keep_beating
from ling_local.engine.ranks import Seat
from ling_local.engine.remote import Accepted, Cancel, Failed, Ready, Start, Stepped
from ling_local.errors import EngineError, LingError, OutOfMemory

_PR_SET_PDEATHSIG = 1
_LAST_S = 2.0  # for the front to read a last message and end this process
_NO_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


class Running:
    """The request that runs now, for cancels from the reader thread, which may come before it starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._generation: Generation | None = None
        self._cancelled = 0  # the highest number asked for; numbers only grow
        self.last_act: Callable[[], None] | None = None  # before the process ends because the front is gone

    def begin(self, number: int, generation: Generation) -> None:
        with self._lock:
            self._number, self._generation = number, generation
            early = self._cancelled == number
        if early:
            generation.cancel()

    def cancel(self, number: int) -> None:
        with self._lock:
            self._cancelled = number
            generation = self._generation if self._number == number else None
        if generation is not None:
            generation.cancel()

    def end(self) -> None:
        with self._lock:
            self._generation = None


def main(fd: int) -> None:
    """Serve the connection `fd` until it closes. Does not return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    faulthandler.enable()  # a crash in native code leaves its stack in the front's buffer
    connection = Connection(fd)
    running = Running()
    starts: SimpleQueue[Start] = SimpleQueue()
    try:
        spec, seat = connection.recv()
        if seat.bound:
            _end_with_parent()
        threading.Thread(target=_listen, args=(connection, running, starts), daemon=True).start()
        if seat.size > 1:
            signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # ranks stopped one after the other would miss each other
            keep_beating(Pulse(seat.pulse, seat.size), seat.rank)
        engine = _load(connection, spec, seat)
        if engine is not None and seat.rank > 0:
            _follow(connection, engine, Connection(seat.others[0]))
        if spec.engine == "sglang" and engine is not None:  # its processes hold the GPU's memory
            running.last_act = engine.close
        while engine is not None:
            _serve(connection, engine, starts.get(), running)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _listen(connection: Connection, running: Running, starts: SimpleQueue[Start]) -> None:
    """Body of the reader thread: requests, cancels, and the end of the process when the front is gone."""
    while True:
        try:
            message = connection.recv()
        except (EOFError, OSError):
            if running.last_act is not None:
                running.last_act()
            os._exit(0)  # at once: the main thread may be inside a load or a long step
        if isinstance(message, Cancel):
            running.cancel(message.number)
        else:
            starts.put(message)


def _end_with_parent() -> None:
    """Have the kernel end this process with the front, also when it hangs where Python cannot. Linux only."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return


def _load(connection: Connection, spec: EngineSpec, seat: Seat) -> Engine | None:
    try:
        engine = load_engine(spec, connection.send, seat)
        connection.send(Ready(engine.info))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except BaseException as error:
        connection.send(Failed(0, to_error(error, "load")))
        return None
    return engine


def load_engine(spec: EngineSpec, progress: ProgressFn | None, seat: Seat | None = None) -> Engine:
    """The engine itself, in this process; or one rank of it."""
    if spec.engine == "scripted":
        from ling_local.engine.scripted import ScriptedEngine

        return ScriptedEngine.load(spec, progress)
    if spec.engine == "sglang":
        from ling_local.engine.sglang.engine import SGLangEngine

        return SGLangEngine.load(spec, progress)
    from ling_local.engine.launch import load_rank
    from ling_local.engine.native import NativeEngine

    if seat is not None and seat.size > 1:
        return load_rank(spec, seat, progress)
    return NativeEngine.load(
        Path(spec.model),
        seat.device if seat else spec.device,
        spec.dtype,
        spec.draft,
        block=spec.block,
        context=spec.context,
        threads=spec.threads,
        progress=progress,
        dummy=spec.dummy,
        accept=spec.accept,
    )


def _follow(connection: Connection, engine: Engine, leader: Connection) -> None:
    """Do what rank 0 says. Does not return: this rank ends, with a message where it failed."""
    from ling_local.engine.follow import follow

    try:
        follow(engine, leader)
        threading.Event().wait(2 * _LAST_S)  # rank 0 is gone: the front ends us, and says why
    except BaseException as error:
        connection.send(Failed(0, to_error(error, "run")))
        threading.Event().wait(_LAST_S)
    os._exit(1)


def _serve(connection: Connection, engine: Engine, start: Start, running: Running) -> None:
    """One request. Any exception becomes a message; the engine decides whether it goes on after one."""
    try:
        generation = engine.generate(start.request)
        running.begin(start.number, generation)
        connection.send(Accepted(start.number))
        finished = False
        for result in generation:
            finished = result.finish is not None
            connection.send(Stepped(start.number, result))
        if not finished:
            raise EngineError("the engine stopped without a reason", "Try again.")
    except (BrokenPipeError, ConnectionResetError):
        raise
    except BaseException as error:
        connection.send(Failed(start.number, to_error(error, "run")))
    finally:
        running.end()


def to_error(error: BaseException, doing: str) -> LingError:
    """Any exception as one that may cross the door; its trace goes along as a note, for --debug."""
    trace = "".join(traceback.format_exception(error))
    last = traceback.format_exception_only(error)[-1].strip()
    if isinstance(error, LingError) and _can_travel(error):
        result = error
    elif _is_out_of_memory(error):
        what = "to load the model" if doing == "load" else "for this request"
        result = OutOfMemory(
            f"there is not enough memory {what}",
            "Try a smaller model, a smaller --ctx, or close what else uses the memory.",
        )
    elif isinstance(error, ImportError):  # torch, or a library of its: half an installation, or none
        text = f"the engine failed to {doing}, a package is missing or broken: {error}"
        result = EngineError(text, "`ling doctor` says what is missing and how to install it.")
    else:
        result = EngineError(f"the engine failed to {doing}: {last}", "Run it with --debug to see the trace.")
    result.add_note("in the engine process:\n" + trace)
    return result


def _can_travel(error: LingError) -> bool:
    try:
        return isinstance(pickle.loads(pickle.dumps(error)), type(error))
    except Exception:  # whatever its arguments hold: then its last line goes
        return False


def _is_out_of_memory(error: BaseException) -> bool:
    # torch's own class is told by its name: this module is imported where torch is not.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _NO_MEMORY_WORDS)


if __name__ == "__main__":
    main(int(sys.argv[1]))
