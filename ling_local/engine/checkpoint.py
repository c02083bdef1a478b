"""Checkpoint files: find, check against the layout, and say where each tensor lies. No torch, nothing is mapped here.

A file is trusted only when its length is what its own header says and every tensor of the layout is present with the
right shape and type. Anything else is a ModelError that names the file, the reason and the repair.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling_local.engine.config import DraftConfig
from ling_local.engine.layout import BF16, DRAFT_COPIES, F32, IGNORED_SUFFIX, TensorSpec, draft_tensor_name
from ling_local.errors import ModelError
from ling_local.paths import DEMO, demo_dir

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DSPARK_FOLDER = "dspark"  # inside a model's folder: its draft
CALIBRATION = "confidence_calibration.json"  # of a draft
MAX_HEADER_BYTES = 100 * 2**20  # the format's own limit
ELEMENT_BYTES = {
    "F64": 8,
    "I64": 8,
    "F32": 4,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: its type and shape there, its first byte in the file and its length in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def check_files(
    folder: Path,
    specs: Sequence[TensorSpec],
    optional: tuple[str, ...] = (),
    canonical: Callable[[str], str] = lambda name: name,
) -> dict[str, Entry]:
    """Where every tensor of `specs` lies, after all checks. Reads headers only.

    optional: names that may be absent (a draft's copies of the target's embedding and head); canonical: the
    layout's name for a name found in the files.
    """
    entries = {canonical(name): entry for name, entry in read_entries(folder).items()}
    wanted = {spec.name: spec for spec in specs}
    for name, entry in entries.items():
        if name not in wanted and not name.endswith(IGNORED_SUFFIX):
            raise ModelError(
                f"{entry.file}: unknown tensor {name}{_nearest(name, wanted)}",
                "config.json and weights do not belong together, or the file was changed: " + _again(entry.file),
            )
    for name, spec in wanted.items():
        if name in entries:
            _check_tensor(entries[name], spec)
        elif name not in optional:
            raise ModelError(
                f"{folder}: tensor {name} is in none of its files",
                "the checkpoint is incomplete: " + _again(folder),
            )
    return {name: entries[name] for name in wanted if name in entries}


def check_draft_files(folder: Path, specs: list[TensorSpec]) -> dict[str, Entry]:
    """`check_files` for a draft, whose exports spell names in their own ways and may leave the target's copies out."""
    return check_files(folder, specs, DRAFT_COPIES, draft_tensor_name)


