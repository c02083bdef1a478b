"""The lines that were typed, kept from chat to chat: a JSON text a line, 0600, shared by all chats of a person."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from prompt_toolkit.history import History

from ling_local import paths

KEPT_LINES = 5000
_MAX_BYTES = 16 << 20
_LONGEST = 100_000  # characters; what is longer was pasted, and is not recalled


def history_file() -> Path:
    """`$XDG_STATE_HOME/ling/history`."""
    return paths.state_dir() / "history"


class LineHistory(History):
    """History in a file, appended to a line at a time. file None: in memory only.

    A file that cannot be read or written is as good as none: history is no reason to end a talk. `problem` tells.
    """

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self.problem = ""
        self._file = file

    def load_history_strings(self) -> Iterable[str]:
        """Newest first, each text once."""
        seen: dict[str, None] = {}
        for line in reversed(self._lines()):
            with contextlib.suppress(ValueError):  # broken off by a kill
                text = json.loads(line)
                if isinstance(text, str):
                    seen.setdefault(text)
        return list(seen)[:KEPT_LINES]

    def store_string(self, string: str) -> None:
        if self._file is None or not string.strip() or len(string) > _LONGEST:
            return
        try:
            descriptor = paths.open_private(self._file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            try:
                size = os.fstat(descriptor).st_size
                broken = size and os.pread(descriptor, 1, size - 1) != b"\n"
                line = json.dumps(string, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
                os.write(descriptor, b"\n" + line if broken else line)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.problem = f"{self._file} cannot be written: {error.strerror}"
            self._file = None

    def _lines(self) -> list[bytes]:
        if self._file is None:
            return []
        try:
            with open(self._file, "rb") as source:
                source.seek(max(os.fstat(source.fileno()).st_size - _MAX_BYTES, 0))
                return source.read().splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            self.problem = f"{self._file} cannot be read: {error.strerror}"
            return []
