"""Asks the template of forks.py for a run of `ling`.

`python -I -S fork_client.py SOCKET ARGUMENT...` is that run for a shell: its streams are the run's, it hands signals on
and ends with the run's exit code. It imports little, as it runs often.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence

MOST = 32  # descriptors that a process is given


def begin(
    address: str,
    args: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    given: Sequence[int],
    numbers: Sequence[int] = (),
) -> socket.socket:
    """Start a run whose streams are the three descriptors `given`, or, with `numbers`, an engine's process that has
    them under these. What is given back takes signals and gives the exit code, an engine's process id before it."""
    run = socket.socket(socket.AF_UNIX)
    run.connect(address)
    text = json.dumps([list(args), dict(env), cwd, list(numbers)]).encode("utf-8", "surrogateescape")
    socket.send_fds(run, [len(text).to_bytes(8, "big")], given)
    run.sendall(text)
    return run


def receive(run: socket.socket) -> tuple[list[str], dict[str, str], str, list[int], list[int]]:
    """The other side of `begin`: args, env, cwd, numbers, and what was given."""
    size, given, _, _ = socket.recv_fds(run, 8, MOST)
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += run.recv(1 << 16)
    return (*json.loads(text), given)


def tell(run: socket.socket, number: int) -> None:
    """Send an exit code, a process id or a signal."""
    run.sendall(number.to_bytes(4, "big", signed=True))


def end(run: socket.socket) -> int | None:
    """What the other side tells; None where it has gone. Raises TimeoutError."""
    number = run.recv(4, socket.MSG_WAITALL)
    return int.from_bytes(number, "big", signed=True) if len(number) == 4 else None


def main(address: str, args: Sequence[str]) -> None:
    """Be the run. Ends this process."""
    run = begin(address, args, os.environ, os.getcwd(), (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGWINCH):
        signal.signal(number, lambda caught, _: tell(run, caught))
    code = end(run)
    if code is None:
        code = 1
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
