"""Runs of `ling` in forks of a process that has imported it already: half a second less for each.

A run has a process of its own all the same, with its own streams, environment and working folder. Tests of how the
program starts, of signals and of terminals start it in full (program.py).
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection

PRELOADED = ("cli.complete", "cli.chat", "cli.bench", "cli.config", "cli.help", "cli.models", "cli.doctor", "engine")
PRELOADED += ("engine.remote", "generate", "text.template", "text.tokenizer")
LATE = ("torch", "numpy", "huggingface_hub")  # a run may import them, as it finds them in its environment


@dataclass(slots=True)
class Forks:
    """The process that forks, and the way to it. One run at a time."""

    _ours: socket.socket
    _connection: Connection
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(3))

    def run(
        self, args: Sequence[str], env: Mapping[str, str], cwd: str, stdin: bytes | None, timeout: float
    ) -> subprocess.CompletedProcess[bytes]:
        """As subprocess.run with captured streams. stdin None: /dev/null. Raises TimeoutExpired."""
        pairs = [os.pipe() for _ in range(3)]
        (source, feed), (out, to_out), (err, to_err) = pairs
        theirs = [source, to_out, to_err]
        if stdin is None:
            os.close(source)
            theirs[0] = os.open(os.devnull, os.O_RDONLY)
        self._connection.send((list(args), dict(env), cwd))
        socket.send_fds(self._ours, [b"."], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        fed = self._pool.submit(_feed, feed, stdin or b"")
        read = [self._pool.submit(_read, descriptor) for descriptor in (out, err)]
        pid = self._connection.recv()
        late = not self._connection.poll(timeout)
        if late:
            os.kill(pid, signal.SIGKILL)
        code = self._connection.recv()
        fed.result()
        texts = [part.result() for part in read]
        if late:
            raise subprocess.TimeoutExpired(list(args), timeout, *texts)
        return subprocess.CompletedProcess(list(args), code, *texts)


@cache
def forks() -> Forks:
    """One for each process that runs tests; it ends with it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, str(theirs.fileno())]
    process = subprocess.Popen(
        command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    theirs.close()
    atexit.register(process.wait)
    atexit.register(ours.shutdown, socket.SHUT_RDWR)
    return Forks(ours, Connection(os.dup(ours.fileno())))


def _feed(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb", buffering=0) as pipe:
        while data:
            data = data[pipe.write(data) :]


def _read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read()


def main(descriptor: int) -> None:
    """Import, then fork for each run that is asked for until the other side is gone. Also returns in each fork."""
    for name in PRELOADED:
        importlib.import_module(f"ling_local.{name}")
    assert not [name for name in LATE if name in sys.modules]
    ours = socket.socket(fileno=descriptor)
    connection = Connection(os.dup(descriptor))
    while True:
        try:
            args, env, cwd = connection.recv()
        except EOFError:
            return
        streams = socket.recv_fds(ours, 1, 3)[1]
        pid = os.fork()
        if pid == 0:
            connection.close()
            ours.close()
            _become(args, env, cwd, streams)
        for stream in streams:
            os.close(stream)
        connection.send(pid)
        connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _become(args: list[str], env: dict[str, str], cwd: str, streams: list[int]) -> None:
    from ling_local.cli.main import main

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = ["ling", *args]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as for `python -m`
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the tests ends us by going away
    main(int(sys.argv[1]))
