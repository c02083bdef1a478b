"""Files to documents: read archives, clean, refuse what teaches nothing, drop copies, split off held-out files."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ling_local.train.sources import Source, canonical

CODE_SUFFIXES = (".py",)
PROSE_SUFFIXES = (".rst", ".md", ".rst.txt")
PACKAGE_CAP_BYTES = 16_000_000
HELDOUT_PER_10K = {"code": 50, "prose": 150}
SEEN_LINES = 0.6  # a file with more than this share of its longer lines seen before is a copy

_VENDORED = re.compile(
    r"(^|/)(_?vendor(ed)?|_?thirdparty(_files)?|_?third_party|externals?|extern|packages/(six|backports)|typeshed)(/|$)"
)
_GENERATED = re.compile(r"(_pb2(_grpc)?|_parsetab|_lextab|/migrations/\d{4}_\w+|/locale/\w+/formats)\.py$")
_COPYLEFT = re.compile(r"GNU (Lesser |Affero )?General Public|GPLv?[23]|Mozilla Public License|CC-BY-(SA|NC)", re.I)
_HEADER_WORDS = re.compile(r"licen[cs]e|copyright|all rights reserved|warrant", re.I)


@dataclass(frozen=True, slots=True)
class Document:
    """One cleaned text. kind is code, prose, snippet or chat."""

    package: str
    path: str
    kind: str
    text: str


def read_sources(files: dict[Source, Path]) -> Iterator[Document]:
    """Every usable file of the fetched packages and of this Python's standard library, cleaned."""
    yield from read_stdlib()
    for source, path in files.items():
        package = canonical(source.name)
        for name, data in _members(source, path):
            document = make_document(package, name, data)
            if document is not None:
                yield document


def read_stdlib() -> Iterator[Document]:
    """The standard library of the running Python, with its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(("site-packages/", "ensurepip/_bundled", "lib2to3/tests/data")):
            document = make_document("python", name, path.read_bytes())
            if document is not None:
                yield document


def make_document(package: str, name: str, data: bytes) -> Document | None:
    """A cleaned document of one file, or None if the file is not wanted."""
    kind = "code" if name.endswith(CODE_SUFFIXES) else "prose" if name.endswith(PROSE_SUFFIXES) else ""
    if not kind or not 150 <= len(data) <= 250_000 or _VENDORED.search(name) or _GENERATED.search(name):
        return None
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    text = clean(text)
    if _COPYLEFT.search(text[:4000]):
        return None
    text = strip_licence(text) if kind == "code" else text
    return Document(package, name, kind, text) if is_useful(text, kind) else None


def clean(text: str) -> str:
    """One newline convention, no trailing blanks, no runs of more than two empty lines, no BOM or NUL."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n").replace("\0", "").replace("\f", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def strip_licence(text: str) -> str:
    """Drop a leading comment block that speaks of licence or copyright: the same in thousands of files."""
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end]):
        end += 1
    head = "\n".join(lines[:end])
    if not _HEADER_WORDS.search(head):
        return text
    kept = [line for line in lines[:end] if line.startswith(("#!", "# -*-"))]
    return "\n".join(kept + lines[end:]).lstrip("\n")


def is_useful(text: str, kind: str) -> bool:
    """False for tables of data, minified or machine-written text, and what is hardly ASCII."""
    if len(text) < 120:
        return False
    lines = text.split("\n")
    if len(text) / len(lines) > (100 if kind == "code" else 400) or max(map(len, lines)) > (
        600 if kind == "code" else 4000
    ):
        return False
    digits = sum(text.count(d) for d in "0123456789")
    letters = sum(c.isalpha() for c in text[:20_000]) / min(len(text), 20_000)
    foreign = len(text.encode()) / len(text)
    return digits / len(text) < 0.15 and letters > 0.35 and foreign < 1.03


def _members(source: Source, path: Path) -> Iterator[tuple[str, bytes]]:
    if source.kind == "wheel":
        with zipfile.ZipFile(path) as wheel:
            for item in sorted(wheel.infolist(), key=lambda i: i.filename):
                if item.filename.endswith(CODE_SUFFIXES):
                    yield item.filename, wheel.read(item)
        return
    if source.kind == "deb":
        done = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(path)], capture_output=True, check=True)
        packed = io.BytesIO(done.stdout)
    else:
        packed = io.BytesIO(path.read_bytes())
    with tarfile.open(fileobj=packed) as archive:
        for item in archive:
            if item.isfile() and item.name.endswith((*CODE_SUFFIXES, *PROSE_SUFFIXES)):
                handle = archive.extractfile(item)
                if handle is not None:
                    yield item.name, handle.read()


def line_hashes(text: str) -> set[int]:
    """Hashes of the longer lines, the fingerprint for finding copies. Stable within one process only."""
    return {hash(line) for raw in text.split("\n") if len(line := raw.strip()) >= 24}


def order_key(document: Document) -> str:
    """A fixed shuffle: by hash of package, path and text."""
    return hashlib.sha256(f"{document.package}\0{document.path}\0{document.text}".encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Split:
    """train and held-out documents; unseen are whole packages that training never sees."""

    train: list[Document]
    heldout: list[Document]
    unseen: list[Document]
    dropped_copies: int


def split(documents: Iterable[Document], unseen: tuple[str, ...]) -> Split:
    """Drop copies, cap each package, and split. Unseen packages come first, so copies of them leave the rest."""
    ordered = sorted(documents, key=lambda d: (d.package not in unseen, order_key(d)))
    seen: set[int] = set()
    texts: set[str] = set()
    used: dict[str, int] = {}
    result = Split([], [], [], 0)
    copies = 0
    for document in ordered:
        if used.get(document.package, 0) + len(document.text) > PACKAGE_CAP_BYTES:
            continue
        lines = line_hashes(document.text)
        share = len(lines & seen) / len(lines) if lines else 0.0
        if document.text in texts or (lines and share > SEEN_LINES):
            copies += 1
            continue
        texts.add(document.text)
        seen |= lines
        used[document.package] = used.get(document.package, 0) + len(document.text)
        held = int(order_key(document)[-8:], 16) % 10_000 < HELDOUT_PER_10K[document.kind]
        target = result.unseen if document.package in unseen else result.heldout if held else result.train
        target.append(document)
    return Split(result.train, result.heldout, result.unseen, copies)
