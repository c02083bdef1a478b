"""What to measure, and what was measured: figures over repetitions, and the reasons not to believe them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean, median
from typing import Any

from ling_local.bench.conditions import Conditions
from ling_local.bench.figures import Sample, Summary, check_samples, summarise, total
from ling_local.bench.machine import machine, usable_cpus
from ling_local.bench.public import ANSWER_TOKENS
from ling_local.engine.protocol import EngineInfo
from ling_local.types import FinishReason, SamplingParams, Stats

RANDOM_IN, RANDOM_OUT = 8192, 1024  # of the public record
_SPREAD_DOUBT, _DRIFT_DOUBT, _COLD_DOUBT = 0.03, 0.05, 0.10
_ENOUGH = 5  # repetitions that a trend can be seen in


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. prompt_tokens 0: the task's prompt as it is, else about that many, cut or repeated.

    draft       let the engine speculate if it can; full_width: verify every draft, also where that is slower
    may_shorten the prompt may be cut to what the context leaves, and the report then says so
    """

    tokens: int = 256
    repetitions: int = 5
    warmup: int = 1
    task: str = "code"
    prompt_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    draft: bool = True
    thinking: bool = True
    full_width: bool = False
    may_shorten: bool = False


@dataclass(frozen=True)
class BenchReport:
    """Everything that was measured. marks: what makes it no ordinary run; warnings: why not to believe it."""

    plan: BenchPlan
    info: EngineInfo
    machine: dict[str, Any]
    samples: tuple[Sample, ...]
    conditions: Conditions = field(default_factory=lambda: Conditions(len(usable_cpus())))
    marks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Each repetition made exactly the tokens asked for."""
        return all(sample.stats.tokens == self.plan.tokens for sample in self.samples)

    @cached_property
    def total(self) -> Stats:
        return total(self.samples)

    @cached_property
    def ttft_ms(self) -> Summary | None:
        return summarise([s.stats.ttft_s * 1000 for s in self.samples if s.stats.ttft_s is not None])

    @cached_property
    def tpot_ms(self) -> Summary | None:
        return summarise([s.stats.tpot_s * 1000 for s in self.samples if s.stats.tpot_s is not None])

    @cached_property
    def step_ms(self) -> Summary | None:
        """Over all steps of all repetitions."""
        return summarise([step for sample in self.samples for step in sample.step_ms])

    @cached_property
    def wall_s(self) -> Summary | None:
        """Request taken to the last token."""
        return summarise([sample.stats.wall_s for sample in self.samples])

    @cached_property
    def prefill_tok_s(self) -> Summary | None:
        """Prompt tokens really computed per second of prefill."""
        rates = [
            (s.stats.prompt_tokens - s.stats.cached_tokens) / s.stats.prefill_s
            for s in self.samples
            if s.stats.prefill_s
        ]
        return summarise(rates)

    @property
    def spread(self) -> float | None:
        """Standard deviation of TPOT over repetitions, as a share of its mean."""
        tpot = self.tpot_ms
        return tpot.sd / tpot.mean if tpot and tpot.sd is not None and tpot.mean else None

    @property
    def answer_s(self) -> float | None:
        """Seconds for an answer of 5,000 tokens: measured where so many were made, else TTFT and the rest at TPOT."""
        if self.answer_measured:
            return self.wall_s.median
        ttft, tpot = self.ttft_ms, self.tpot_ms
        return (ttft.median + (ANSWER_TOKENS - 1) * tpot.mean) / 1000 if ttft and tpot else None

    @property
    def answer_measured(self) -> bool:
        return self.plan.tokens == ANSWER_TOKENS and self.exact


def finished(plan: BenchPlan, info: EngineInfo, samples: Sequence[Sample], conditions: Conditions) -> BenchReport:
    """The report of what was measured, its figures checked against each other."""
    marks = info.marks
    if plan.task == "random" and (plan.prompt_tokens, plan.tokens) != (RANDOM_IN, RANDOM_OUT):
        why = f", as the context holds {info.context_limit:,}" if plan.may_shorten else ""
        marks += (f"NOT THE RECORD'S LENGTHS: {plan.prompt_tokens:,} tokens in, {plan.tokens:,} out{why}",)
    result = BenchReport(plan, info, machine(), tuple(samples), conditions, marks)
    result = replace(result, warnings=(*_warnings(result), *conditions.doubts()))
    check_samples(result.samples, (result.ttft_ms, result.tpot_ms, result.step_ms, result.wall_s))
    return result


def _warnings(report: BenchReport) -> Iterator[str]:
    plan, samples = report.plan, report.samples
    if not report.exact:
        made = sorted({sample.stats.tokens for sample in samples})
        limit = report.info.context_limit
        reason = f"; the context of {limit} is full" if samples[0].finish is FinishReason.LENGTH else ""
        yield f"made {' or '.join(map(str, made))} tokens a repetition where {plan.tokens} were asked for{reason}"
    if cached := sum(sample.stats.cached_tokens for sample in samples):
        yield f"{cached} prompt tokens were found in the engine's state: TTFT is too good"
    if report.tpot_ms is None:
        yield "time per token is undefined: all tokens came in one step"
    if len(samples) == 1:
        yield "one repetition: no standard deviation"
    if not plan.warmup:
        yield "no warm-up: the first figures hold one-time costs"
    if report.spread is not None and report.spread > _SPREAD_DOUBT:
        yield f"repetitions differ much: the standard deviation of TPOT is {100 * report.spread:.0f} % of its mean"
    yield from _trends([sample.stats.tpot_s for sample in samples if sample.stats.tpot_s])


def _trends(tpot_s: Sequence[float]) -> Iterator[str]:
    """A first repetition that was slower, later ones that are: neither is noise."""
    if len(tpot_s) < _ENOUGH:
        return
    half = len(tpot_s) // 2
    if tpot_s[0] > (1 + _COLD_DOUBT) * max(tpot_s[1:]):
        yield "the first repetition was slower than all others: give more --warmup"
    elif fmean(tpot_s[-half:]) > (1 + _DRIFT_DOUBT) * fmean(tpot_s[:half]) and min(tpot_s[-half:]) > median(tpot_s):
        yield "later repetitions were slower: the machine gets hot, or busy"
