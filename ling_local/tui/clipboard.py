"""Text to the clipboard: by the desktop's own program where there is one, else by asking the terminal."""

from __future__ import annotations

import base64
import contextlib
import shutil
import subprocess

from prompt_toolkit.output import Output

_PROGRAMS = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("xsel", "-ib"), ("pbcopy",))
_WAIT_S = 2.0
_MOST_ASKED = 100_000  # characters of base64; terminals drop more


def copy(text: str, output: Output) -> bool:
    """Put text on the clipboard; False where it is too long for the terminal and no program took it."""
    data = text.encode("utf-8", "replace")
    for program in _PROGRAMS:
        if shutil.which(program[0]) and _run(program, data):
            return True
    coded = base64.b64encode(data).decode("ascii")
    if len(coded) > _MOST_ASKED:
        return False
    output.write_raw(f"\x1b]52;c;{coded}\x07")  # also over ssh, where the terminal allows it
    output.flush()
    return True


def _run(program: tuple[str, ...], data: bytes) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        quiet = subprocess.DEVNULL
        done = subprocess.run(program, input=data, stdout=quiet, stderr=quiet, timeout=_WAIT_S, check=False)
        return done.returncode == 0
    return False
