"""`ling pull`: fetch a published checkpoint, go on with one that broke off, check one that is here."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ling_local import hub, paths
from ling_local.cli import options as opt
from ling_local.cli.output import Output
from ling_local.cli.pages import Page
from ling_local.errors import DownloadError, LingError, ModelError, UsageError
from ling_local.published import PUBLISHED, repository, size_text
from ling_local.settings import Settings

if TYPE_CHECKING:
    from ling_local.pull import Plan, Progress

PAGE = Page(
    "[OPTIONS] NAME",
    examples=(
        "ling pull tiny",
        "ling pull dspark                          the drafter of flash",
        "ling pull inclusionAI/Ling-3.0-flash",
        "ling pull tiny --verify                   hash what is here",
    ),
    rare=("color", "quiet", "verbose", "debug", "offline"),
    notes=f"Names: {', '.join(row.name for row in PUBLISHED if not row.refusal)}, or OWNER/NAME. Files go to the "
    "Hugging Face cache, which other tools share; HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE are "
    "obeyed. The disk is looked at before anything is written. A transfer that breaks off goes on where it stopped "
    "with the same command; every file is compared with the hash that the Hub gives before it gets its name. "
    "stdout gets the folder.",
)
_LINE_S = 15.0
_BAR_CELLS = 24


@opt.flags("revision", "verify", "json", *opt.STREAMS)
def command(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A published name, OWNER/NAME, or a folder to check.",
            autocompletion=lambda incomplete: _names(incomplete),
        ),
    ] = None,
) -> None:
    """Fetch a checkpoint from the Hugging Face Hub, or check that one is whole."""
    settings, output = opt.open_settings(context)
    if not name:
        known = ", ".join(row.name for row in PUBLISHED if not row.refusal)
        raise UsageError("pull what?", f"Name a model: {known}, or OWNER/NAME. `ling models --all` has the sizes.")
    if os.path.isdir(folder := paths.user_path(name)):
        _check_local(folder, output)
    elif settings["offline"]:
        _stay_here(name, settings, output)
    else:
        _fetch(name, settings, output)


def _names(incomplete: str) -> list[str]:
    return [row.name for row in PUBLISHED if not row.refusal and row.name.startswith(incomplete)]


def _check_local(folder: Path, output: Output) -> None:
    problem = hub.check_folder(folder)
    if problem:
        raise ModelError(f"{folder}: {problem}", "Copy it again; a folder of your own is not fetched from anywhere.")
    output.note(f"ling: {folder} is a folder on this machine, and whole", "dim")
    _answer(output, str(folder), folder, {"received_bytes": 0})


def _stay_here(name: str, settings: Settings, output: Output) -> None:
    """Offline: what is here is good enough if it is whole."""
    source = settings.sources["offline"].removeprefix("flag ")
    if settings["verify"]:
        raise UsageError(f"--verify asks the Hub for the hashes, and {source} forbids that", "Leave out one of them.")
    repo = repository(name)
    folder = hub.cached_folder(repo)
    if folder is None or hub.check_folder(folder):
        raise DownloadError(
            f"{repo} is not fetched: offline ({source})", "Go online, or copy a checkpoint folder here: -m FOLDER."
        )
    output.note(f"ling: {repo} is here and whole; not compared with the Hub: offline ({source})", "dim")
    _answer(output, repo, folder, {"received_bytes": 0})


def _fetch(name: str, settings: Settings, output: Output) -> None:
    output.progress(f"asking for {repository(name)}")
    from ling_local import pull  # late: it brings huggingface_hub, which help does not need

    found = pull.plan(name, settings["revision"])
    _announce(found, output)
    started, received = time.monotonic(), 0
    if settings["verify"] or not found.settled:
        found, received = _transfer(name, settings, output, found)
    seconds = time.monotonic() - started
    if received or settings["verify"]:
        what = "fetched" if received else "checked"
        files = len(found.listing.files)
        output.note(f"ling: {what} in {_clock(seconds)}: {files} files, sizes and hashes are right", "dim")
    try:
        drafts = pull.link_draft(found.listing.repo)
    except DownloadError as error:  # a cache that others own can be read all the same
        output.warn(error.message)
        drafts = ""
    if drafts:
        output.note(f"ling: {drafts}", "dim")
    problem = hub.check_folder(found.folder)
    if problem:
        raise ModelError(f"{found.listing.repo} is fetched, but not usable: {problem}", "Tell those who published it.")
    facts = {
        "revision": found.listing.commit,
        "files": len(found.listing.files),
        "bytes": found.num_bytes,
        "received_bytes": received,
        "seconds": round(seconds, 3),
    }
    _answer(output, found.listing.repo, found.folder, facts)


def _transfer(name: str, settings: Settings, output: Output, found: Plan) -> tuple[Plan, int]:
    """Do what is left to do, alone; the plan that was carried out, and the bytes that came."""
    from ling_local import pull

    meter, received, waited = _Meter(output), 0, []

    def waiting() -> None:
        waited.append(True)
        output.note("ling: another pull of this model is under way; waiting for it")

    with found.store.lock(waiting):
        if waited:
            found = pull.plan(name, settings["revision"])  # the other one has done most of it
        with _kept(name, found, meter), closing(pull.run(found, verify=settings["verify"])) as steps:
            for step in steps:
                meter.show(step)
                received = max(received, step.received_bytes)
    output.clear_progress()
    return found, received


def _answer(output: Output, name: str, folder: Path, facts: dict[str, str | int | float]) -> None:
    if output.json:
        output.print_json({"schema": 1, "name": name, "folder": str(folder), **facts})
    else:
        output.print(str(folder))


def _announce(found: Plan, output: Output) -> None:
    """What, how big, where, and how much room there is."""
    listing, here = found.listing, found.finished_bytes + found.part_bytes
    output.clear_progress()
    if not found.missing:
        output.note(f"ling: {listing.repo} is here already, as the Hub has it ({listing.commit[:7]})", "dim")
        return
    rest = f"; {size_text(here)} of it are here, the rest follows" if here else ""
    output.note(f"ling: {listing.repo} ({listing.commit[:7]}): {_count(found)}, {size_text(found.num_bytes)}{rest}")
    output.note(f"ling: to {found.store.folder}, {size_text(found.free_bytes)} free", "dim")
    for file in found.missing:
        output.detail(f"to fetch: {file.name}, {size_text(file.size)}")


def _count(found: Plan) -> str:
    num = len(found.listing.files)
    return "1 file" if num == 1 else f"{num} files"


@contextmanager
def _kept(name: str, found: Plan, meter: _Meter) -> Iterator[None]:
    """Say what is kept where a transfer ends before its end."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        meter.output.say(f"ling: stopped; {_left(name, found, meter)}")
        raise
    except LingError as error:
        hint = "\n".join(part for part in (error.hint, _left(name, found, meter)) if part)
        raise type(error)(error.message, hint) from None


