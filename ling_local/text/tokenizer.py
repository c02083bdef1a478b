"""Text <-> ids, from a checkpoint's tokenizer.json. Text never becomes control ids: templates make those."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import tokenizers

from ling_local.errors import ModelError
from ling_local.text.clean import check_text

FILE_NAME = "tokenizer.json"
_REPAIR = "fetch the model again, or copy tokenizer.json from its repository"
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class Tokens(Protocol):
    """What the rest of the program knows of a tokenizer; the scripted engine brings its own."""

    @property
    def size(self) -> int:
        """Ids it defines: every id is below this; logits columns from here on are padding."""
        ...

    @property
    def control(self) -> Mapping[str, int]:
        """Spelling -> id of the tokens that no text encodes to."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of people's text: no control ids, whatever it spells, and nothing added."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Raw bytes of one id, which may be a part of a rune; b"" for ids that stand for nothing."""
        ...

    def is_control(self, token_id: int) -> bool: ...

    def decode(self, ids: Iterable[int]) -> str:
        """The joined bytes of all ids as text; impossible bytes are U+FFFD."""
        ...


def _byte_alphabet() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()


class Tokenizer:
    """A byte-level (or byte-fallback) BPE tokenizer; implements `Tokens`."""

    def __init__(self, data: dict[str, Any]) -> None:
        """From the parsed tokenizer.json. KeyError, TypeError or ValueError where it is unusable."""
        model = data["model"]
        if model.get("type", "BPE") != "BPE" or not isinstance(model["vocab"], dict):
            raise ValueError(f"it holds a {model.get('type')} model, and only BPE is supported")
        added = {str(t["content"]): int(t["id"]) for t in data.get("added_tokens") or ()}
        # Runs of blanks are sometimes added tokens too; those are ordinary text.
        self.control: Mapping[str, int] = MappingProxyType({s: i for s, i in added.items() if not s.isspace()})
        self._control_ids = frozenset(self.control.values())
        self._byte_fallback = bool(model.get("byte_fallback"))
        self._spelling = {i: s for s, i in model["vocab"].items() if i not in self._control_ids}
        self._literal = {i: s.encode() for s, i in added.items()}
        self.size = max([*self._spelling, *self._literal], default=-1) + 1
        self._check_bytes(model["vocab"])
        self._plain = tokenizers.Tokenizer.from_str(json.dumps(self._without_control(data)))
        self._known: dict[int, bytes] = dict(self._literal)

    @classmethod
    def load(cls, folder_or_file: Path) -> Tokenizer:
        """Read tokenizer.json. ModelError with file, reason and repair where it is missing or broken."""
        path = Path(folder_or_file)
        path = path / FILE_NAME if path.is_dir() else path
        try:
            return cls(json.loads(path.read_bytes()))
        except FileNotFoundError:
            raise ModelError(f"{path} is missing: without it text cannot be read", _REPAIR) from None
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}", "check its permissions") from error
        except Exception as error:  # `tokenizers` raises plain Exception for files that it cannot use
            reason = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ModelError(f"{path} is not a usable tokenizer: {reason}", _REPAIR) from error

    def _check_bytes(self, vocab: Mapping[str, int]) -> None:
        """ValueError where some byte has no token: such text would vanish without a word."""
        if self._byte_fallback:
            lost = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
        else:
            lost = [byte for char, byte in _ALPHABET.items() if char not in vocab]
        if lost:
            raise ValueError(f"{len(lost)} of 256 bytes have no token (the first is 0x{min(lost):02X})")

    def _without_control(self, data: dict[str, Any]) -> dict[str, Any]:
        """The same tokenizer, unable to produce a control id and with nothing added, cut or padded."""
        model = dict(data["model"], dropout=None)
        if model.get("unk_token") in self.control:
            model["unk_token"] = None
        if not self._control_ids.isdisjoint(model["vocab"].values()):
            vocab = {s: i for s, i in model["vocab"].items() if i not in self._control_ids}
            pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in model["merges"])
            model["merges"] = [[a, b] for a, b in pairs if a in vocab and b in vocab and a + b in vocab]
            model["vocab"] = vocab
        kept = [t for t in data.get("added_tokens") or () if t["content"] not in self.control]
        # The library numbers added tokens itself where the vocabulary does not know them.
        model["vocab"] = model["vocab"] | {t["content"]: t["id"] for t in kept}
        neutral = {"post_processor": None, "truncation": None, "padding": None}
        return data | neutral | {"model": model, "added_tokens": kept}

    def encode(self, text: str) -> list[int]:
        return self._plain.encode(check_text(text), add_special_tokens=False).ids if text else []

    def token_bytes(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._to_bytes(self._spelling.get(token_id, ""))
        return known

    def _to_bytes(self, spelling: str) -> bytes:
        if self._byte_fallback:
            single = _FALLBACK.match(spelling)
            return bytes.fromhex(single[1]) if single else spelling.replace("\u2581", " ").encode()
        try:
            return bytes(map(_ALPHABET.__getitem__, spelling))
        except KeyError:  # a token that was never spelt in the byte alphabet stands for its own text
            return spelling.encode()

    def is_control(self, token_id: int) -> bool:
        return token_id in self._control_ids

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")
