"""How rank 0 leads the others: it names a method of the engine and its arguments, and each rank calls it.

Only what touches a state travels: chunks to prefill, steps to launch, snapshots, in the order in which rank 0 does them
itself. Steps are granted ahead, so a message is there long before it is needed, and no rank waits for one in a step.
Which width a step has, when a request ends, what a person cancels: rank 0 alone decides.
"""

from __future__ import annotations

import gc
import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ling_kernels.exchange import PeerTimeout
from ling_local.engine.pinning import no_collection
from ling_local.errors import EngineDied, ExchangeTimeout

# the methods of work.py that a rank calls when told
METHODS = frozenset({"_feed", "_return_to", "_snapshot", "_begin", "_clear", "_learn", "_launch", "_score"})
IDLE_S = 0.25
_FRONT_SPEAKS_S = 1.5  # the front knows better why a process ended: it says so within this time


class Follower(Protocol):
    """What `follow` needs of an engine besides METHODS."""

    def check_peers(self) -> None:
        """Raise what a step met while it waited for another rank."""


class Peers:
    """The other ranks, seen from rank 0."""

    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = list(connections)

    def send(self, name: str, args: tuple[object, ...]) -> None:
        """Have every other rank call method `name`; comes back at once. Raises EngineDied where one is gone."""
        message = pickle.dumps((name, args), pickle.HIGHEST_PROTOCOL)
        for rank, connection in enumerate(self._connections, 1):
            try:
                connection.send_bytes(message)
            except OSError:
                time.sleep(_FRONT_SPEAKS_S)
                raise EngineDied(f"rank {rank} is gone", "Start again.") from None

    def close(self) -> None:
        for connection in self._connections:
            connection.close()


def follow(engine: Follower, connection: Connection) -> None:
    """Do what rank 0 says until its pipe closes. Raises what a method raises: this rank is then out of step."""
    gc.collect()
    gc.freeze()
    with no_collection():  # one between two launches would keep every rank waiting
        busy = False
        while True:
            if not connection.poll(IDLE_S):
                engine.check_peers()
                if busy:
                    gc.collect()
                busy = False
                continue
            try:
                name, args = _read(connection)
            except (EOFError, OSError):
                return
            busy = True
            if name not in METHODS:
                raise ValueError(f"rank 0 asked for {name!r}")
            with told():
                getattr(engine, name)(*args)
            engine.check_peers()


@contextmanager
def told() -> Iterator[None]:
    """A rank that waited in vain, as an error that a person may see."""
    try:
        yield
    except PeerTimeout as error:
        hint = "Its process was stopped, or its GPU hangs: look at nvidia-smi, then start again."
        raise ExchangeTimeout(str(error), hint) from error


def _read(connection: Connection) -> tuple[str, tuple[Any, ...]]:
    return pickle.loads(connection.recv_bytes())
