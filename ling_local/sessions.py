"""Talks on disk: one file a talk, a line a record, only ever appended to, 0600; one process writes it at a time.

What is written when: a question before it is asked (synced), the answer in pieces while it streams, its end
(synced). So a process that is killed loses what came since the last piece, and nothing that was whole. A line
that was broken off is skipped on reading, and the next record starts on a line of its own.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ling_local import paths
from ling_local.errors import LingError, UsageError
from ling_local.text.clean import check_text
from ling_local.types import Channel, Message, ToolCall

SCHEMA = 1
LAST = "last"
_SUFFIX = ".jsonl"
_TITLE_CELLS = 60


@dataclass(frozen=True, slots=True)
class Saved:
    """A talk as it was read.

    messages  whole turns: a question and its answer; the last answer may be cut
    system    its system message, None if it has none
    model     the checkpoint that made the ids in the messages, "" if unknown
    lost      lines that could not be read
    unasked   a question that never got a word of answer, ""
    pid       the process that wrote to it last
    """

    name: str
    file: Path
    messages: tuple[Message, ...] = ()
    system: str | None = None
    model: str = ""
    lost: int = 0
    unasked: str = ""
    pid: int = 0

    @property
    def title(self) -> str:
        """The first words of the first question, on one line."""
        first = next((message.content for message in self.messages if message.role == "user"), self.unasked)
        line = " ".join(first.split())
        return line if len(line) <= _TITLE_CELLS else line[: _TITLE_CELLS - 1] + "…"


@dataclass(frozen=True, slots=True)
class Listed:
    """A line of the list of talks. modified_s is a Unix time."""

    name: str
    title: str
    num_turns: int
    modified_s: float


@dataclass(slots=True)
class _Replay:
    """Records folded into turns, in the order in which they were written."""

    messages: list[Message] = field(default_factory=list)
    system: str | None = None
    model: str = ""
    lost: int = 0
    pid: int = 0
    question: str | None = None
    parts: dict[str, list[str]] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    calls: tuple[ToolCall, ...] = ()

    def take(self, record: dict[str, Any]) -> None:
        """Raises KeyError, TypeError or ValueError for a record that is not what it says."""
        kind = record["kind"]
        if kind == "open":
            self.pid = int(record["pid"])
        elif kind == "model":
            self.take_model(_text(record["model"]))
        elif kind == "system":
            self.system = None if record["text"] is None else _text(record["text"])
        elif kind == "user":
            self.end_turn()
            self.question = _text(record["text"])
        elif kind == "part":
            ids = [int(token_id) for token_id in record["ids"]]
            self.parts.setdefault(Channel(record["channel"]).value, []).append(_text(record["text"]))
            self.ids += ids
        elif kind == "done":
            self.calls = tuple(ToolCall(_text(call["name"]), _text(call["arguments"])) for call in record["calls"])
            self.end_turn()
        elif kind == "failed":
            self.drop_turn()
        elif kind == "undo":
            self.end_turn()
            self.messages = list(_without_last_turn(self.messages))
        elif kind == "message":
            self.end_turn()
            self.messages.append(_message(record))
        else:
            raise ValueError(kind)

    def take_model(self, model: str) -> None:
        """Ids of one model mean nothing to another."""
        if model != self.model:
            self.messages = [replace(message, ids=()) for message in self.messages]
            self.ids = []
        self.model = model

    def end_turn(self) -> None:
        """Close the turn at hand; one whose answer never began is no turn."""
        if self.question is not None and (self.ids or any(map(any, self.parts.values())) or self.calls):
            thinking = "".join(self.parts.get(Channel.THINKING.value, ())) or None
            content = "".join(self.parts.get(Channel.ANSWER.value, ()))
            answer = Message("assistant", content, thinking, self.calls, tuple(self.ids))
            self.messages += [Message("user", self.question), answer]
        self.drop_turn()

    def drop_turn(self) -> None:
        self.question, self.parts, self.ids, self.calls = None, {}, [], ()


def _without_last_turn(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages before the last question."""
    last = max((number for number, message in enumerate(messages) if message.role == "user"), default=0)
    return tuple(messages[:last])


def turns(messages: Sequence[Message]) -> tuple[tuple[str, Message], ...]:
    """Each question with its answer; what is neither is left out."""
    return tuple((q.content, a) for q, a in pairwise(messages) if (q.role, a.role) == ("user", "assistant"))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return check_text(value)


def _message(record: dict[str, Any]) -> Message:
    reasoning = record["reasoning"]
    calls = tuple(ToolCall(_text(call["name"]), _text(call["arguments"])) for call in record["calls"])
    role = _text(record["role"])
    if role not in ("user", "assistant", "tool", "system"):
        raise ValueError(role)
    return Message(role, _text(record["text"]), None if reasoning is None else _text(reasoning), calls)


def folder() -> Path:
    """Where sessions lie, `$XDG_STATE_HOME/ling/sessions`."""
    return paths.state_dir() / "sessions"


