"""Fetch a published checkpoint into the Hugging Face cache: plan, check, transfer, verify. Prints nothing.

`plan` asks the Hub what there is and the disk what is here already; `run` does the rest and yields how far it is.
"""

from __future__ import annotations

import difflib
import json
import os
import queue
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ling_local import hub, paths
from ling_local.engine.config import DRAFT_ARCHITECTURES, architectures, model_config
from ling_local.errors import DownloadError, ModelError
from ling_local.hub import size_of
from ling_local.published import PUBLISHED, find_published, repository, size_text
from ling_local.pull.remote import Listing, RemoteFile, list_repo, read_small
from ling_local.pull.store import Store, disk_error
from ling_local.pull.transfer import RETRY_WAITS_S, Corrupt, Stopped, fetch

__all__ = ["Plan", "Progress", "link_draft", "plan", "run"]

DRAFT_SUFFIX = "-dspark"
NUM_WORKERS = 4
POLL_S = 0.1
_GRACE_S = 2.0
_SPARE_BYTES = 1 << 20
WEIGHTS = ".safetensors"
_READ = 1 << 22
_SEE = "`ling models --all` lists what can be fetched."


@dataclass(frozen=True, slots=True)
class Plan:
    """What a pull will do. here: names of the files that are finished; part_bytes: what lies here of the others."""

    store: Store
    revision: str
    listing: Listing
    here: frozenset[str]
    part_bytes: int
    free_bytes: int

    @property
    def folder(self) -> Path:
        return self.store.snapshot(self.listing.commit)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.listing.files)

    @property
    def finished_bytes(self) -> int:
        return sum(file.size for file in self.listing.files if file.name in self.here)

    @property
    def settled(self) -> bool:
        """Nothing is left to do, not even a name to give; so nothing has to be written."""
        commit, store = self.listing.commit, self.store
        named = all(size_of(store.pointer(commit, file.name)) == file.size for file in self.listing.files)
        return named and commit in (self.revision, store.commit_of(self.revision))

    @property
    def missing(self) -> tuple[RemoteFile, ...]:
        """The files to fetch, the largest first."""
        wanted = [file for file in self.listing.files if file.name not in self.here]
        return tuple(sorted(wanted, key=lambda file: -file.size))


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is. done_bytes counts what was here; received_bytes what came over the network in this run.

    checking   finished files are being hashed, nothing is transferred
    notes      what happened since the last one: connections that broke, files that have to come again
    """

    done_bytes: int
    total_bytes: int
    received_bytes: int
    files_left: int
    checking: bool = False
    notes: tuple[str, ...] = ()


def plan(name: str, revision: str = "main") -> Plan:
    """Look at the Hub and at the disk. Nothing is written.

    Raises ModelError where ling could not use what is there, DownloadError where the disk is too small or the Hub
    cannot be asked.
    """
    row = find_published(name)
    if row is not None and row.refusal:
        readable = ", ".join(other.name for other in PUBLISHED if not other.refusal)
        raise ModelError(f"{row.repo} is not fetched: {row.refusal}", f"These can be: {readable}.")
    if row is None and "/" not in name:
        known = [other.name for other in PUBLISHED if not other.refusal]
        meant = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
        hint = f"Did you mean {meant[0]}?" if meant else f"Published are: {', '.join(known)}; others are OWNER/NAME."
        raise ModelError(f"no published model is called '{name}'", hint)
    listing = list_repo(repository(name), revision)
    store = Store(paths.hugging_face_cache(), listing.repo)
    here = frozenset(
        file.name for file in listing.files if store.has(listing.commit, file.name, file.digest, file.size)
    )
    parts = {file.digest: file.size for file in listing.files if file.name not in here}
    part_bytes = sum(min(size_of(store.part(digest)) or 0, size) for digest, size in parts.items())
    found = Plan(store, revision, listing, here, part_bytes, _free(store.cache))
    if found.missing:
        _check_kind(found)
        _check_space(found)
    return found


def _free(folder: Path) -> int:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _check_kind(found: Plan) -> None:
    """Refuse what ling could not load, before the weights come. Raises ModelError."""
    repo, config = found.listing.repo, found.listing.file("config.json")
    if config is None:
        raise ModelError(
            f"{repo} has no config.json: it is no model in the published layout", "See `ling models --all`."
        )
    if not any(file.name.endswith(WEIGHTS) for file in found.listing.files):
        raise ModelError(f"{repo} has no weights as *.safetensors", _SEE)
    try:
        data = json.loads(read_small(config))
        if not isinstance(data, dict):
            raise ValueError("no object")
    except ValueError:
        raise ModelError(f"{repo}: config.json is damaged", "Tell those who published it.") from None
    if architectures(data) & set(DRAFT_ARCHITECTURES):
        return  # a draft is checked against its model when both are loaded
    try:
        model_config(data, f"{repo}/config.json")
    except ModelError as error:
        raise ModelError(f"{repo} is not fetched, ling could not use it: {error.message}", error.hint) from None


def _check_space(found: Plan) -> None:
    needed = found.num_bytes - found.finished_bytes - found.part_bytes + _SPARE_BYTES
    if needed > found.free_bytes:
        message = (
            f"{found.listing.repo} needs {size_text(needed)} more in {found.store.cache}; "
            f"{size_text(found.free_bytes)} are free there"
        )
        raise DownloadError(message, "Make room, or set HF_HOME to a larger disk.")


@dataclass(slots=True)
class _Work:
    """What the workers share: the files to do, and what they tell. A job is all files of one content."""

    store: Store
    commit: str
    waits: tuple[float, ...]
    done_bytes: int
    files_left: int
    jobs: queue.SimpleQueue[list[RemoteFile]] = field(default_factory=queue.SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    notes: list[str] = field(default_factory=list)
    failure: BaseException | None = None

    def count(self, num_bytes: int) -> None:
        with self.lock:
            self.done_bytes += num_bytes

    def note(self, text: str) -> None:
        with self.lock:
            self.notes.append(text)

    def progress(self, found: Plan) -> Progress:
        """How far it is; the notes are handed over."""
        with self.lock:
            notes, self.notes = tuple(self.notes), []
            received = max(self.done_bytes - found.finished_bytes - found.part_bytes, 0)
            return Progress(self.done_bytes, found.num_bytes, received, self.files_left, notes=notes)


def run(found: Plan, *, verify: bool = False, waits: tuple[float, ...] = RETRY_WAITS_S) -> Iterator[Progress]:
    """Transfer what is missing and give it its names; yields about ten times a second, and once at the end.

    verify: hash the files that are here too, and fetch the damaged ones again. Closing the iterator ends the
    transfer within a moment; parts stay. Hold `store.lock` around it. Raises LingError.
    """
    store, listing = found.store, found.listing
    try:
        for part in store.other_parts({file.digest for file in listing.files}):
            part.unlink(missing_ok=True)  # of an older version: nothing would ever finish it
        if verify:
            found = yield from _verified(found)
        for file in listing.files:
            if file.name in found.here and size_of(store.pointer(listing.commit, file.name)) != file.size:
                store.link(listing.commit, file.name, file.digest)
        work = _Work(store, listing.commit, waits, found.finished_bytes, len(found.missing))
        # what describes the model comes first: then a part of it can be told from a model
        yield from _transfer(found, work, [file for file in found.missing if not file.name.endswith(WEIGHTS)])
        yield from _transfer(found, work, [file for file in found.missing if file.name.endswith(WEIGHTS)])
        store.set_ref(found.revision, listing.commit)
    except OSError as error:
        raise disk_error(error, store.folder) from None
    yield work.progress(found)


def _transfer(found: Plan, work: _Work, files: list[RemoteFile]) -> Iterator[Progress]:
    """Run workers until these files are here or one of them failed."""
    jobs: dict[str, list[RemoteFile]] = {}
    for file in files:
        jobs.setdefault(file.digest, []).append(file)
    for job in jobs.values():
        work.jobs.put(job)
    workers = [threading.Thread(target=_worker, args=(work,), daemon=True) for _ in range(min(NUM_WORKERS, len(jobs)))]
    try:
        for worker in workers:
            worker.start()
        while alive := [worker for worker in workers if worker.is_alive()]:
            alive[0].join(POLL_S)
            yield work.progress(found)
    except BaseException:
        work.stop.set()
        raise
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.join(_GRACE_S / len(workers))
    if work.failure is not None:
        raise work.failure


def _worker(work: _Work) -> None:
    """Take jobs until there are none. The first failure ends all workers."""
    try:
        while not work.stop.is_set():
            try:
                job = work.jobs.get_nowait()
            except queue.Empty:
                return
            _get(work, job[0])
            for number, file in enumerate(job):
                work.store.link(work.commit, file.name, file.digest)
                work.count(file.size if number else 0)
            with work.lock:
                work.files_left -= len(job)
    except Stopped:
        return
    except BaseException as error:
        with work.lock:
            work.failure = work.failure or error
        work.stop.set()


def _get(work: _Work, file: RemoteFile) -> None:
    """One file, checked, under its digest. What arrives damaged is asked for once more."""
    part = work.store.part(file.digest)
    try:
        fetch(file, part, work.count, work.stop, work.note, work.waits)
    except Corrupt:
        work.note(f"{file.name}: what came is damaged; fetching it again")
        try:
            fetch(file, part, work.count, work.stop, work.note, work.waits)
        except Corrupt:
            part.unlink(missing_ok=True)
            message = f"{file.name} arrives damaged: its hash is not the one that the Hub gives"
            raise DownloadError(message, "Run it again later, or over another network.") from None
    part.replace(work.store.blob(file.digest))


def _verified(found: Plan) -> Iterator[Progress]:
    """Hash every finished file; the plan without the ones that are damaged, which are removed."""
    files = [file for file in found.listing.files if file.name in found.here]
    total, done, good = sum(file.size for file in files), 0, set()
    for file in files:
        place = found.store.pointer(found.listing.commit, file.name)
        place = place if place.exists() else found.store.blob(file.digest)
        digest, notes = hub.new_digest(file.digest, file.size), ()
        with open(place, "rb") as source:
            while piece := source.read(_READ):
                digest.update(piece)
                done += len(piece)
                yield Progress(done, total, 0, len(files), checking=True)
        if digest.hexdigest() == file.digest:
            good.add(file.name)
        else:
            place.unlink()
            found.store.blob(file.digest).unlink(missing_ok=True)
            notes = (f"{file.name} is damaged on this disk; fetching it again",)
        yield Progress(done, total, 0, len(files), checking=True, notes=notes)
    return replace(found, here=frozenset(good))


def link_draft(repo: str) -> str:
    """Put a drafter that is here beside its model that is here, where the engine looks for it.

    repo is either of the two, just pulled. Returns what to say about it, or "".
    """
    model_repo = repo.removesuffix(DRAFT_SUFFIX)
    model, draft = hub.cached_folder(model_repo), hub.cached_folder(model_repo + DRAFT_SUFFIX)
    if model is None or draft is None:
        if repo == model_repo:
            return ""
        return f"{repo} drafts for {model_repo}, which is not here yet"
    place = model / "dspark"
    if place.exists() and not place.is_symlink():
        return ""  # the model came with one of its own
    try:
        place.unlink(missing_ok=True)
        place.symlink_to(os.path.relpath(draft, model), target_is_directory=True)
    except OSError as error:
        raise disk_error(error, place) from None
    return f"{model_repo} drafts with {model_repo}{DRAFT_SUFFIX} from now on"
