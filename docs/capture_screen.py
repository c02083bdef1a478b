"""Makes docs/screen.svg and docs/screen.txt: a real session of `ling chat`, seen through a terminal emulator.

    .venv/bin/python docs/capture_screen.py [--columns 88] [--rows 30] [--tokens 120]

It starts the program with the demo model in an emulated terminal and an empty home, asks two questions and stops the
picture while the second answer streams, after so many tokens. What is on the screen is what the program wrote; the
figures are those of this run on this machine. Needs the `dev` extra (pexpect, pyte).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pexpect
import pyte
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

QUESTIONS = ("Who are you?", "What does str.split do?")
LIMIT_S = 120.0
_COLOURS = {"brown": "yellow", "brightbrown": "bright_yellow"}  # pyte's names for what Rich calls otherwise


class DimScreen(pyte.Screen):
    """pyte knows no dim text; here the mark for blinking text, which nothing uses, stands for it."""

    def select_graphic_rendition(self, *attrs: int, **kwargs: Any) -> None:
        super().select_graphic_rendition(*attrs, **kwargs)
        if 2 in attrs:
            self.cursor.attrs = self.cursor.attrs._replace(blink=True)
        elif 22 in attrs:
            self.cursor.attrs = self.cursor.attrs._replace(blink=False)


class Session:
    """The program in an emulated terminal."""

    def __init__(self, home: Path, columns: int, rows: int) -> None:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("LING_", "XDG_"))}
        env.pop("NO_COLOR", None)
        env |= {"HOME": str(home), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"}
        command = ["-m", "ling_local", "chat", "--temperature", "0"]
        self.child = pexpect.spawn(sys.executable, command, env=env, dimensions=(rows, columns))
        self.screen = DimScreen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display).rstrip()

    def watch(self, is_there: Callable[[str], bool]) -> None:
        """Until the screen shows what is waited for."""
        end = time.monotonic() + LIMIT_S
        while not is_there(self.text):
            if time.monotonic() > end:
                raise SystemExit(f"nothing after {LIMIT_S:.0f} s; the screen shows:\n{self.text}")
            try:
                self._stream.feed(self.child.read_nonblocking(1 << 16, 0.05))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                raise SystemExit(f"the program has ended:\n{self.text}") from None

    def ask(self, question: str) -> None:
        self.child.send(question + "\r")


def styled(screen: pyte.Screen) -> list[Text]:
    """The screen's lines with their styles, without blank lines at its end."""
    lines = []
    for number in range(screen.lines):
        line = Text()
        for column in range(screen.columns):
            char = screen.buffer[number][column]
            line.append(char.data, _style(char))
        line.rstrip()
        lines.append(line)
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _style(char: pyte.screens.Char) -> Style:
    colour = None if char.fg == "default" else _COLOURS.get(char.fg, char.fg.replace("bright", "bright_"))
    if colour is not None and re.fullmatch("[0-9a-f]{6}", colour):
        colour = f"#{colour}"
    return Style(color=colour, bold=char.bold, italic=char.italics, underline=char.underscore, dim=char.blink)


def as_svg(lines: list[Text], columns: int) -> str:
    """The lines as a picture that loads nothing from elsewhere."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True, color_system="truecolor")
        for line in lines:
            console.print(line, no_wrap=True, crop=False)
    picture = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    picture = picture.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace")
    return console.export_svg(title="ling chat", code_format=picture, unique_id="ling-chat")


def main() -> None:
    """Play the session and write both files beside this script."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--columns", type=int, default=88)
    options.add_argument("--rows", type=int, default=30)
    options.add_argument("--tokens", type=int, default=120, help="of the second answer, before the picture is taken")
    given = options.parse_args()
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as home:
        session = Session(Path(home), given.columns, given.rows)
        session.watch(lambda text: "ctx" in text or "context" in text)
        session.ask(QUESTIONS[0])
        session.watch(lambda text: "── " in text)  # the quiet line after the first answer
        session.ask(QUESTIONS[1])
        session.watch(lambda text: _tokens(text) >= given.tokens)
        lines, text = styled(session.screen), session.text
        session.child.sendintr()
        session.watch(lambda text: "stopped" in text)
        session.child.sendeof()
        session.child.close(force=True)
    (folder / "screen.txt").write_text(text + "\n", encoding="utf-8")
    (folder / "screen.svg").write_text(as_svg(lines, given.columns), encoding="utf-8")
    print(text)


def _tokens(text: str) -> int:
    """Tokens that the live figures count; 0 where there are none."""
    found = re.search(r"^ *(\d+) tok · TTFT", text, re.MULTILINE)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    main()
