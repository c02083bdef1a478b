"""Rows of training tokens: which document and offset each row of each step starts at. Seeded, any step by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ling_local.train.corpus import TokenSet


@dataclass(frozen=True)
class Mix:
    """share: part of each step's rows; snap: part of a set's rows that start where a document starts."""

    share: float
    snap: float


MIX = {"code": Mix(0.70, 0.4), "prose": Mix(0.10, 0.4), "snippet": Mix(0.06, 0.9), "chat": Mix(0.14, 1.0)}


class Sampler:
    """Start positions in the joined token array, set after set.

    Every set is cut into rows on a grid that moves each epoch and is passed through in a new order, so that one epoch
    sees every token about once; `snap` moves some rows to the document start before them.
    """

    def __init__(self, sets: Mapping[str, TokenSet], seed: int, mix: Mapping[str, Mix] = MIX) -> None:
        self.sets, self.seed, self.mix = sets, seed, mix
        self.offsets: dict[str, int] = {}
        self.epochs: dict[str, tuple[tuple[int, int], np.ndarray, int]] = {}  # set: (epoch, length), order, shift
        at = 0
        for name, tokens in sets.items():
            self.offsets[name] = at
            at += len(tokens.tokens)

    def joined(self) -> np.ndarray:
        """All tokens, uint16, in the order that starts refer to."""
        return np.concatenate([tokens.tokens for tokens in self.sets.values()])

    def counts(self, rows: int) -> dict[str, int]:
        """Rows of each set in a step of `rows`; the first set takes what rounding leaves."""
        names = list(self.sets)
        counts = {name: round(rows * self.mix[name].share) for name in names[1:]}
        return {names[0]: rows - sum(counts.values()), **counts}

    def starts(self, first_row: int, rows: int, length: int) -> np.ndarray:
        """Start of each row of a step [rows] int64. first_row: rows of this length drawn in earlier steps."""
        picked = []
        for name, count in self.counts(rows).items():
            done = first_row // rows * count
            picked.append(self._pick(name, np.arange(done, done + count), length))
        return np.concatenate(picked)

    def _pick(self, name: str, numbers: np.ndarray, length: int) -> np.ndarray:
        tokens = self.sets[name]
        size = len(tokens.tokens)
        per_epoch = max((size - 1) // length - 1, 1)
        result = np.empty(len(numbers), dtype=np.int64)
        for i, number in enumerate(numbers):
            epoch, index = divmod(int(number), per_epoch)
            order, shift = self._epoch(name, epoch, per_epoch, length)
            start = int(order[index]) * length + shift
            draw = np.random.default_rng((self.seed, len(name), epoch, int(order[index])))
            if draw.random() < self.mix[name].snap:
                start = int(tokens.starts[np.searchsorted(tokens.starts, start, side="right") - 1])
            result[i] = max(0, min(start, size - length - 1)) + self.offsets[name]
        return result

    def _epoch(self, name: str, epoch: int, per_epoch: int, length: int) -> tuple[np.ndarray, int]:
        key = (epoch, length)
        if name not in self.epochs or self.epochs[name][0] != key:
            rng = np.random.default_rng((self.seed, sum(map(ord, name)), epoch, length))
            self.epochs[name] = (key, rng.permutation(per_epoch), int(rng.integers(length)))
        _, order, shift = self.epochs[name]
        return order, shift
