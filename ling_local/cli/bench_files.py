"""The files that `ling bench` reads and writes, and the command that makes a report again."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling_local.cli.output import Output
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
            words += [row.flag, repr(value).removesuffix(".0") if isinstance(value, float) else str(value)]
    return shlex.join(words)


def check_files(settings: Settings) -> tuple[Document, ...]:
    """Look at the files before anything is measured; returns the reports of --compare. Raises UsageError."""
    for name in ("save", "plot"):
        if settings[name] is not None:
            _check_place(TABLE[name].flag, _file(settings, name))
    for name in ("compare", "plot"):
        if settings[name] is not None and (settings["check"] or settings["breakdown"]):
            other = "--check" if settings["check"] else "--breakdown"
            raise UsageError(f"{TABLE[name].flag} has nothing to show of {other}", "Leave one of them away.")
    if (
        settings["save"] is not None
        and settings["plot"] is not None
        and _file(settings, "save") == _file(settings, "plot")
    ):
        raise UsageError("--save and --plot name the same file", "Give each one of its own.")
    if settings["compare"] is None:
        return ()
    from ling_local.bench import read_reports

    return read_reports(_file(settings, "compare"))


def _file(settings: Settings, name: str) -> Path:
    """The file itself where a link leads to it; a device or a pipe by its name."""
    path = Path(settings[name]).expanduser()
    return path if path.exists() and not path.is_file() else path.resolve()


def _check_place(flag: str, file: Path) -> None:
    folder = file.parent
    if file.is_dir():
        raise UsageError(f"{flag}: {file} is a folder", "Give a file.")
    if not folder.is_dir():
        raise UsageError(f"{flag}: there is no folder {folder}", f"Make it: mkdir -p {shlex.quote(str(folder))}")
    if not all(os.access(place, os.W_OK) for place in _places(file)):
        raise UsageError(f"{flag}: {file} may not be written")


def _places(file: Path) -> list[Path]:
    """What has to be writable: the file, if there is one, and its folder, unless it is a device or a pipe."""
    special = file.exists() and not file.is_file()
    return [*([file] if file.exists() else []), *([] if special else [file.parent])]


def stop_mark(stopped: BaseException, done: str) -> str:
    """The mark of a report of a run that ended early; done: what it holds."""
    why = stopped.message if isinstance(stopped, LingError) else "interrupted"
    return f"STOPPED after {done}: {why}"


def deliver(
    settings: Settings,
    output: Output,
    document: Mapping[str, Any],
    text: str,
    stopped: BaseException | None = None,
    picture: str = "",
) -> None:
    """Write the files first, which nobody can interrupt with a closed pipe, then stdout: text, or JSON where it is "".

    A file that cannot be written keeps no report from stdout. That, or `stopped`, is raised at the end; an error
    has one document on stdout with the report.
    """
    try:
        if settings["save"] is not None:
            _write(_file(settings, "save"), json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))
        if picture:
            _write(_file(settings, "plot"), picture)
    except LingError as error:
        stopped = stopped or error
    if text:
        output.print(text)
    elif isinstance(stopped, LingError):
        output.extra = dict(document)
    else:
        output.print_json(document)
    if stopped is not None:
        raise stopped


def _write(file: Path, text: str) -> None:
    """Write a text file whole or not at all, a device or a pipe as it is. Raises LingError."""
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    target = file if file.exists() and not file.is_file() else part
    try:
        target.write_text(text.rstrip("\n") + "\n", encoding="utf-8", errors="backslashreplace")
        if target is part:
            part.replace(file)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise LingError(f"{file} cannot be written: {error.strerror}") from None
