"""Find models: the demo that ships with ling, folders, and what Hugging Face tools have downloaded. No network."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling_local import paths
from ling_local.errors import ModelError
from ling_local.paths import DEMO
from ling_local.published import PUBLISHED, Published, find_published, size_text, spellings

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_CACHE = "Hugging Face cache"
_DIGEST = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. problem says why it cannot be used, "" if it can.

    draft       it is a drafter, not a model that could answer
    part_bytes  what lies here of files that are still to come
    """

    name: str
    folder: Path
    source: str
    size_bytes: int
    problem: str = ""
    draft: bool = False
    part_bytes: int = 0


def find_model(name: str | None, *, offline: bool = False) -> Path:
    """The checkpoint folder that name stands for; None is the demo.

    An existing folder wins, then the demo's name, then folders in the models directory, then the Hugging Face
    cache (full or short names, any case). Raises ModelError: not here, incomplete, or no model by itself.
    offline: nothing may be fetched, which the error then says.
    """
    if name is None:
        return _whole(DEMO, paths.demo_dir())
    if not name:  # as a path it would be the working folder
        raise ModelError("the name of the model is empty", "Leave it out for ling-demo, or see `ling models`.")
    path = paths.user_path(name)
    try:
        if path.is_dir():
            return _whole(name, path)
        if path.exists():
            raise ModelError(f"'{name}' is a file, not a checkpoint folder", "Give the folder that holds config.json.")
    except (OSError, ValueError) as error:
        raise ModelError(f"'{name}' cannot be looked at: {error}") from None
    if name.lower() == DEMO:
        return _whole(DEMO, paths.demo_dir())
    row = find_published(name)
    for folder in _folders(paths.models_dir()):
        if name.lower() in spellings(folder.name):
            return _whole(folder.name, folder)
    for repo, folder in _cached():
        if name.lower() in spellings(repo) or (row is not None and repo.lower() == row.repo.lower()):
            if _is_draft(repo):
                hint = "Name the model; it drafts with this by itself (`ling help speculation`)."
                raise ModelError(f"'{repo}' is a drafter, which cannot answer by itself", hint)
            return _whole(repo, folder)
    raise _not_here(name, offline)


def cached_folder(repo: str) -> Path | None:
    """The newest snapshot of that repository in the Hugging Face cache, whole or not."""
    return next((folder for name, folder in _cached() if name.lower() == repo.lower()), None)


def names_here() -> tuple[str, ...]:
    """The names that -m takes on this machine, without a look inside: for shell completion."""
    cached = [repo for repo, _ in _cached() if not _is_draft(repo)]
    return (DEMO, *(folder.name for folder in _folders(paths.models_dir())), *cached)


def size_of(path: Path) -> int | None:
    """Length of the file, None where there is none (a link to nothing included)."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def promised_digest(file: Path) -> str:
    """The hash that a file's bytes must have, which is its name in a Hugging Face cache; "" for a file of one's own."""
    blob = file.resolve()
    return blob.name if blob.parent.name == "blobs" and _DIGEST.fullmatch(blob.name) else ""


def new_digest(digest: str, num_bytes: int) -> Any:
    """An empty hash of the kind that `digest` is, for a file of num_bytes; a git id begins with a header of its own."""
    if len(digest) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % num_bytes, usedforsecurity=False)


def list_models(folders: tuple[Path, ...] = ()) -> tuple[LocalModel, ...]:
    """Everything that can be named here, and the given folders; incomplete ones say what is missing."""
    demo = _describe(DEMO, paths.demo_dir(), "built in")
    given = tuple(_describe(str(folder), paths.user_path(str(folder)), "folder") for folder in folders)
    return (demo, *_named(), *given)


def check_folder(folder: Path) -> str:
    """What makes this folder unusable as a checkpoint, or "". Reads headers and compares lengths, no weights."""
    from ling_local.engine.checkpoint import read_entries

    problem = missing_file(folder)
    if problem:
        return problem
    try:
        read_entries(folder)
    except ModelError as error:
        return error.message
    return ""


def missing_file(folder: Path) -> str:
    """The first file that the folder's own index promises and that is not there, as a phrase, or ""."""
    try:
        return _missing(folder) if folder.is_dir() else "there is no such folder"
    except OSError as error:  # it belongs to others
        return f"{Path(error.filename).name} cannot be read: {error.strerror}"


