"""Figures of a generation, as one line for a person and as plain data for JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ling_local.types import Stats


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def stats_line(stats: Stats) -> str:
    """`212 tok · TTFT 84 ms · TPOT 2.1 ms (476 tok/s) · ctx 1.9k/128k`; what is undefined is left out."""
    parts = [f"{stats.tokens} tok"]
    if stats.thinking_tokens:
        parts[0] += f" ({stats.thinking_tokens} thinking)"
    if stats.ttft_s is not None:
        parts.append(f"TTFT {_short(stats.ttft_s * 1000)} ms")
    if stats.tpot_s is not None:
        speed = f" ({_short(stats.tok_s)} tok/s)" if stats.tok_s else ""
        parts.append(f"TPOT {_short(stats.tpot_s * 1000)} ms{speed}")
    if stats.drafted and stats.accept_length is not None:
        counts = f"{stats.steps} steps, {stats.drafted} drafted, {stats.accepted} accepted"
        parts.append(f"accept {stats.accept_length:.2f} ({counts}{rates_text(stats.rate_by_position, ': ')})")
    used = f"ctx {_count(stats.prompt_tokens + stats.tokens)}"
    parts.append(used + (f"/{_count(stats.context_limit)}" if stats.context_limit else ""))
    return " · ".join(parts)


def rates_text(rates: Sequence[float], lead: str = "") -> str:
    """`84 61 40 %`: rates by position, in whole per cent; "" where there are none."""
    return f"{lead}{' '.join(f'{100 * rate:.0f}' for rate in rates)} %" if rates else ""


def _short(value: float | None) -> str:
    value = value or 0.0
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _count(tokens: int) -> str:
    return str(tokens) if tokens < 10_000 else f"{tokens / 1024:.0f}k"


def usage_dict(stats: Stats) -> dict[str, int]:
    """Token counts, under the names that clients of model servers know."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "completion_tokens": stats.tokens,
        "thinking_tokens": stats.thinking_tokens,
    }


def stats_dict(stats: Stats) -> dict[str, Any]:
    """Times in milliseconds, None where undefined. Rates by position: see `bench.report.speculation`."""
    if stats.steps:  # counted twice in two ways, by tokens and by position: they agree, or we have miscounted
        assert stats.tokens == stats.steps + stats.accepted
        assert math.isclose(1 + sum(stats.rate_by_position), stats.tokens / stats.steps)
    return {
        "ttft_ms": _ms(stats.ttft_s),
        "ttfa_ms": _ms(stats.ttfa_s),
        "tpot_ms": _ms(stats.tpot_s),
        "tok_s": None if stats.tok_s is None else round(stats.tok_s, 2),
        "prefill_ms": _ms(stats.prefill_s),
        "wall_ms": _ms(stats.wall_s),
        "steps": stats.steps,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "rate": stats.rate,
        "accept_length": stats.accept_length,
        "rate_by_position": list(stats.rate_by_position),
        "rate_given_previous": list(stats.rate_given_previous),
    }
