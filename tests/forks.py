"""Runs of `ling` in forks of a process that has imported it already, torch as well: seconds less for each.

A run has a process of its own all the same, with its own streams, environment and working folder, and so has the
engine that it starts. Tests of how the program starts, of signals and of terminals start it in full (program.py).
The template listens on a Unix socket, so that `fork_client.py` can stand for `ling` in a shell as well.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import fork_client

FRONT = ("cli.bench", "cli.chat", "cli.complete", "cli.config", "cli.doctor", "cli.help", "cli.models", "cli.plain")
FRONT += ("cli.pull", "cli.screen", "cli.serve", "engine.remote", "generate", "serve.app", "serve.guard")
FRONT += ("serve.server", "serve.service", "serve.slot", "text.template", "text.tokenizer", "tui.acts", "tui.app")
BEHIND = ("engine.worker", "engine.native", "engine.scripted")
# of huggingface_hub, where they are there
BENEATH = ("httpx2", "httpx", "fsspec", "filelock", "yaml", "tqdm.auto", "uvicorn")
LATE = ("huggingface_hub",)  # a run may import it, as it finds it in its environment


@dataclass(slots=True)
class Forks:
    """The way to the process that forks."""

    address: str
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(3))

    @property
    def command(self) -> tuple[str, ...]:
        """What is `ling` for a shell."""
        return (sys.executable, "-I", "-S", fork_client.__file__, self.address)

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
        run = fork_client.begin(self.address, args, env, cwd, theirs)
        for descriptor in theirs:
            os.close(descriptor)
        fed = self._pool.submit(_feed, feed, stdin or b"")
        read = [self._pool.submit(_read, descriptor) for descriptor in (out, err)]
        run.settimeout(timeout)
        code, late = None, False
        while code is None:
            try:
                code = fork_client.end(run)
            except TimeoutError:
                late = True
                run.settimeout(None)
                fork_client.tell(run, signal.SIGKILL)
        run.close()
        fed.result()
        texts = [part.result() for part in read]
        if late:
            raise subprocess.TimeoutExpired(list(args), timeout, *texts)
        return subprocess.CompletedProcess(list(args), code, *texts)


@cache
def forks() -> Forks:
    """One for each process that runs tests; it ends with it."""
    address = str(Path(tempfile.mkdtemp(prefix="forks-")) / "socket")
    life, theirs = os.pipe()
    ready = subprocess.Popen(
        [sys.executable, __file__, address, str(life)],
        pass_fds=(life,),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    os.close(life)
    assert ready.stdout is not None
    assert ready.stdout.readline() == b"ready\n"
    atexit.register(ready.wait)
    atexit.register(os.close, theirs)
    return Forks(address)


def _feed(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(descriptor, "wb", buffering=0) as pipe:
        while data:
            data = data[pipe.write(data) :]


def _read(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read()


class ForkedWorker:
    """An engine's process that the template at `address` forks: what ranks.py asks of a Popen.

    Not the front itself, in which torch or others may have threads that no fork would have.
    """

    def __init__(self, address: str, theirs: socket.socket, pass_fds: Sequence[int]) -> None:
        out, to_out = os.pipe()
        given = (to_out, theirs.fileno(), *pass_fds)
        self._run = fork_client.begin(address, (), os.environ, os.getcwd(), given, given)
        os.close(to_out)
        self.stdout: io.BufferedReader = os.fdopen(out, "rb")
        self.pid = fork_client.end(self._run) or 0
        assert self.pid
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._see_end, daemon=True).start()

    def _see_end(self) -> None:
        self.returncode = fork_client.end(self._run)
        self._run.close()
        self._ended.set()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if not self._ended.is_set():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def forked_workers() -> Iterator[None]:
    """Inside, engines of this process have theirs from the template."""
    from ling_local.engine import ranks

    start, ranks._start = ranks._start, partial(ForkedWorker, forks().address)  # type: ignore[assignment]
    try:
        yield
    finally:
        ranks._start = start


# --- in the process that forks


def serve(address: str, life: int) -> None:
    """Import, then fork for each run that is asked for, until the other end of the pipe `life` is gone."""
    for name in (*FRONT, *BEHIND):
        importlib.import_module(f"ling_local.{name}")
    for name in BENEATH:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not [name for name in LATE if name in sys.modules]
    gc.freeze()  # what is there stays, and the memory that forks share stays shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that look after the runs
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(16)
    if os.fork() == 0:
        os.read(life, 1)
        os.unlink(address)
        os.rmdir(os.path.dirname(address))
        os.kill(os.getppid(), signal.SIGKILL)
        os._exit(0)
    os.close(life)
    print("ready", flush=True)
    while True:
        run, _ = listener.accept()
        if os.fork() == 0:
            _look_after(run, address)
        run.close()


def _look_after(run: socket.socket, address: str) -> None:
    """Fork a run, hand signals to it and its exit code back. Ends this process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    args, env, cwd, numbers, given = fork_client.receive(run)
    pid = os.fork()
    if pid == 0:
        run.close()
        os.chdir(cwd)
        os.environ.clear()
        os.environ.update(env)
        _become_worker(*_numbered(given, numbers)) if numbers else _become(address, args, given)
    for descriptor in given:
        os.close(descriptor)
    if numbers:
        fork_client.tell(run, pid)
    threading.Thread(target=_relay, args=(run, pid), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):
        fork_client.tell(run, code)
    os._exit(0)


def _relay(run: socket.socket, pid: int) -> None:
    """Signals from whoever asked for a run; it ends with them."""
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        while (number := fork_client.end(run)) is not None:
            os.kill(pid, number)
        os.kill(pid, signal.SIGKILL)


def _numbered(given: list[int], numbers: list[int]) -> list[int]:
    """Give descriptors these numbers, whatever had them before."""
    aside = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, max(numbers) + 1) for descriptor in given]
    for descriptor, number in zip(aside, numbers, strict=True):
        os.dup2(descriptor, number)
    return numbers


def _become(address: str, args: list[str], streams: list[int]) -> None:
    from ling_local.__main__ import main
    from ling_local.engine import ranks

    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.argv = ["ling", *args]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ranks._start = partial(ForkedWorker, address)  # type: ignore[assignment]
    _end_after(lambda: sys.exit(main()))


def _become_worker(to_out: int, fd: int, *pass_fds: int) -> None:
    from ling_local.engine import worker

    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(to_out, 1)
    os.dup2(to_out, 2)
    kept = {0, 1, 2, fd, *pass_fds}
    for name in os.listdir("/dev/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the folder's own
                os.close(int(name))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
    sys.argv = [worker.__file__, str(fd)]
    _end_after(lambda: worker.main(fd))


def _end_after(main: Callable[[], None]) -> None:
    """End this process as Python ends after `main`."""
    code = 0
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as for `python -m`
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the tests ends us by going away
    serve(sys.argv[1], int(sys.argv[2]))