def _missing(folder: Path) -> str:
    if not (folder / "config.json").is_file():
        return "config.json is missing"
    index = folder / INDEX
    if index.is_file():
        try:
            files = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
            return next((f"{file} is missing" for file in files if not (folder / file).is_file()), "")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"{INDEX} is damaged"
    if (folder / SINGLE).is_file():
        return ""
    shards = any(folder.glob("*.safetensors"))
    return f"{INDEX} is missing" if shards else "its weights (*.safetensors) are missing"


def _describe(name: str, folder: Path, source: str) -> LocalModel:
    problem = check_folder(folder)
    size = sum(size_of(file) or 0 for file in folder.glob("*.safetensors"))
    parts = 0
    if source == _CACHE and problem:
        parts = sum(size_of(file) or 0 for file in (folder.parents[1] / "blobs").glob("*.incomplete"))
    return LocalModel(name, folder, source, size, problem, _is_draft(name), parts)


def _is_draft(name: str) -> bool:
    return name.lower().endswith("-dspark")


def _named() -> tuple[LocalModel, ...]:
    found = [_describe(folder.name, folder, "models folder") for folder in _folders(paths.models_dir())]
    for repo, folder in _cached():
        found.append(_describe(repo, folder, _CACHE))
    return tuple(found)


def _folders(parent: Path) -> Iterator[Path]:
    try:
        yield from sorted(entry for entry in parent.iterdir() if entry.is_dir())
    except OSError:  # not there, or not ours to read: then nothing in it has a name here
        return


def _cached() -> Iterator[tuple[str, Path]]:
    """(repository, snapshot folder) of each Ling checkpoint in the Hugging Face cache, main revision first."""
    for entry in _folders(paths.hugging_face_cache()):
        kind, _, rest = entry.name.partition("--")
        repo = rest.replace("--", "/", 1)
        folder = _snapshot(entry) if kind == "models" else None
        if folder is not None and ("ling" in repo.lower() or _is_ling(folder)):
            yield repo, folder


def _is_ling(folder: Path) -> bool:
    """A checkpoint of the architecture under another name."""
    try:
        return b"bailing_hybrid" in (folder / "config.json").read_bytes()
    except OSError:
        return False


def _snapshot(entry: Path) -> Path | None:
    """The snapshot that refs/main names, else the newest one."""
    try:
        revision = (entry / "refs" / "main").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    named = entry / "snapshots" / revision
    if revision and named.is_dir():
        return named
    others = list(_folders(entry / "snapshots"))
    return max(others, key=lambda folder: folder.stat().st_mtime) if others else None


def _whole(name: str, folder: Path) -> Path:
    problem = missing_file(folder)
    if not problem:
        return folder
    hint = "Give a folder in the published layout: config.json, tokenizer.json, *.safetensors."
    if _inside(folder, paths.hugging_face_cache()):
        hint = f"get: ling pull {name}    (goes on where it stopped)"
    elif _inside(folder, paths.demo_dir()):
        hint = "Install ling-local again."
    raise ModelError(f"model '{name}' cannot be used: {folder}: {problem}", hint)


def _inside(folder: Path, parent: Path) -> bool:
    return Path(os.path.abspath(folder)).is_relative_to(os.path.abspath(parent))


def _not_here(name: str, offline: bool) -> ModelError:
    here = [model.name for model in list_models() if not model.problem and not model.draft]
    spelt = {spelling: model for model in here for spelling in spellings(model)}
    for row in PUBLISHED:
        spelt |= dict.fromkeys((row.name, *spellings(row.repo)), row.repo)
    meant = difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=0.6)
    repo = spelt[meant[0]] if meant else ""
    lines = [f"here:  {', '.join(f'{item} (built in)' if item == DEMO else item for item in here) or 'none'}"]
    exact = find_published(name)
    if repo and exact is None:
        lines.insert(0, f"near:  {repo}")
    row = exact or next((row for row in PUBLISHED if row.repo == repo), None)
    models = [row for row in PUBLISHED if not row.refusal and not row.draft_for]
    for wanted in [row] if row else models if not repo else []:
        lines.append(_how_to_get(wanted, offline))
    return ModelError(f"model '{name}' is not on this machine.", "\n".join(lines))


def _how_to_get(row: Published, offline: bool) -> str:
    if row.refusal:
        return f"note:  {row.repo}: {row.refusal}"
    note = "; offline now" if offline else ""
    return f"get:   ling pull {row.repo}    (about {size_text(row.size_bytes)}, {_free()}{note})"


def _free() -> str:
    folder = paths.hugging_face_cache()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return f"{shutil.disk_usage(folder).free / 1e9:.0f} GB free"
    except OSError:
        return "free space unknown"