def _left(name: str, found: Plan, meter: _Meter) -> str:
    return f"{size_text(meter.done)} of {size_text(found.num_bytes)} are kept: `ling pull {name}` goes on from there"


class _Meter:
    """Draws one bar on a terminal, and writes a line now and then elsewhere."""

    def __init__(self, output: Output) -> None:
        self.output, self.done = output, 0
        self._told_s, self._told_share = time.monotonic(), 0
        self._marks: list[tuple[float, int]] = []  # (time, bytes received) of the last seconds, for the rate

    def show(self, progress: Progress) -> None:
        """Take in one report of the transfer."""
        if not progress.checking:
            self.done = progress.done_bytes
        for note in progress.notes:
            self.output.note(f"ling: {note}")
        now = time.monotonic()
        self._marks = [*(mark for mark in self._marks if now - mark[0] < 5), (now, progress.received_bytes)]
        share = 100 * progress.done_bytes // max(progress.total_bytes, 1)
        if self.output.stderr.live:
            self.output.progress(self._bar(progress, share))
        elif share // 10 > self._told_share // 10 or now - self._told_s > _LINE_S:
            self._told_s, self._told_share = now, share
            self.output.note(f"ling: {self._line(progress, share)}")

    def _bar(self, progress: Progress, share: int) -> str:
        width = self.output.progress_columns - 1
        full = min(share, 100) * _BAR_CELLS // 100
        line = f"{'█' * full}{'░' * (_BAR_CELLS - full)} {self._line(progress, share)}"
        return line if len(line) <= width else self._line(progress, share)

    def _line(self, progress: Progress, share: int) -> str:
        sizes = f"{share:3} %  {size_text(progress.done_bytes)} of {size_text(progress.total_bytes)}"
        if progress.checking:
            return f"{sizes}  checking what is here"
        (first_s, first), (last_s, last) = self._marks[0], self._marks[-1]
        rate = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        if rate <= 0:
            return sizes
        return f"{sizes}  {size_text(int(rate))}/s  {_clock((progress.total_bytes - progress.done_bytes) / rate)} left"


def _clock(seconds: float) -> str:
    """A duration: 0.4 s, 12 s, 3:05, 1:02:03."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
