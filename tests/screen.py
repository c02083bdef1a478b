"""`ling chat` on an emulated terminal: keys go in, and what a person would see comes out."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pyte

from program import Program
from program import command as program_command

LIMIT_S = 30.0
THINK_END = {"control": "</think>"}
SLOW = [{"tokens": ["word "], "repeat": 2000, "delay_ms": 10}]
_MODES = {1049: "alternate screen", 2004: "bracketed paste"}


class Seen:
    """A chat in a terminal of some size. Use it as a context manager; it ends the program at the end."""

    def __init__(
        self,
        program: Program,
        *args: str | Path,
        columns: int = 80,
        rows: int = 24,
        env: dict[str, str | None] | None = None,
        command: list[str] | None = None,
    ) -> None:
        line = command or [*program_command(env), "chat", *map(str, args)]
        environ = program.environment({"COLUMNS": None, **(env or {})})
        self.child: Any = pexpect.spawn(line[0], line[1:], env=environ, dimensions=(rows, columns), timeout=LIMIT_S)
        self.child.delaybeforesend = None
        self.raw = b""
        self._screen = pyte.HistoryScreen(columns, rows, history=20_000, ratio=0.5)
        self._stream = pyte.ByteStream(self._screen)

    def __enter__(self) -> Seen:
        return self

    def __exit__(self, *exc: object) -> None:
        self.child.close(force=True)

    def read(self, seconds: float = 0.1) -> bool:
        """Take in what the program writes for so long. False: it has ended."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                data = self.child.read_nonblocking(1 << 16, 0.05)
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                return False
            self.raw += data
            self._stream.feed(data)
        return True

    @property
    def lines(self) -> list[str]:
        """All lines, from the first that scrolled away to the last on the screen, without trailing blanks."""
        columns = range(self._screen.columns)
        past = ["".join(line[x].data for x in columns).rstrip() for line in self._screen.history.top]
        return [*past, *(line.rstrip() for line in self._screen.display)]

    @property
    def text(self) -> str:
        return "\n".join(self.lines).rstrip("\n")

    @property
    def visible(self) -> list[str]:
        """The lines on the screen now, without the blank ones at its end."""
        return "\n".join(line.rstrip() for line in self._screen.display).rstrip("\n").split("\n")

    @property
    def cursor_hidden(self) -> bool:
        return self._screen.cursor.hidden

    @property
    def modes_left_on(self) -> list[str]:
        """Private modes that the program switched on and not off again."""
        left = []
        for number, name in _MODES.items():
            switches = re.findall(rb"\x1b\[\?%d([hl])" % number, self.raw)
            if switches and switches[-1] == b"h":
                left.append(name)
        return left

    def until(self, wanted: str | Callable[[Seen], bool], seconds: float = LIMIT_S) -> Seen:
        """Read until the text stands somewhere, or the condition holds."""
        holds = (lambda seen: wanted in seen.text) if isinstance(wanted, str) else wanted
        end = time.monotonic() + seconds
        while not holds(self):
            alive = self.read(0.05)
            if not alive and not holds(self):
                raise AssertionError(f"the program ended before {wanted!r}:\n{self.text}")
            if time.monotonic() > end:
                raise AssertionError(f"no {wanted!r} within {seconds} s:\n{self.text}")
        return self

    def ready(self) -> Seen:
        """Wait for an empty prompt as the last thing on the screen."""
        return self.until(lambda seen: seen.prompt == "")

    @property
    def prompt(self) -> str | None:
        """What stands in the prompt; None where there is none: the toolbar is missing under it."""
        lines = self.visible
        at = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("›")), None)
        if at is None or at != self._screen.cursor.y or self.cursor_hidden or len(lines) == at + 1:
            return None
        return lines[at][1:].strip()

    def send(self, keys: str | bytes) -> Seen:
        self.child.send(keys)
        return self

    def ask(self, line: str) -> str:
        """Send a line at the prompt; what was printed between it and the next prompt."""
        self.ready()
        before = len(self.text)
        self.send(line + "\r")
        self.until(lambda seen: len(seen.text) > before and seen.prompt == "" and _after(seen, line) is not None)
        return _after(self, line) or ""

    def leave(self, keys: str = "\x04") -> int:
        """Leave, and give the exit code; a signal is negative."""
        self.send(keys)
        return self.ended()

    def ended(self, seconds: float = LIMIT_S) -> int:
        """Wait for the end of the program."""
        end = time.monotonic() + seconds
        while self.read(0.05):
            if time.monotonic() > end:
                raise AssertionError(f"the program does not end:\n{self.text}")
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else -(self.child.signalstatus or 0)

    def signal(self, number: signal.Signals) -> Seen:
        os.kill(self.child.pid, number)
        return self

    def resize(self, columns: int, rows: int) -> None:
        self.child.setwinsize(rows, columns)
        self._screen.resize(rows, columns)


Start = Callable[..., Seen]


def state_files(ling: Program) -> list[Path]:
    """What chats left on disk."""
    folder = ling.home / ".local" / "state" / "ling"
    return sorted(file for file in folder.rglob("*") if file.is_file()) if folder.exists() else []


def records(seen: Seen) -> list[dict[str, Any]]:
    """The records of the only session in the chat's home."""
    home = Path(seen.child.env["HOME"])
    (file,) = (home / ".local" / "state" / "ling" / "sessions").glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def _after(seen: Seen, line: str) -> str | None:
    """What stands below the last prompt that holds the line, up to the next prompt."""
    lines = seen.text.split("\n")
    room = seen._screen.columns - 2
    first = f"› {line.strip()[:room]}".rstrip()
    starts = [at for at, shown in enumerate(lines) if shown == first]
    if not starts:
        return None
    rest = lines[starts[-1] + 1 :]
    ends = [at for at, shown in enumerate(rest) if shown == "›"]
    return "\n".join(rest[: ends[-1]]).strip("\n") if ends else None