def read(file: Path) -> Saved:
    """All that can be read of a session file. LingError where the file itself cannot."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise LingError(f"the session {file} cannot be read: {error.strerror}", "/sessions lists them.") from None
    replay = _Replay()
    for line in data.split(b"\n"):
        if not line.strip():
            continue
        try:
            replay.take(json.loads(line))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            replay.lost += 1
    unasked = "" if replay.ids or any(map(any, replay.parts.values())) else replay.question or ""
    replay.end_turn()
    name = file.name.removesuffix(_SUFFIX)
    return Saved(name, file, tuple(replay.messages), replay.system, replay.model, replay.lost, unasked, replay.pid)


def list_sessions(limit: int = 20) -> tuple[Listed, ...]:
    """The newest sessions that hold a question, newest first."""
    listed: list[Listed] = []
    for file in _newest_first():
        try:
            saved, modified_s = read(file), file.stat().st_mtime
        except (LingError, OSError):  # gone meanwhile, or not ours to read
            continue
        if saved.title:
            num_turns = sum(message.role == "user" for message in saved.messages)
            listed.append(Listed(saved.name, saved.title, num_turns, modified_s))
        if len(listed) == limit:
            break
    return tuple(listed)


def names() -> tuple[str, ...]:
    """The names of all sessions, newest first."""
    return tuple(file.name.removesuffix(_SUFFIX) for file in _newest_first())


def find(name: str) -> Path:
    """The file of `last`, a number in the list, a name or path, or the only name that begins so. UsageError."""
    name = name.removeprefix(f"{folder()}{os.sep}")
    if name == LAST:
        newest = list_sessions(1)
        if not newest:
            raise UsageError("there is no session yet")
        return folder() / (newest[0].name + _SUFFIX)
    files = _newest_first()
    exact = [file for file in files if file.name == name.removesuffix(_SUFFIX) + _SUFFIX]
    if not exact and name.isascii() and name.isdigit() and len(name) < 4:
        listed = list_sessions()
        exact = [folder() / (listed[int(name) - 1].name + _SUFFIX)] if 0 < int(name) <= len(listed) else []
    found = exact or [file for file in files if len(name) > 3 and file.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"'{name}' is the beginning of {len(found)} sessions", "Give more of the name.")
    raise UsageError(f"no session '{name}'", "`/sessions` in a chat lists them; `last` is the newest.")


def _newest_first() -> list[Path]:
    files: list[tuple[int, Path]] = []
    with suppress(OSError):  # no folder, or not ours to read
        for file in folder().glob(f"*{_SUFFIX}"):
            with suppress(OSError):  # gone meanwhile, or a link to nothing, such as an editor's lock
                files.append((file.stat().st_mtime_ns, file))
    return [file for _, file in sorted(files, reverse=True)]


class SessionFile:
    """A session open for writing, locked against other processes until it is closed or the process ends.

    Every method that writes raises OSError where that fails.
    """

    def __init__(self, file: Path, descriptor: int) -> None:
        self.file = file
        self._descriptor = descriptor

    @property
    def name(self) -> str:
        return self.file.name.removesuffix(_SUFFIX)

    @classmethod
    def create(cls, model: str) -> SessionFile:
        """A new session with a name from the clock. OSError."""
        while True:
            name = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
            file = folder() / (name + _SUFFIX)
            try:
                session = cls._locked(file, os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            try:
                session._opened()
                session.model(model)
            except OSError:
                session.close()
                file.unlink(missing_ok=True)
                raise
            return session

    @classmethod
    def resume(cls, file: Path) -> tuple[SessionFile, Saved]:
        """Open a session to go on with it. LingError where another process has it open; OSError."""
        session = cls._locked(file, 0)
        try:
            saved = read(file)  # after the lock: nobody adds to it any more
            session._start_a_line()
            session._opened()
        except (OSError, LingError):
            session.close()  # or a second try would find it locked, by ourselves
            raise
        return session, saved

    @classmethod
    def _locked(cls, file: Path, flags: int) -> SessionFile:
        descriptor = paths.open_private(file, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | flags)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            pid = read(file).pid
            raise LingError(
                f"session {file.name.removesuffix(_SUFFIX)} is open in another ling"
                + (f" (process {pid})" if pid else ""),
                "Leave that one first, or start a new talk.",
            ) from None
        return cls(file, descriptor)

    def _opened(self) -> None:
        self._append({"kind": "open", "schema": SCHEMA, "pid": os.getpid(), "time": _now()})

    def model(self, model: str) -> None:
        """From here on, ids are those of this checkpoint."""
        self._append({"kind": "model", "model": model})

    def system(self, text: str | None) -> None:
        self._append({"kind": "system", "text": text})

    def asked(self, text: str) -> None:
        """A question, before it is sent."""
        self._append({"kind": "user", "text": text}, sync=True)

    def part(self, channel: Channel, text: str, ids: Sequence[int]) -> None:
        """A piece of the answer; not synced, so that a slow disk does not hold up the screen."""
        self._append({"kind": "part", "channel": channel.value, "text": text, "ids": list(ids)})

    def done(self, reason: str, calls: Iterable[ToolCall] = ()) -> None:
        """The end of the answer."""
        self._append({"kind": "done", "reason": reason, "calls": _calls(calls)}, sync=True)

    def failed(self) -> None:
        """The question got no answer to keep."""
        self._append({"kind": "failed"})

    def undo(self) -> None:
        """The last turn is taken back."""
        self._append({"kind": "undo"})

    def adopt(self, messages: Iterable[Message]) -> None:
        """Messages that came from elsewhere, without their ids."""
        for message in messages:
            record = {"kind": "message", "role": message.role, "text": message.content}
            self._append({**record, "reasoning": message.reasoning, "calls": _calls(message.tool_calls)})
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _start_a_line(self) -> None:
        """Where the last writer was killed inside a record, what follows must not stand on its line."""
        size = os.fstat(self._descriptor).st_size
        if size and os.pread(self._descriptor, 1, size - 1) != b"\n":
            _write_all(self._descriptor, b"\n")

    def _append(self, record: dict[str, Any], *, sync: bool = False) -> None:
        line = json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
        _write_all(self._descriptor, line.encode("utf-8", "replace"))
        if sync:
            os.fsync(self._descriptor)


def _calls(calls: Iterable[ToolCall]) -> list[dict[str, str]]:
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
