"""The files that `ling bench` reads and writes, and the command that makes a report again."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling_local import paths
from ling_local.errors import LingError, UsageError
from ling_local.settings import TABLE, Settings

if TYPE_CHECKING:
    from ling_local.bench.report import Document

# what decides about the figures, in the order of a command line; not how they are shown
REPEATED = """
    model dummy layers shard task prompt_tokens tokens repetitions requests warmup modes speculation block full_width
    accept_pattern breakdown check check_blocks temperature top_p top_k seed think device gpus dtype ctx threads
    engine engines sglang_arg
"""


def command_line(settings: Settings) -> str:
    """`ling bench` with a flag for everything that is not at its default, also where a variable or file said so."""
    words = ["ling", "bench"]
    for name in REPEATED.split():
        row, value = TABLE[name], settings[name]
        if settings.is_default(name) or value is None or (name == "engine" and settings["engines"] is not None):
            continue
        if row.kind == "bool":
            yes, _, no = row.flags[0].partition("/")
            words += [yes if value else no] if value or no else []
        elif row.kind == "list":
            words += [word for item in value for word in (row.flag, item)]
        else:
            words += [row.flag, f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


def check_files(settings: Settings) -> tuple[Document, ...]:
    """Look at the files before anything is measured; returns the reports of --compare. Raises UsageError."""
    for name in ("save", "plot"):
        if settings[name] is not None:
            _check_place(TABLE[name].flag, paths.user_path(settings[name]))
    for name in ("compare", "plot"):
        if settings[name] is not None and (settings["check"] or settings["breakdown"]):
            other = "--check" if settings["check"] else "--breakdown"
            raise UsageError(f"{TABLE[name].flag} has nothing to show of {other}", "Leave one of them away.")
    if settings["compare"] is None:
        return ()
    from ling_local.bench import read_reports

    return read_reports(paths.user_path(settings["compare"]))


def _check_place(flag: str, file: Path) -> None:
    folder = file.parent
    if file.is_dir():
        raise UsageError(f"{flag}: {file} is a folder", "Give a file.")
    if not folder.is_dir():
        raise UsageError(f"{flag}: there is no folder {folder}", f"Make it: mkdir -p {shlex.quote(str(folder))}")
    if not os.access(file if file.exists() else folder, os.W_OK):
        raise UsageError(f"{flag}: {file} may not be written")


def save(settings: Settings, document: Mapping[str, Any]) -> None:
    """Write the document to the file of --save, if there is one. Raises LingError."""
    if settings["save"] is not None:
        write(paths.user_path(settings["save"]), json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))


def write(file: Path, text: str) -> None:
    """Write a text file whole or not at all. Raises LingError."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_text(text.rstrip("\n") + "\n", encoding="utf-8", errors="backslashreplace")
        part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise LingError(f"{file} cannot be written: {error.strerror}") from None
