"""Keeps the talk at hand on disk while it goes on. A disk that refuses is said once, and never ends a talk."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ling_local.errors import UsageError
from ling_local.sessions import Saved, SessionFile, read
from ling_local.types import Channel, Message, TokenEvent

_PART_S = 1.0  # at most so much of an answer is lost with the process


class Keeper:
    """Writes a session: the file is made with the first question. wanted False: nothing is ever written."""

    def __init__(self, wanted: bool) -> None:
        self.problem = ""  # said once by whoever reads it
        self._wanted = wanted
        self._session: SessionFile | None = None
        self._system: str | None = None
        self._pending: list[tuple[Channel, list[str], list[int]]] = []
        self._due_s = 0.0

    @property
    def name(self) -> str:
        """The session's name, "" where there is none yet."""
        return self._session.name if self._session else ""

    @property
    def file(self) -> Path | None:
        return self._session.file if self._session else None

    def asked(self, text: str, system: str | None, model: str, before: tuple[Message, ...]) -> None:
        """A question is about to be sent. before: the talk up to it, written where the file is made only now."""
        if self._wanted and self._session is None:
            self._try(lambda: self._create(model, before))
        if system != self._system:
            self._write(lambda session: session.system(system))
            self._system = system
        self._write(lambda session: session.asked(text))
        self._due_s = time.monotonic() + _PART_S

    def take(self, event: object) -> None:
        """An event of the answer; its text and ids are written with others, once a second."""
        if self._session is None or not isinstance(event, TokenEvent):
            return
        if not self._pending or self._pending[-1][0] is not event.channel:
            self._pending.append((event.channel, [], []))
        _, texts, ids = self._pending[-1]
        texts.append(event.text)
        ids.extend(event.ids)
        if time.monotonic() >= self._due_s:
            self._flush()

    def ended(self, reason: str) -> None:
        """The answer is whole, or cut; it is part of the talk."""
        self._flush()
        self._write(lambda session: session.done(reason))

    def failed(self) -> None:
        """The question got no answer that is kept."""
        self._pending.clear()
        self._write(SessionFile.failed)

    def undo(self) -> None:
        self._write(SessionFile.undo)

    def restore(self, messages: tuple[Message, ...]) -> None:
        """Put a turn back that was taken back."""
        self._write(lambda session: session.adopt(messages))

    def model(self, model: str) -> None:
        self._write(lambda session: session.model(model))

    def start_anew(self) -> None:
        """The next question begins a session of its own; what was kept stays on disk."""
        self.close()
        self._system = None

    def resume(self, file: Path, model: str) -> Saved:
        """Go on with a session. Ids of another model than `model` are dropped. LingError; this one stays then.

        The session at hand is left where it is. Where nothing is to be written, it is only read.
        """
        if self._session is not None and self._session.file == file:
            raise UsageError("that is the session at hand")
        session, saved = SessionFile.resume(file) if self._wanted else (None, read(file))
        if saved.model != model:
            if session is not None:
                session.model(model)
            saved = replace(saved, messages=tuple(replace(message, ids=()) for message in saved.messages))
        self.close()
        self._session, self._system = session, saved.system
        return saved

    def close(self) -> None:
        """Release the session. Idempotent."""
        self._flush()
        if self._session is not None:
            self._session.close()
        self._session = None

    def _create(self, model: str, before: tuple[Message, ...]) -> None:
        self._session = SessionFile.create(model)
        if before:
            self._session.adopt(before)

    def _flush(self) -> None:
        self._due_s = time.monotonic() + _PART_S
        pending, self._pending = self._pending, []
        for channel, texts, ids in pending:
            self._write(lambda session, c=channel, t=texts, i=ids: session.part(c, "".join(t), i))

    def _write(self, write: Callable[[SessionFile], None]) -> None:
        if self._session is not None:
            self._try(lambda: write(self._session))

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self._wanted = False
            self._pending.clear()
            self.close()
            self.problem = f"this talk is no longer kept on disk: {error.strerror or error}"
