"""What stdin, stdout and stderr are, decided once, and how each of them is written.

Nobody else asks whether a stream is a terminal, and nobody else writes an escape code.
"""

from __future__ import annotations

import io
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ling_local.errors import LingError, UsageError
from ling_local.settings import resolve, terminal_hints
from ling_local.text.clean import visible

_STYLES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_CHUNK = 1 << 16
_NOTICE_S = 1.5


class ReaderLeft(Exception):
    """The reader of our pipe has enough. Not an OSError, which Typer would turn into an exit code of its own."""


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Turn a broken pipe inside into ReaderLeft."""
    try:
        yield
    except BrokenPipeError:
        raise ReaderLeft from None


@dataclass(frozen=True, slots=True)
class Stream:
    """One standard stream. colour: escape codes for style may be written; live: a line may be redrawn."""

    terminal: bool
    colour: bool = False
    live: bool = False


@dataclass(slots=True)
class Output:
    """The three streams and the writers for them.

    json    the person asked for JSON: failures go to stdout as an error object too
    extra   what an error object holds besides the error, such as the text so far
    """

    stdin: Stream
    stdout: Stream
    stderr: Stream
    json: bool = False
    quiet: bool = False
    debug: bool = False
    verbose: bool = False
    extra: dict[str, Any] = field(default_factory=dict)
    _progress: str = ""

    @property
    def interactive(self) -> bool:
        """A person types and watches: stdin is a terminal, and stdout or stderr shows what we say."""
        return self.stdin.terminal and (self.stdout.terminal or self.stderr.terminal)

    @property
    def columns(self) -> int:
        """Width of the terminal, 80 where there is none."""
        return shutil.get_terminal_size().columns

    @property
    def progress_columns(self) -> int:
        """Width of the terminal that `progress` draws on, which stdout may lead away from."""
        try:
            return os.get_terminal_size(2).columns or 80
        except OSError:
            return 80

    def style(self, stream: Stream, text: str, *names: str) -> str:
        """text in the named styles where the stream may have them."""
        if not stream.colour or not text:
            return text
        return f"\x1b[{';'.join(_STYLES[name] for name in names)}m{text}\x1b[0m"

    def write_text(self, text: str) -> None:
        """Model text to stdout: literal and harmless on a terminal, the exact bytes in a pipe or file."""
        if self.stdout.terminal:
            text = visible(text)
        self.write_bytes(text.encode("utf-8", "replace"))

    def write_bytes(self, data: bytes) -> None:
        """Bytes to stdout at once. Raises ReaderLeft, or LingError where they cannot be written."""
        self.clear_progress()
        if sys.stdout is None:  # closed before we were started: nobody wants to read
            return
        try:
            with reader_may_leave():
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
        except OSError as error:
            quiet_stdout()
            raise LingError(f"cannot write: {error.strerror}") from None

    def print(self, text: str = "") -> None:
        """One line, or a block of lines, of ours to stdout."""
        self.write_text(text + "\n")

    def print_help(self, text: str) -> None:
        """A help page, which carries its own styles, to stdout."""
        self.write_bytes(text.encode("utf-8", "replace") + b"\n")

    def print_json(self, document: Mapping[str, Any], *, one_line: bool = False) -> None:
        """One JSON document to stdout, the same for a terminal and a pipe."""
        text = json.dumps(document, ensure_ascii=False, indent=None if one_line else 2, allow_nan=False)
        self.write_bytes(text.encode("utf-8", "backslashreplace") + b"\n")

    def note(self, text: str, *styles: str) -> None:
        """A line on stderr that `--quiet` silences."""
        if not self.quiet:
            self.say(text, *styles)

    def detail(self, text: str) -> None:
        """A line on stderr that only `--verbose` shows."""
        if self.verbose:
            self.note(f"ling: {text}", "dim")

    def warn(self, text: str) -> None:
        """A warning on stderr, one line, that `--quiet` silences."""
        self.note(f"ling: warning: {text}", "yellow")

    def say(self, text: str, *styles: str, end: str = "\n") -> None:
        """Text on stderr, control characters made visible."""
        self.clear_progress()
        self._to_stderr(self.style(self.stderr, visible(text), *styles) + end)

    def progress(self, text: str) -> None:
        """A line that the next one replaces, on a terminal that can redraw; nothing elsewhere."""
        if self.stderr.live and not self.quiet:
            text = text[: self.progress_columns - 1]  # a line that wraps is not replaced by the next one
            if text != self._progress:
                self._to_stderr(f"\r{text.ljust(len(self._progress))}")
                self._progress = text

    def clear_progress(self) -> None:
        """Take the line of `progress` away."""
        if self._progress:
            blank, self._progress = " " * len(self._progress), ""
            self._to_stderr(f"\r{blank}\r")

    def error(self, error: LingError) -> None:
        """A failure: cause and next step on stderr, and an error object on stdout with `--json`."""
        self.clear_progress()
        lead = self.style(self.stderr, "ling:", "bold", "red")
        self._to_stderr(f"{lead} {visible(error_text(error))}\n")
        if self.json:
            body = {"kind": type(error).__name__, "message": error.message, "hint": error.hint}
            self.print_json({**self.extra, "error": body}, one_line="event" in self.extra)

    def _to_stderr(self, text: str) -> None:
        # Closed, or a log file on a full disk: what we say there is lost, and that must not end the work itself.
        try:
            sys.stderr.buffer.write(text.encode("utf-8", "backslashreplace"))
            sys.stderr.buffer.flush()
        except (OSError, ValueError, AttributeError):
            pass


def quiet_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not complain as well."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.close(nothing)


def error_text(error: LingError) -> str:
    """message and hint: a sentence follows on the same line, `word: ...` lines and commands stand below."""
    if not error.hint:
        return error.message
    if error.hint[0].isupper() and "\n" not in error.hint:
        end = "" if error.message.endswith((".", "?", "!")) else "."
        return f"{error.message}{end} {error.hint}"
    return error.message + "".join(f"\n  {line}" for line in error.hint.splitlines())


def decide(argv: list[str]) -> Output:
    """Look at the three streams. `--color`, `--json` and `--debug` are read ahead of the parser, which may fail."""
    options = argv[: argv.index("--")] if "--" in argv else argv
    choice = _kept_color()
    for index, word in enumerate(options):
        if word == "--color" and index + 1 < len(options):
            choice = options[index + 1]
        elif word.startswith("--color="):
            choice = word.partition("=")[2]
    output = Output(Stream(False), Stream(False), Stream(False), "--json" in options, debug="--debug" in options)
    set_colour(output, choice)
    return output


def _kept_color() -> str:
    """What the variable or the file says, for help pages and errors of the parser, which come before the settings."""
    try:
        return resolve()["color"]
    except UsageError:  # said by the command that needs them
        return "auto"


def set_colour(output: Output, choice: str) -> None:
    """Decide the streams anew for "auto", "always" or "never"; anything else counts as "auto". Mutates output."""
    hints = terminal_hints()

    def stream(file: Any) -> Stream:
        terminal = _is_terminal(file)
        plain = hints.dumb or hints.no_color or not terminal
        colour = choice == "always" or (choice != "never" and not plain)
        return Stream(terminal, colour, terminal and not hints.dumb)

    output.stdin, output.stdout, output.stderr = (
        Stream(_is_terminal(sys.stdin)),
        stream(sys.stdout),
        stream(sys.stderr),
    )


def _is_terminal(file: Any) -> bool:
    try:
        return file.isatty()
    except (AttributeError, ValueError):  # closed before we were started
        return False


def read_stdin(output: Output, *, wait_s: float | None = None, what: str = "stdin") -> bytes | None:
    """All of stdin, or None where it stayed silent for wait_s seconds (None: wait for its end).

    Says on stderr within two seconds what is awaited, and when it goes on without it.
    """
    try:
        descriptor = sys.stdin.fileno()
    except (AttributeError, ValueError, io.UnsupportedOperation):
        return b""
    if wait_s == 0:
        return None
    chunks: list[bytes] = []
    awaited = f"ling: waiting for the end of {what} (Ctrl-D ends it, Ctrl-C leaves)"
    started, told = time.monotonic(), output.stdin.terminal
    if told:
        output.note(awaited)
    while True:
        if not _readable(descriptor, min(_NOTICE_S, _NOTICE_S if wait_s is None else wait_s)):
            if not chunks and wait_s is not None and time.monotonic() - started >= wait_s:
                output.note("ling: stdin is open but silent: going on without it (--stdin-wait inf waits for it)")
                return None
            if not told:
                told = True
                output.note(awaited)
            continue
        try:
            data = os.read(descriptor, _CHUNK)
        except OSError as error:
            raise UsageError(f"stdin cannot be read: {error.strerror}") from None
        if not data:
            return b"".join(chunks)
        chunks.append(data)


def _readable(descriptor: int, wait_s: float) -> bool:
    try:
        return bool(select.select([descriptor], [], [], wait_s)[0])
    except (OSError, ValueError):  # not something to wait for: reading it says what is wrong
        return True
