"""The bytes of a checkpoint, read once: values that no trained weight has, files that are not what was published."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from ling_local.doctor.checks import Check, Status
from ling_local.engine.checkpoint import Entry
from ling_local.engine.layout import BF16, F32
from ling_local.hub import new_digest, promised_digest

if TYPE_CHECKING:
    import numpy as np

_READ = 1 << 24
_READERS = 4
_POLL_S = 0.1
_LARGEST = 100.0  # no trained matrix of these models comes near; quantised values without their scales do
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Values:
    """What a tensor's bytes say. bad: how many values are NaN or infinite; largest: the largest size of the others'
    magnitudes, 0.0 for nothing but zeros; first: its first value where all are the same, else None."""

    entry: Entry
    name: str
    bad: int
    largest: float
    first: float | None


@dataclass(frozen=True, slots=True)
class Bytes:
    """One file's values; wrong: it has not the hash that it is named by in the cache, compared where there is one."""

    file: Path
    values: tuple[Values, ...]
    compared: bool
    wrong: bool


def read_bytes(entries: dict[str, Entry], show: Callable[[int, int], None]) -> list[Bytes]:
    """Read every file that holds one of these tensors, a few at a time. entries: by name, checked, of whole files.

    show is told the bytes read so far and all of them, about ten times a second. Ctrl-C ends it within a moment.
    Raises OSError where a file cannot be read.
    """
    files: dict[Path, list[tuple[str, Entry]]] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        files.setdefault(entry.file, []).append((name, entry))
    count, total = _Count(), sum(file.stat().st_size for file in files)
    pool = ThreadPoolExecutor(_READERS)
    try:
        jobs = [pool.submit(_read_file, file, rows, count) for file, rows in sorted(files.items())]
        for job in jobs:
            while not job.done():
                show(count.done, total)
                count.wait()
        return [job.result() for job in jobs]
    finally:
        count.stop.set()
        pool.shutdown(cancel_futures=True)


class _Count:
    """Bytes read by all threads, and their sign to end."""

    def __init__(self) -> None:
        self.done, self.stop, self._lock = 0, Event(), Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self.done += num_bytes

    def wait(self) -> None:
        self.stop.wait(_POLL_S)


def _read_file(file: Path, rows: Sequence[tuple[str, Entry]], count: _Count) -> Bytes:
    promised = promised_digest(file)
    digest = new_digest(promised, file.stat().st_size) if promised else None
    found = []
    with file.open("rb") as source:
        at = 0
        for name, entry in rows:
            # the header, or a tensor that nobody uses; the spans of a checked file have no gaps between them
            for piece in _pieces(source, entry.offset - at, digest, count):
                del piece
            values = Values(entry, name, 0, 0.0, None)
            for number, piece in enumerate(_pieces(source, entry.num_bytes, digest, count)):
                values = _with_piece(values, piece, number == 0)
            found.append(values)
            at = entry.offset + entry.num_bytes
        for piece in _pieces(source, file.stat().st_size - at, digest, count):
            del piece
    wrong = digest is not None and not count.stop.is_set() and digest.hexdigest() != promised
    return Bytes(file, tuple(found), digest is not None, wrong)


def _pieces(source: Any, num_bytes: int, digest: Any, count: _Count) -> Iterator[bytes]:
    """The next num_bytes of a file, hashed and counted; fewer once the reading is to end."""
    while num_bytes > 0 and not count.stop.is_set():
        piece = source.read(min(num_bytes, _READ))
        if not piece:
            raise OSError(f"{source.name}: it got shorter meanwhile")
        if digest is not None:
            digest.update(piece)
        count.add(len(piece))
        num_bytes -= len(piece)
        yield piece


def _with_piece(values: Values, piece: bytes, first_one: bool) -> Values:
    import numpy as np

    words = np.frombuffer(piece, np.uint16 if values.entry.dtype == BF16 else np.uint32)
    infinite = words.dtype.type(0x7F80 if words.itemsize == 2 else 0x7F800000)
    sizes = words & words.dtype.type(0x7FFF if words.itemsize == 2 else 0x7FFFFFFF)
    top, bad = sizes.max(initial=0), values.bad
    if top >= infinite:
        finite = sizes[sizes < infinite]
        bad += len(sizes) - len(finite)
        top = finite.max(initial=0)
    first = _number(words[0]) if words.size and (words == words[0]).all() else None
    same = first is not None and (first_one or first == values.first)
    return replace(values, bad=bad, largest=max(values.largest, _number(top)), first=first if same else None)


def _number(word: np.integer[Any]) -> float:
    """The value of a word of bf16 or fp32."""
    import numpy as np

    bits = np.uint32(word) << 16 if word.itemsize == 2 else np.uint32(word)
    return float(np.uint32(bits).view(np.float32))


def judge(files: Sequence[Bytes], fix: str) -> Iterator[Check]:
    """What the bytes say, as checks. fix: how to get the files again."""
    wrong = [read.file.name for read in files if read.wrong]
    compared = sum(read.compared for read in files)
    if wrong:
        yield Check("hashes", Status.FAIL, f"not the bytes that were published: {', '.join(wrong)}", fix)
    elif compared:
        yield Check("hashes", Status.PASS, f"{compared} files have the hash that they are named by in the cache")
    values = [each for read in files for each in read.values]
    # a dtype that was widened or is not looked at (none in a checked checkpoint) would be misread
    assert all(each.entry.dtype in (BF16, F32) for each in values)
    matrices = [each for each in values if len(each.entry.shape) > 1]
    norms = [each for each in values if each.name.endswith("norm.weight")]
    sick = list(_sick(values, matrices, fix))
    yield from sick
    if norms and all(each.first == 1.0 for each in norms):
        untrained = f"all {len(norms)} norms hold nothing but ones, as before training"
        yield Check("weights", Status.WARN, untrained, "Was it trained? Its answers will tell: --answers.")
    elif not sick:
        largest = max(matrices, key=lambda each: each.largest)
        detail = (
            f"{len(values):,} tensors, no NaN or Inf, no matrix of zeros; the largest value is {largest.largest:.3g}"
        )
        yield Check("weights", Status.PASS, f"{detail} in {largest.name}")


def _sick(values: Sequence[Values], matrices: Sequence[Values], fix: str) -> Iterator[Check]:
    bad = [each for each in values if each.bad]
    if bad:
        what = _named([f"{each.name} ({each.bad:,} of {_numel(each):,})" for each in bad])
        yield Check("weights", Status.FAIL, f"NaN or Inf in {what}", fix)
    zeros = [each.name for each in matrices if not each.bad and each.largest == 0]
    if zeros:
        yield Check("weights", Status.WARN, f"nothing but zeros in {_named(zeros)}", fix)
    constant = [each.name for each in matrices if each.first]
    if constant:
        yield Check("weights", Status.WARN, f"one value throughout in {_named(constant)}", fix)
    large = [f"{each.name} (up to {each.largest:.3g})" for each in matrices if each.largest > _LARGEST]
    if large:
        why = "as quantised values look without their scales"
        yield Check("weights", Status.WARN, f"values of unusual size, {why}, in {_named(large)}", fix)


def _numel(values: Values) -> int:
    return values.entry.num_bytes // (2 if values.entry.dtype == BF16 else 4)


def _named(names: Sequence[str]) -> str:
    """The first few of them, and how many more."""
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
