"""Figures as words: what the live lines and the quiet line after an answer say, and how it fits a width.

From `Stats` and `StepMark`s only, so from token ids and the engine's clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ling_local.tui.model import StepMark, Turn
from ling_local.types import Channel, FinishReason, Stats

SPAN_S = 1.0  # how far back "current" reaches
SEPARATOR = " · "


@dataclass(frozen=True, slots=True)
class Part:
    """One figure in words. Where room is short the parts with the smallest weight go first."""

    text: str
    weight: int
    style: str = ""


@dataclass(frozen=True, slots=True)
class Now:
    """What the last steps did, about a second of them; None where too few have come. tpot_s, step_s in seconds."""

    tpot_s: float | None = None
    step_s: float | None = None
    accept_length: float | None = None


def now(marks: Sequence[StepMark]) -> Now:
    """Current figures from the newest marks."""
    time_s, tokens, steps = 0.0, 0, 0
    for mark in reversed(marks):
        if time_s >= SPAN_S or (mark is marks[0] and not mark.time_s):
            break
        time_s, tokens, steps = time_s + mark.time_s, tokens + mark.tokens, steps + 1
    if not tokens or not time_s:
        return Now()
    return Now(time_s / tokens, time_s / steps, tokens / steps)


def speed_parts(turn: Turn, short: bool = False) -> list[Part]:
    """First live line: how fast tokens come, now and on average, and how the drafts fare. short: for narrow screens."""
    stats, current = turn.stats, now(turn.marks)
    if current.tpot_s is None:
        return [Part("first token", 9, "dim")] if stats.steps else []
    parts = [Part(f"TPOT {millis(current.tpot_s)} ms", 9, "bold")]
    if stats.tpot_s is not None:
        parts.append(Part(f"mean {millis(stats.tpot_s)}", 5))
    parts.append(Part(f"{rate(1 / current.tpot_s):>{1 if short else 4}} tok/s", 8, "bold"))
    if stats.drafted and current.step_s is not None:
        parts.append(Part(f"step {millis(current.step_s)} ms", 4))
        parts.append(Part(f"{'acc' if short else 'accept'} {stats.accept_length or 0:.2f}", 7, "bold"))
    return parts


def count_parts(turn: Turn, thinking_s: float | None) -> list[Part]:
    """Second live line: how many, how full, and since when."""
    stats = turn.stats
    parts = [Part(f"{stats.tokens:>4} tok", 9)]
    if stats.ttft_s is not None:
        parts.append(Part(f"TTFT {duration(stats.ttft_s)}", 7))
    if stats.context_limit:
        parts.append(Part(context(stats), 8))
    if stats.thinking_tokens:
        seconds = f"{duration(thinking_s)}, " if thinking_s is not None else ""
        parts.append(Part(f"thinking {seconds}{stats.thinking_tokens} tok", 5))
    if stats.drafted:
        parts.append(Part(f"drafts {100 * stats.accepted // stats.drafted} % kept", 3))
    parts.append(Part(prompt(stats), 6))
    return parts


def summary_parts(stats: Stats, reason: FinishReason) -> list[Part]:
    """The quiet line that stays: `212 tok`, `TTFT 84 ms`, `TPOT 2.10 ms (476 tok/s)`, ..."""
    parts = []
    if reason is FinishReason.CANCELLED:
        parts.append(Part("stopped", 10))
    elif reason is FinishReason.LENGTH:
        parts.append(Part("cut at limit", 10))
    parts.append(Part(f"{stats.tokens} tok", 9))
    if stats.ttft_s is not None:
        parts.append(Part(f"TTFT {duration(stats.ttft_s)}", 6))
    if stats.tpot_s is not None and stats.tok_s:
        parts.append(Part(f"TPOT {millis(stats.tpot_s)} ms", 8))
        parts.append(Part(f"{rate(stats.tok_s)} tok/s", 7))
    if stats.drafted and stats.accept_length is not None:
        parts.append(Part(f"accept {stats.accept_length:.2f}", 7))
    if stats.context_limit:
        parts.append(Part(context(stats), 5))
    if stats.cached_tokens:
        parts.append(Part(prompt(stats), 4))
    if stats.thinking_tokens:
        parts.append(Part(f"{stats.thinking_tokens} thinking", 3))
    return parts


def fit(parts: Sequence[Part], width: int) -> list[Part]:
    """The parts that fit into width cells with separators between them, in their order; the weightiest at least."""
    kept = list(parts)
    while len(kept) > 1 and line_width(kept) > width:
        kept.remove(min(kept, key=lambda part: part.weight))
    return kept


def line_width(parts: Sequence[Part]) -> int:
    """Cells that the parts take with the separators."""
    return sum(len(part.text) for part in parts) + len(SEPARATOR) * max(len(parts) - 1, 0)


def thinking_time_s(turn: Turn) -> float | None:
    """How long it has thought by the engine's clock; None where it has not."""
    stats = turn.stats
    if not stats.thinking_tokens or stats.ttft_s is None:
        return None
    if turn.channel is not Channel.THINKING:
        return turn.thought_s
    start_s = stats.ttft_s if turn.thought_start_s is None else turn.thought_start_s
    return turn.thought_s + max(stats.wall_s - start_s, 0.0)


def context(stats: Stats) -> str:
    """`ctx 1.9k/128k`"""
    used = f"ctx {count(stats.prompt_tokens + stats.tokens)}"
    return f"{used}/{count(stats.context_limit)}" if stats.context_limit else used


def prompt(stats: Stats) -> str:
    """How much of the prompt was read anew, and how much the state held already."""
    new = stats.prompt_tokens - stats.cached_tokens
    return f"prompt {count(new)} new + {count(stats.cached_tokens)} cached" if stats.cached_tokens else f"prompt {new}"


def count(tokens: int) -> str:
    """Tokens in at most four characters or so: 912, 1.9k, 128k. k is 1024."""
    if tokens < 1000:
        return str(tokens)
    return f"{tokens / 1024:.1f}k" if tokens < 10_000 else f"{tokens / 1024:.0f}k"


def turn_count(num: int) -> str:
    """`1 turn`, `2 turns`"""
    return f"{num} turn{'' if num == 1 else 's'}"


def millis(seconds: float) -> str:
    """Milliseconds with three digits, as long for 2.13 as for 21.3, so that figures stand still."""
    value = seconds * 1000
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def rate(per_second: float) -> str:
    """Tokens per second."""
    return f"{per_second:.0f}" if per_second >= 99.5 else f"{per_second:.1f}"


def duration(seconds: float) -> str:
    """`84 ms`, `3.2 s`, `2 min 5 s`"""
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
