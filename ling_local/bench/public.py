"""A 5,000-token answer, here and in the public record that this project measures itself against."""

from __future__ import annotations

from dataclasses import dataclass

ANSWER_TOKENS = 5000
RECORD_MACHINE = "SGLang, four Blackwell GPUs, Ling-3.0-flash, 8,192 tokens in, 1,024 out, greedy"


@dataclass(frozen=True, slots=True)
class Public:
    """A published TPOT. seconds: of 5,000 tokens at that speed, the prefill not counted."""

    name: str
    tpot_ms: float
    seconds: float


RECORD = (Public("plain", 3.33, 16.6), Public("NEXTN", 1.53, 7.7), Public("DSpark", 0.78, 3.9))