def read_calibration(folder: Path, config: DraftConfig) -> list[float]:
    """A draft's confidence temperatures by position, 1 where it ships none. Raises ModelError."""
    path = folder / CALIBRATION
    if not path.exists():
        return [1.0] * config.block_size
    try:
        values = [float(v) for v in json.loads(path.read_text())["temperatures"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: cannot be read: {error!r}", "fetch it again, or delete it") from None
    if len(values) != config.block_size or min(values) <= 0:
        raise ModelError(f"{path}: needs {config.block_size} temperatures above 0", "fetch it again, or delete it")
    return values


def read_entries(folder: Path) -> dict[str, Entry]:
    """All tensors of all files of the folder, from the index if there is one. Checks lengths and the index."""
    index_path = folder / INDEX
    if not index_path.exists():
        if (folder / SINGLE).exists():
            return read_header(folder / SINGLE)
        shards = sorted(folder.glob("*.safetensors"))
        what = f"{len(shards)} weight files but no {INDEX}" if shards else "no weights (*.safetensors)"
        raise ModelError(f"{folder}: {what}", _again(index_path if shards else folder))
    index = _read_index(index_path)
    entries: dict[str, Entry] = {}
    for file_name in sorted(set(index.values())):
        for name, entry in read_header(folder / file_name).items():
            if name in entries:
                raise ModelError(f"{entry.file}: tensor {name} is in {entries[name].file.name} too", _again(folder))
            entries[name] = entry
    for name, file_name in index.items():
        if name not in entries or entries[name].file.name != file_name:
            raise ModelError(
                f"{folder / file_name}: tensor {name} is listed in {INDEX} but not in this file",
                _again(folder),
            )
    for name, entry in entries.items():
        if name not in index and not name.endswith(IGNORED_SUFFIX):
            raise ModelError(f"{entry.file}: tensor {name} is not listed in {INDEX}", _again(folder))
    return entries


def _read_index(path: Path) -> Mapping[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: cannot be read as an index: {error!r}", _again(path)) from None
    good = isinstance(weight_map, dict) and weight_map
    if not good or any(not isinstance(v, str) or Path(v).name != v for v in weight_map.values()):
        raise ModelError(f"{path}: weight_map is not a table of file names in this folder", _again(path))
    return weight_map


def read_header(path: Path) -> dict[str, Entry]:
    """Entries of one safetensors file; its length must be exactly what the header says."""
    try:
        size = os.stat(path).st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise ModelError(f"{path}: {size:,} bytes, too short for its header of {length:,} bytes", _again(path))
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ModelError(f"{path}: this file is missing", _again(path)) from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}", _again(path)) from None
    except ValueError:
        raise ModelError(f"{path}: its header is damaged", _again(path)) from None
    return _entries(path, header, start=8 + length, size=size)


def _entries(path: Path, header: Any, start: int, size: int) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    end = start
    try:
        header.pop("__metadata__", None)
        ordered = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        for name, info in ordered:
            first, last = info["data_offsets"]
            shape, dtype = tuple(info["shape"]), info["dtype"]
            expected = math.prod(shape) * ELEMENT_BYTES.get(dtype, 1)
            known = dtype in ELEMENT_BYTES
            if start + first != end or last < first or (known and last - first != expected):
                raise ModelError(f"{path}: the header's place for {name} does not fit its shape", _again(path))
            entries[name] = Entry(path, dtype, shape, start + first, last - first)
            end = start + last
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ModelError(f"{path}: its header is damaged", _again(path)) from None
    if end != size:
        raise ModelError(f"{path}: {size:,} bytes long, its header says {end:,}", _again(path))
    return entries


def _check_tensor(entry: Entry, spec: TensorSpec) -> None:
    # fp32 tensors may have been written in bf16 by a converter; they are widened on load (section 13.3)
    if entry.dtype != spec.dtype and not (spec.dtype == F32 and entry.dtype == BF16):
        raise ModelError(
            f"{entry.file}: tensor {spec.name} has type {entry.dtype}, expected {spec.dtype}",
            "ling reads the published bf16 checkpoints: " + _again(entry.file),
        )
    shape = entry.shape
    if spec.name.endswith(".A_log") and math.prod(shape) == spec.numel:
        shape = spec.shape  # seen as [1, 1, H, 1] too
    if shape != spec.shape:
        raise ModelError(
            f"{entry.file}: tensor {spec.name} has shape {list(entry.shape)}, config.json implies {list(spec.shape)}",
            "config.json and weights do not belong together: " + _again(entry.file),
        )


def _nearest(name: str, wanted: Mapping[str, TensorSpec]) -> str:
    from difflib import get_close_matches  # errors only: not worth its import time otherwise

    close = get_close_matches(name, wanted, n=1, cutoff=0.8)
    return f" (close to {close[0]})" if close else ""


def hub_repository(folder: Path) -> str:
    """The repository whose snapshot in the Hugging Face cache this folder or file belongs to, or ""."""
    entry = next((above.name for above in (folder, *folder.parents) if above.name.startswith("models--")), "")
    return entry.removeprefix("models--").replace("--", "/", 1)


def model_name(folder: Path) -> str:
    """What a checkpoint folder is called: its name, or that of its repository where it has none of its own."""
    if folder.resolve() == demo_dir().resolve():
        return DEMO
    snapshot = folder.absolute()
    repo = hub_repository(snapshot) if snapshot.parent.name == "snapshots" else ""
    return repo.rpartition("/")[2] or folder.resolve().name


def _again(path: Path) -> str:
    """The repair, as a command where the file came from the Hub."""
    if repo := hub_repository(path):
        return f"fetch what is damaged again: ling pull {repo} --verify"
    what = "this file" if path.suffix in (".safetensors", ".json") else "what is missing"
    return f"copy {what} again to '{path.parent if path.suffix else path}', or fetch the model with `ling pull`"
