"""Tokens without a tokenizer, for models whose text means nothing: an id is written as its number."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

_PIECE = re.compile(r"<(\d+)>|\S+")


@dataclass(frozen=True, slots=True)
class NumberedTokens:
    """`size` ids, none of them a control token. `<17>` is the id 17; every other word is some id, always the same."""

    size: int

    @property
    def control(self) -> Mapping[str, int]:
        return MappingProxyType({})

    def encode(self, text: str) -> list[int]:
        return [self._id(piece) for piece in _PIECE.finditer(text)]

    def token_bytes(self, token_id: int) -> bytes:
        return b"<%d>" % token_id

    def is_control(self, token_id: int) -> bool:
        return False

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f"<{token_id}>" for token_id in ids)

    def _id(self, piece: re.Match[str]) -> int:
        number = piece.group(1)
        return (int(number) if number else zlib.crc32(piece.group().encode())) % self.size
