"""Prompts for on-policy text: beginnings of documents and of answers, cut from a corpus, in one small file.

A corpus is a folder of NAME.jsonl. A line is a text, as JSON string, or a conversation, {"messages": [...]}, which
goes through the model's chat template. Texts of sets whose name ends in "chat" are conversations that the template
has rendered already. Sets named heldout_... or unseen_... are kept for figures and never trained on.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ling_local.errors import ModelError, UsageError
from ling_local.text.messages import messages_from_openai
from ling_local.text.template import ChatTemplate
from ling_local.text.tokenizer import Tokenizer as PlainTokenizer

HELDOUT = ("heldout_", "unseen_")
CODE_ANSWER, CHAT_ANSWER = 192, 256  # most tokens that the target adds to a prompt
SHORTEST, LONGEST = 8, 256  # tokens of a prompt
CHAT_LONGEST = 384
SHARES = {"code": 0.5, "chat": 0.3, "prose": 0.13, "snippet": 0.07}


@dataclass(frozen=True)
class Prompts:
    """tokens [n] int32, one prompt after the other; lengths, limits [p] int32; kinds [p]: the set of each.

    Every prompt begins with the id that stands between documents, if the model has one; limits: longest answers.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    limits: np.ndarray
    kinds: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def starts(self) -> np.ndarray:
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens, starts, lengths, limits as int64."""
        arrays = (self.tokens, self.starts, self.lengths, self.limits)
        return tuple(torch.from_numpy(a.astype(np.int64)) for a in arrays)  # type: ignore[return-value]

    def pick(self, wanted: Callable[[str], bool]) -> Prompts:
        """Those whose set is wanted."""
        return self.take(np.array([i for i, kind in enumerate(self.kinds) if wanted(str(kind))], dtype=np.int64))

    def take(self, order: np.ndarray) -> Prompts:
        """The prompts with these numbers, in this order."""
        starts = self.starts
        parts = [self.tokens[starts[i] : starts[i] + self.lengths[i]] for i in order]
        tokens = np.concatenate(parts) if parts else self.tokens[:0]
        return Prompts(tokens, self.lengths[order], self.limits[order], self.kinds[order])

    def trained(self) -> Prompts:
        return self.pick(lambda kind: not kind.startswith(HELDOUT))

    def heldout(self) -> dict[str, Prompts]:
        """Held-out prompts by set."""
        names = sorted({str(kind) for kind in self.kinds if str(kind).startswith(HELDOUT)})
        return {name: self.pick(lambda kind, name=name: kind == name) for name in names}


def save_prompts(prompts: Prompts, path: Path) -> int:
    """Write a compressed file; returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {name: getattr(prompts, name) for name in ("tokens", "lengths", "limits", "kinds")}
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)
    return path.stat().st_size


