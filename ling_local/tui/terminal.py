"""The terminal while nobody is prompted: its modes, keys that are typed meanwhile, signals, and the way back.

The whole chat runs without echo, so that keys typed at any moment go to the next prompt and never into an answer.
Signals only raise flags while an answer is drawn; the loop that draws acts on them where it is safe to write.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from prompt_toolkit.input import Input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyPress
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import Output

_IFLAG, _LFLAG, _CC = 0, 3, 6


class Terminal:
    """One terminal, from the start of the chat to its end. Use it as a context manager."""

    def __init__(self, source: Input, target: Output) -> None:
        self.source = source
        self.target = target
        self.interrupted = False  # Ctrl-C came while an answer was drawn
        self.suspended = False  # Ctrl-Z came, and is still to be acted on
        self._descriptor = source.fileno()
        self._found: list[Any] | None = None
        self._watched = False
        self._handlers: dict[int, Any] = {}
        self._keys: list[KeyPress] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    def __enter__(self) -> Terminal:
        self._found = termios.tcgetattr(self._descriptor)
        self._quiet()
        self._take_early_lines()
        for number, handler in ((signal.SIGINT, self._on_interrupt), (signal.SIGTSTP, self._on_suspend)):
            self._handlers[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._show_cursor()
        self._give_back()
        ends = self._wake_read, self._wake_write
        self._wake_read = self._wake_write = -1  # a thread that wakes us late must not write into another file
        for end in ends:
            os.close(end)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While this lasts an answer is drawn: keys are collected, and signals raise flags."""
        self.interrupted = self.suspended = False
        self._watched = True
        self._with_output("enable_bracketed_paste", "hide_cursor")
        try:
            yield
        finally:
            self._watched = False
            self._with_output("disable_bracketed_paste", "show_cursor")
            self._hand_over()

    def wait(self, seconds: float) -> None:
        """Sleep until something is typed, `wake` is called, or the time is over; collect what was typed."""
        with contextlib.suppress(OSError, ValueError):  # the terminal went away: SIGHUP is on its way
            ready = select.select([self._descriptor, self._wake_read], [], [], max(seconds, 0.0))[0]
            if self._wake_read in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
            if self._descriptor in ready:
                self._keys += self.source.read_keys()
                if self.source.closed:
                    raise EOFError

    def wake(self) -> None:
        """End a `wait` under way. From any thread."""
        with contextlib.suppress(OSError):  # full, which wakes as well; or closed at the end
            os.write(self._wake_write, b"w")

    @property
    def typed(self) -> str:
        """What the collected keys would write, as far as they are plain text; for the eye only."""
        text = ""
        for press in self._keys:
            if press.key is Keys.BracketedPaste:
                text += press.data.replace("\r\n", "\n").replace("\r", "\n")
            elif press.key in (Keys.ControlM, Keys.ControlJ):
                text += "\n"
            elif press.key is Keys.ControlH:
                text = text[:-1]
            elif press.key is Keys.ControlU:
                text = ""
            elif len(press.key) == 1:
                text += press.data
        return text

    def suspend(self) -> None:
        """Stop the process as Ctrl-Z does elsewhere, with the terminal as it was found; come back with `fg`."""
        self.suspended = False
        self._with_output("disable_bracketed_paste", "show_cursor")
        self._stop()
        if self._watched:
            self._with_output("enable_bracketed_paste", "hide_cursor")

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        self.wake()

    def _on_suspend(self, number: int, frame: FrameType | None) -> None:
        if self._watched:
            self.suspended = True
            self.wake()
        else:  # at the prompt, which has taken itself off the screen before it sent this
            self._stop()

    def _stop(self) -> None:
        here = termios.tcgetattr(self._descriptor)
        self._give_back()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, self._on_suspend)
        with contextlib.suppress(termios.error):
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, here)

    def _quiet(self) -> None:
        """No echo, a key at a time, Enter as it is; Ctrl-C and Ctrl-Z still are signals, and flush nothing."""
        modes = termios.tcgetattr(self._descriptor)
        modes[_IFLAG] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON)
        modes[_LFLAG] &= ~(termios.ECHO | termios.ICANON | termios.IEXTEN)
        modes[_LFLAG] |= termios.ISIG | termios.NOFLSH
        modes[_CC][termios.VMIN], modes[_CC][termios.VTIME] = 1, 0
        modes[_CC][termios.VQUIT] = b"\0"  # a core dump would leave the terminal like this
        termios.tcsetattr(self._descriptor, termios.TCSADRAIN, modes)

    def _take_early_lines(self) -> None:
        """What was typed while the program started: the terminal made a newline of each Enter then."""
        with contextlib.suppress(OSError):
            while select.select([self._descriptor], [], [], 0)[0]:
                keys = self.source.read_keys()
                self._keys += [KeyPress(Keys.ControlM, "\r") if k.key is Keys.ControlJ else k for k in keys]
                if not keys:
                    break
        self._hand_over()

    def _hand_over(self) -> None:
        """The next prompt gets the keys that were collected."""
        self._keys += self.source.flush_keys()
        store_typeahead(self.source, self._keys)
        self._keys = []

    def _give_back(self) -> None:
        if self._found is not None:
            with contextlib.suppress(termios.error, OSError):  # the terminal is gone
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._found)

    def _show_cursor(self) -> None:
        self._with_output("disable_bracketed_paste", "show_cursor")

    def _with_output(self, *names: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone
            for name in names:
                getattr(self.target, name)()
            self.target.flush()
