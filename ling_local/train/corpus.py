"""The corpus on disk: documents by set as JSON lines, then the same as token files that fit a small transfer.

Sets: code, prose, snippet, chat (training) and heldout_code, heldout_prose, heldout_chat, unseen_code (never trained).
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from ling_local.errors import ModelError
from ling_local.train.chats import extract_functions, make_chats
from ling_local.train.documents import Document, Split, read_sources, split
from ling_local.train.reference import read_entries
from ling_local.train.snippets import make_files, make_snippets
from ling_local.train.sources import UNSEEN, Say, fetch
from ling_local.train.vocab import CONTROL_TOKENS, PAD

TRAIN_SETS = ("code", "prose", "snippet", "chat")
HELDOUT_SETS = ("heldout_code", "unseen_code", "heldout_prose", "heldout_chat")
SEED = 20261129
CHAT_ROUNDS = 6
SNIPPET_ROUNDS = 120
SNIPPET_FILES = 30_000
MAX_DOCUMENT_CHARS = 100_000


@dataclass(frozen=True, slots=True)
class TokenSet:
    """tokens [N] uint16, each document followed by the end-of-text id; starts [d] int64; text_bytes of all."""

    tokens: np.ndarray
    starts: np.ndarray
    text_bytes: int


def build(work: Path, say: Say) -> dict[str, dict[str, int]]:
    """Fetch, clean, split and make conversations; writes work/text/SET.jsonl and work/corpus.json."""
    parts = split(read_sources(fetch(work, say)), UNSEEN)
    say(f"{len(parts.train)} files to train on, {parts.dropped_copies} copies dropped")
    folder = work / "text"
    folder.mkdir(parents=True, exist_ok=True)
    figures = {}
    for name, texts in _sets(parts, say):
        count = size = 0
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for text in texts:
                out.write(json.dumps(text[:MAX_DOCUMENT_CHARS], ensure_ascii=False) + "\n")
                count, size = count + 1, size + len(text[:MAX_DOCUMENT_CHARS].encode())
        figures[name] = {"documents": count, "bytes": size}
        say(f"{name}: {count} documents, {size / 1e6:.1f} MB")
    (work / "corpus.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    return figures


def _sets(parts: Split, say: Say) -> Iterator[tuple[str, Iterable[str]]]:
    yield "code", _texts(parts.train, "code")
    yield "prose", _texts(parts.train, "prose")
    yield "heldout_code", _texts(parts.heldout, "code")
    yield "heldout_prose", _texts(parts.heldout, "prose")
    yield "unseen_code", _texts(parts.unseen, "code")
    own = make_snippets(SEED, SNIPPET_ROUNDS)
    functions = extract_functions(parts.train, limit=30_000)
    say(f"{len(own)} snippets of our own, {len(functions)} short functions of training files")
    yield "snippet", _mixed(make_files(own, SEED, SNIPPET_FILES), [snippet.code for snippet in functions])
    entries = read_entries(parts.train)
    say(f"{len(entries)} entries of the library reference")
    yield "chat", make_chats(entries, own, functions, SEED, CHAT_ROUNDS)
    # new wordings and groupings of known facts: what the chat loss means (the facts were trained on)
    yield "heldout_chat", list(make_chats(entries, own, functions, SEED + 1, 1))[:400]


def _texts(documents: list[Document], kind: str) -> list[str]:
    return [document.text for document in documents if document.kind == kind]


def _mixed(first: list[str], second: list[str]) -> list[str]:
    """Both lists, spread evenly through each other."""
    keyed = [((i + 0.5) / len(texts), text) for texts in (first, second) if texts for i, text in enumerate(texts)]
    return [text for _, text in sorted(keyed)]


def read_set(work: Path, name: str, limit_bytes: int | None = None) -> Iterator[str]:
    """The documents of a set, up to a size."""
    path = work / "text" / f"{name}.jsonl"
    if not path.exists():
        raise ModelError(f"{path}: not there", "run: python -m ling_local.train corpus")
    size = 0
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            text = json.loads(line)
            size += len(text)
            if limit_bytes is not None and size > limit_bytes:
                return
            yield text


def pack(work: Path, tokenizer: Tokenizer, name: str, limit_bytes: int | None = None) -> TokenSet:
    """Encode one set. Control-token spellings inside code are not parsed; those of conversations are."""
    end = tokenizer.token_to_id(PAD)
    tokenizer.encode_special_tokens = not name.endswith("chat")
    pieces: list[np.ndarray] = []
    starts: list[int] = []
    total = size = 0
    batch: list[str] = []

    def flush() -> None:
        nonlocal total
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            starts.append(total)
            pieces.append(np.array([*encoding.ids, end], dtype=np.uint16))
            total += len(pieces[-1])
        batch.clear()

    for text in read_set(work, name, limit_bytes):
        batch.append(text)
        size += len(text.encode())
        if len(batch) == 512:
            flush()
    flush()
    return TokenSet(np.concatenate(pieces), np.array(starts, dtype=np.int64), size)


BLOCK_TOKENS = 4_000_000


def save_tokens(token_set: TokenSet, folder: Path, name: str) -> int:
    """Write NAME.tokens.xz (blocks, so that they pack and unpack in parallel) and NAME.json. Returns the bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = token_set.tokens
    blocks = [tokens[i : i + BLOCK_TOKENS].tobytes() for i in range(0, len(tokens), BLOCK_TOKENS)]
    with ProcessPoolExecutor() as pool:
        packed = list(pool.map(_compress, blocks))
    lengths = np.diff(np.append(token_set.starts, len(tokens)))
    (folder / f"{name}.starts.xz").write_bytes(lzma.compress(lengths.astype(np.uint32).tobytes()))
    (folder / f"{name}.tokens.xz").write_bytes(b"".join(packed))
    about = {"tokens": len(tokens), "bytes": token_set.text_bytes, "blocks": [len(block) for block in packed]}
    (folder / f"{name}.json").write_text(json.dumps(about), encoding="utf-8")
    return sum(map(len, packed))


def load_tokens(folder: Path, name: str) -> TokenSet:
    """Read what save_tokens wrote."""
    try:
        about = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        data = (folder / f"{name}.tokens.xz").read_bytes()
        lengths = np.frombuffer(lzma.decompress((folder / f"{name}.starts.xz").read_bytes()), dtype=np.uint32)
    except FileNotFoundError as error:
        raise ModelError(f"{error.filename}: not there", "run: python -m ling_local.train pack") from None
    blocks, at = [], 0
    for length in about["blocks"]:
        blocks.append(data[at : at + length])
        at += length
    with ProcessPoolExecutor() as pool:
        tokens = np.frombuffer(b"".join(pool.map(lzma.decompress, blocks)), dtype=np.uint16)
    starts = np.concatenate(([0], np.cumsum(lengths.astype(np.int64))[:-1]))
    return TokenSet(tokens, starts, about["bytes"])


def _compress(block: bytes) -> bytes:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 6, "lc": 0, "lp": 1, "pb": 1, "dict_size": 1 << 24}]
    return lzma.compress(block, format=lzma.FORMAT_XZ, filters=filters)


def tokenizer_texts(work: Path) -> Iterator[str]:
    """The part of the corpus that the tokenizer is trained on, control-token spellings taken out."""
    spelled = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
    for name, step in (("code", 7), ("prose", 3), ("chat", 16), ("snippet", 4)):
        for number, text in enumerate(read_set(work, name)):
            if number % step == 0:
                yield spelled.sub(" ", text)