def load_prompts(path: Path) -> Prompts:
    """Read what save_prompts wrote. Raises ModelError."""
    try:
        with np.load(path, allow_pickle=False) as data:
            return Prompts(data["tokens"], data["lengths"], data["limits"], data["kinds"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{path}: cannot be read as prompts: {error}", "make it with: python -m ling_local.train draft-prompts"
        ) from None


def make_prompts(
    corpus: Path, model: Path, end_id: int | None, count: int, heldout: int, seed: int, shares: Mapping[str, float]
) -> Prompts:
    """Cut `count` prompts for training and `heldout` of each held-out set. The same seed gives the same prompts.

    shares: part of each training set; sets that it does not name are left out, unless it names none of them: then
    all get the same. Raises UsageError for a folder without sets.
    """
    files = {path.stem: path for path in sorted(corpus.glob("*.jsonl"))}
    named = {name: share for name, share in shares.items() if name in files}
    if not named:
        named = {name: 1.0 for name in files if not name.startswith(HELDOUT)}
    if not named:
        raise UsageError(f"{corpus}: no NAME.jsonl to take prompts from", "give a folder with one set a file")
    total = sum(named.values())
    wanted = {name: round(count * share / total) for name, share in named.items()}
    wanted |= {name: heldout for name in files if name.startswith(HELDOUT)}
    cutter = _Cutter(model, end_id)
    found: list[tuple[list[int], int, str]] = []
    for name, number in wanted.items():
        rng = random.Random(f"{seed} {name}")
        part = [(ids, limit, name) for ids, limit in cutter.cut(files[name], number, rng)]
        if name in named:
            found += part
        else:
            found = part + found
    order = np.random.default_rng(seed).permutation(len(found))
    prompts = Prompts(
        np.concatenate([np.array(ids, dtype=np.int32) for ids, _, _ in found] or [np.zeros(0, np.int32)]),
        np.array([len(ids) for ids, _, _ in found], dtype=np.int32),
        np.array([limit for _, limit, _ in found], dtype=np.int32),
        np.array([name for _, _, name in found]),
    )
    return prompts.take(order)


class _Cutter:
    """Cuts prompts with one model's tokenizer and template."""

    def __init__(self, model: Path, end_id: int | None) -> None:
        self.model = model
        self.before = [] if end_id is None else [end_id]
        self.encoder = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.open, self.close = (self.encoder.token_to_id(text) for text in ("<think>", "</think>"))
        self.plain: PlainTokenizer | None = None
        self.template: ChatTemplate | None = None

    def cut(self, path: Path, count: int, rng: random.Random) -> Iterator[tuple[list[int], int]]:
        """Up to `count` prompts of a set, with the longest answer of each."""
        rendered = path.stem.endswith("chat")
        data = path.read_bytes()
        ends = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == 10)
        made = 0
        for _ in range(4 * count):  # some places give nothing: an empty line, a conversation that is too long
            if made == count or not len(ends):
                return
            # a place in the file, not a line: long documents give more prompts
            at = int(np.searchsorted(ends, rng.randrange(len(data))))
            at = min(at, len(ends) - 1)
            line = json.loads(data[int(ends[at - 1]) + 1 if at else 0 : int(ends[at])])
            if isinstance(line, dict):
                ids, limit = self._conversation(line, rng), CHAT_ANSWER
            elif rendered:
                ids, limit = self._turn(line, rng), CHAT_ANSWER
            else:
                ids, limit = self._beginning(line, rng), CODE_ANSWER
            if ids:
                made += 1
                yield self.before + ids, limit

    def _beginning(self, text: str, rng: random.Random) -> list[int]:
        """From the start of a text or of one of its lines, a random length, longer ones rarer."""
        wanted = int(SHORTEST * (LONGEST / SHORTEST) ** rng.random())
        start = 0
        if rng.random() < 0.5:
            start = text.rfind("\n", 0, rng.randrange(len(text) + 1)) + 1
        self.encoder.encode_special_tokens = True  # spellings of control tokens in a text are text
        ids = self.encoder.encode(text[start : start + 12 * wanted], add_special_tokens=False).ids
        return ids[:wanted] if len(ids) >= SHORTEST else []

    def _turn(self, text: str, rng: random.Random) -> list[int]:
        """A rendered conversation up to where one of its answers begins, after the template's think block."""
        self.encoder.encode_special_tokens = False
        ids = self.encoder.encode(text, add_special_tokens=False).ids
        places = [i + 1 + (ids[i + 1 : i + 2] == [self.close]) for i, token in enumerate(ids) if token == self.open]
        places = [place for place in places if place <= CHAT_LONGEST]
        return ids[: rng.choice(places)] if places else []

    def _conversation(self, line: dict[str, object], rng: random.Random) -> list[int]:
        """Messages up to the last one of a person, as the model's own template puts them."""
        messages = messages_from_openai(line.get("messages") or [])  # type: ignore[arg-type]
        last = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
        if last < 0:
            return []
        if self.template is None or self.plain is None:
            self.template, self.plain = ChatTemplate.load(self.model), PlainTokenizer.load(self.model)
        ids = self.template.encode(self.plain, messages[: last + 1], thinking=rng.random() < 0.4)
        return ids if len(ids) <= CHAT_LONGEST else []
