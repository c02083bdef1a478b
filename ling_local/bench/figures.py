"""Figures of repetitions, and the identities between them that show a wrong count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

from ling_local.types import FinishReason, Stats

CHECKED = (  # what `check_samples` asserts, for reports
    "tokens = steps x accept length",
    "TPOT x tok/s = 1",
    "min <= median <= p99 <= max",
    "the histogram of accepted drafts adds up",
)


@dataclass(frozen=True, slots=True)
class Summary:
    """Over repetitions; None where undefined (sd of one value). p99 by linear interpolation."""

    mean: float
    sd: float | None
    median: float
    p99: float
    min: float
    max: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition. times_s: when each step's tokens came, since the request was taken; counts: how many."""

    stats: Stats
    finish: FinishReason
    times_s: tuple[float, ...]
    counts: tuple[int, ...]

    @property
    def step_ms(self) -> tuple[float, ...]:
        """The time of each step after the first, in order."""
        return tuple((later - sooner) * 1000 for sooner, later in pairwise(self.times_s))


def total(samples: Sequence[Sample]) -> Stats:
    """Counts of all repetitions together; its times are undefined."""
    stats = [sample.stats for sample in samples]
    rows = [s.accepted_by_position for s in stats]
    width = max(map(len, rows), default=0)
    return Stats(
        prompt_tokens=sum(s.prompt_tokens for s in stats),
        cached_tokens=sum(s.cached_tokens for s in stats),
        tokens=sum(s.tokens for s in stats),
        steps=sum(s.steps for s in stats),
        drafted=sum(s.drafted for s in stats),
        accepted=sum(s.accepted for s in stats),
        accepted_by_position=tuple(sum(row[j] for row in rows if j < len(row)) for j in range(width)),
    )


def accept_histogram(samples: Sequence[Sample]) -> tuple[int, ...]:
    """Entry j: steps that accepted exactly j drafts."""
    found = Counter(count - 1 for sample in samples for count in sample.counts)
    return tuple(found[j] for j in range(max(found, default=-1) + 1))


def summarise(values: Sequence[float]) -> Summary | None:
    """None for no values. The standard deviation is that of a sample (n - 1), by two passes."""
    if not values:
        return None
    ordered = sorted(values)
    place = 0.99 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return Summary(
        mean=min(max(fmean(ordered), ordered[0]), ordered[-1]),  # rounding must not put it outside
        sd=stdev(ordered) if len(ordered) > 1 else None,
        median=median(ordered),
        p99=ordered[low] + (ordered[high] - ordered[low]) * (place - low),
        min=ordered[0],
        max=ordered[-1],
    )


def check_samples(samples: Sequence[Sample], summaries: Sequence[Summary | None]) -> None:
    """Figures that must agree with each other do, or we have counted wrongly."""
    for sample in samples:
        stats = sample.stats
        check_counts(stats)
        assert stats.tpot_s is None or stats.tok_s is None or math.isclose(stats.tpot_s * stats.tok_s, 1)
        assert (len(sample.counts), sum(sample.counts)) == (stats.steps, stats.tokens)
        assert all(sooner <= later for sooner, later in pairwise(sample.times_s))
    everything, histogram = total(samples), accept_histogram(samples)
    check_counts(everything)
    assert sum(histogram) == everything.steps
    assert sum(j * steps for j, steps in enumerate(histogram)) == everything.accepted
    for summary in summaries:
        if summary is not None:
            assert summary.min <= summary.median <= summary.p99 <= summary.max
            assert summary.min <= summary.mean <= summary.max


def check_counts(stats: Stats) -> None:
    """Steps, drafts and tokens fit: a position's drafts are accepted in no more steps than those before it, and
    1 + the sum of the rates by position is the accept length."""
    assert stats.accept_length is not None
    assert math.isclose(stats.tokens, stats.steps * stats.accept_length)
    assert stats.accepted == sum(stats.accepted_by_position) <= stats.drafted
    assert stats.tokens == stats.steps + stats.accepted
    assert math.isclose(1 + sum(stats.rate_by_position), stats.accept_length)
    assert all(later <= sooner for sooner, later in pairwise((stats.steps, *stats.accepted_by_position)))
