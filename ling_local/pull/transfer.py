"""One file from the Hub to its part on disk: continued where it stopped, and compared with its digest."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ling_local.hub import new_digest
from ling_local.pull.remote import Broken, RemoteFile, pieces_from, unreachable
from ling_local.pull.store import disk_error

# A pull of a night outlives a router that starts again; counted from the last byte that came.
RETRY_WAITS_S = (0.2, 1.0, 3.0, 10.0, 30.0, 60.0)
_READ = 1 << 22


class Stopped(Exception):
    """The transfer was asked to end; its part is kept."""


class Corrupt(Exception):
    """The bytes are not the right ones; the part was emptied."""


def fetch(
    file: RemoteFile,
    part: Path,
    count: Callable[[int], None],
    stop: threading.Event,
    note: Callable[[str], None],
    waits: tuple[float, ...] = RETRY_WAITS_S,
) -> None:
    """Make part hold the whole file, flushed to disk and with the right digest.

    count is told of every byte that is there or comes (and of those that have to come again, as a negative number);
    note of broken connections. Raises Stopped, Corrupt, or LingError when waits are used up, or when the disk is full.
    """
    try:
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "a+b") as target:
            writer = _Part(file, target, count, stop)
            try:
                writer.read_what_is_there()
                _fill(writer, note, waits)
                if writer.digest.hexdigest() != file.digest:
                    raise Corrupt
            except Corrupt:
                writer.restart()
                raise
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        raise disk_error(error, part) from None


class _Part:
    """The part under way: its length and the digest of what it holds."""

    def __init__(self, file: RemoteFile, target: Any, count: Callable[[int], None], stop: threading.Event) -> None:
        self.file, self.length, self.digest = file, 0, new_digest(file.digest, file.size)
        self.stop = stop
        self._target, self._count = target, count

    def read_what_is_there(self) -> None:
        """Take in what an earlier run left; more than the file can hold is thrown away."""
        if os.fstat(self._target.fileno()).st_size > self.file.size:
            self._target.truncate(0)
        self._target.seek(0)
        while piece := self._target.read(_READ):
            self._take(piece)

    def add(self, piece: bytes) -> None:
        if self.length + len(piece) > self.file.size:
            raise Corrupt
        self._target.write(piece)
        self._take(piece)

    def restart(self) -> None:
        """Throw away what is there."""
        self._count(-self.length)
        self._target.seek(0)
        self._target.truncate(0)
        self.length, self.digest = 0, new_digest(self.file.digest, self.file.size)

    def _take(self, piece: bytes) -> None:
        self.digest.update(piece)
        self.length += len(piece)
        self._count(len(piece))
        if self.stop.is_set():
            raise Stopped


def _fill(part: _Part, note: Callable[[str], None], waits: tuple[float, ...]) -> None:
    """Ask for what is missing until it is there."""
    tries = 0
    while part.length < part.file.size:
        before = part.length
        try:
            for position, piece in pieces_from(part.file, before):
                if position == 0 and part.length:
                    part.restart()
                part.add(piece)
            why = "the connection ended early"
        except Broken as broken:
            why = str(broken)
        if part.length == part.file.size:
            return
        tries = 0 if part.length > before else tries
        if tries >= len(waits):
            raise unreachable(part.file.name, why)
        note(f"{part.file.name}: {why}; going on from {100 * part.length // part.file.size} %")
        if part.stop.wait(waits[tries]):
            raise Stopped
        tries += 1
