"""One repository's place in the Hugging Face cache: finished files, parts, links and the lock.

The layout is the one that Hugging Face tools share, so what they fetched is found here and the other way round.
A file lies in `blobs` under its digest; while it is under way it has the same name with `.incomplete` behind it, so
a part is found again by any later run and never mistaken for the file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ling_local.errors import DownloadError
from ling_local.hub import size_of

_PART = re.compile(r"^[0-9a-f]{40}(?:[0-9a-f]{24})?\.incomplete$")


@dataclass(frozen=True, slots=True)
class Store:
    """Paths of a repository below a cache folder. Nothing is created before the first write."""

    cache: Path
    repo: str

    @property
    def folder(self) -> Path:
        return self.cache / f"models--{self.repo.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def pointer(self, commit: str, name: str) -> Path:
        return self.snapshot(commit) / name

    def blob(self, digest: str) -> Path:
        return self.folder / "blobs" / digest

    def part(self, digest: str) -> Path:
        return self.folder / "blobs" / f"{digest}.incomplete"

    def link(self, commit: str, name: str, digest: str) -> None:
        """Give the finished file its name in the snapshot; whatever had that name is replaced in one act."""
        pointer, blob = self.pointer(commit, name), self.blob(digest)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        aside = pointer.with_name(f".{pointer.name}.{os.getpid()}")
        aside.unlink(missing_ok=True)
        aside.symlink_to(os.path.relpath(blob, pointer.parent))
        aside.replace(pointer)

    def commit_of(self, revision: str) -> str:
        """The commit that a branch or tag meant when it was last pulled, or ""."""
        try:
            return (self.folder / "refs" / revision).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""

    def set_ref(self, revision: str, commit: str) -> None:
        """Let the branch or tag name this commit. A commit needs no name."""
        if revision == commit or self.commit_of(revision) == commit:
            return
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        aside = ref.with_name(f".{ref.name}.{os.getpid()}")
        aside.write_text(commit, encoding="ascii")
        aside.replace(ref)

    def other_parts(self, digests: set[str]) -> Iterator[Path]:
        """Parts of files that are not among digests: left by a pull of an older version."""
        try:
            entries = sorted((self.folder / "blobs").iterdir())
        except OSError:
            return
        for entry in entries:
            if _PART.match(entry.name) and entry.name.partition(".")[0] not in digests:
                yield entry

    def has(self, commit: str, name: str, digest: str, size: int) -> bool:
        """The file is here in full length: under its name, or finished and without its name yet."""
        return size in (size_of(self.pointer(commit, name)), size_of(self.blob(digest)))

    @contextmanager
    def lock(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the repository against other pulls; waiting is called once if one is under way. DownloadError."""
        file = self.cache / ".locks" / self.folder.name / "ling-pull.lock"
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        except OSError as error:
            raise disk_error(error, file) from None
        with open(file, "a", encoding="ascii") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waiting()
                fcntl.flock(held, fcntl.LOCK_EX)
            yield


def disk_error(error: OSError, place: Path) -> DownloadError:
    """What the disk refused, in our words."""
    what = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
    return DownloadError(f"cannot write to {place.parent}: {what}", "Make room there, or set HF_HOME to another disk.")
