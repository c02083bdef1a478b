"""Measuring speed: repetitions of exactly the tokens asked for, and figures that agree with each other.

What is measured: `repetitions` requests of exactly `tokens` tokens each (every end of turn ignored), after
`warmup` shorter ones. No repetition can use what another one left in the engine's state: each prompt starts with
another word, and where a chat template forces a common beginning, a request of one other token goes between.
The report tells the cached tokens of each sample, and warns if there are any.

Engines that are compared (with drafts and without) run in turns, repetition by repetition, so that a machine that
warms up or gets busy does so for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median, stdev
from typing import Any

from ling_local.bench.machine import machine
from ling_local.bench.prompts import TASKS, as_prompt, bundled, forget, with_first_word
from ling_local.engine.protocol import Engine, EngineInfo
from ling_local.errors import UsageError, context_too_long
from ling_local.generate import TextModel, generate
from ling_local.types import Finish, FinishReason, Request, SamplingParams, Stats, StatsEvent

_WARMUP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. prompt_tokens 0: the task's prompt as it is, else about that many, cut or repeated.

    draft: let the engine speculate if it can; full_width: verify every draft, also where that is slower.
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


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """Where a run is. stage is "warm-up" or "run", repetition counts from 1; lane: which of several engines."""

    stage: str
    repetition: int
    repetitions: int
    tokens: int
    tokens_wanted: int
    lane: str = ""


ProgressFn = Callable[[BenchProgress], None]


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine of a comparison, and what to measure on it."""

    name: str
    engine: Engine
    plan: BenchPlan


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
    """One repetition. step_ms: the time of each step after the first, in order."""

    stats: Stats
    finish: FinishReason
    step_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Everything that was measured. exact: each repetition made exactly the tokens asked for."""

    plan: BenchPlan
    info: EngineInfo
    machine: dict[str, Any]
    samples: tuple[Sample, ...]
    warnings: tuple[str, ...] = field(default=())

    @property
    def exact(self) -> bool:
        return all(sample.stats.tokens == self.plan.tokens for sample in self.samples)

    @property
    def total(self) -> Stats:
        """Counts of all repetitions together; its times are undefined."""
        stats = [sample.stats for sample in self.samples]
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

    @property
    def ttft_ms(self) -> Summary | None:
        return summarise([s.stats.ttft_s * 1000 for s in self.samples if s.stats.ttft_s is not None])

    @property
    def tpot_ms(self) -> Summary | None:
        return summarise([s.stats.tpot_s * 1000 for s in self.samples if s.stats.tpot_s is not None])

    @property
    def step_ms(self) -> Summary | None:
        """Over all steps of all repetitions."""
        return summarise([step for sample in self.samples for step in sample.step_ms])

    @property
    def prefill_tok_s(self) -> Summary | None:
        """Prompt tokens really computed per second of prefill."""
        rates = [
            (s.stats.prompt_tokens - s.stats.cached_tokens) / s.stats.prefill_s
            for s in self.samples
            if s.stats.prefill_s
        ]
        return summarise(rates)


def run_bench(
    engine: Engine, text_model: TextModel, plan: BenchPlan, on_progress: ProgressFn | None = None
) -> BenchReport:
    """Measure. Raises UsageError for a plan that cannot be, ContextTooLong, and what the engine raises."""
    return run_lanes([Lane("", engine, plan)], text_model, on_progress)[0]


def run_lanes(
    lanes: Sequence[Lane], text_model: TextModel, on_progress: ProgressFn | None = None
) -> tuple[BenchReport, ...]:
    """Measure several engines in turns. Plans must agree in repetitions and warmup; raises as run_bench does."""
    for lane in lanes:
        _check_plan(lane.plan, lane.engine.info)
    first = lanes[0].plan
    samples: dict[str, list[Sample]] = {lane.name: [] for lane in lanes}
    for index in range(-first.warmup, first.repetitions):
        turn = index % len(lanes)  # another engine begins each time: none is always the one after the pause
        for lane in (*lanes[turn:], *lanes[:turn]):
            sample = _repeat(lane, text_model, index, on_progress or (lambda _: None))
            if index >= 0:
                samples[lane.name].append(sample)
    return tuple(_report(lane, samples[lane.name]) for lane in lanes)


def _check_plan(plan: BenchPlan, info: EngineInfo) -> None:
    if plan.task not in TASKS:
        raise UsageError(f"no such task {plan.task!r}", f"Tasks: {', '.join(TASKS)}.")
    for name, value, least in (
        ("tokens", plan.tokens, 1),
        ("repetitions", plan.repetitions, 1),
        ("warmup", plan.warmup, 0),
        ("prompt_tokens", plan.prompt_tokens, 0),
    ):
        if value < least:
            raise UsageError(f"{name} is {value}; a benchmark needs at least {least}")
    if plan.prompt_tokens >= info.context_limit:
        raise context_too_long(plan.prompt_tokens, info.context_limit)


def _repeat(lane: Lane, text_model: TextModel, index: int, report: ProgressFn) -> Sample:
    """One repetition; those of the warm-up have an index below 0."""
    plan = lane.plan
    if index < 0:
        stage, number, of = "warm-up", index + plan.warmup + 1, plan.warmup
        tokens = min(plan.tokens, _WARMUP_TOKENS)
    else:
        stage, number, of, tokens = "run", index + 1, plan.repetitions, plan.tokens
    request = _request(text_model, plan, index + plan.warmup, tokens)
    if plan.draft and lane.engine.info.forced:
        _say_once(lane.engine, text_model, request)
    elif plan.task == "chat":
        forget(lane.engine, text_model.encode(request)[0])

    def tell(done: int) -> None:
        report(BenchProgress(stage, number, of, done, tokens, lane.name))

    return _measure(lane.engine, text_model, request, tell)


def _say_once(engine: Engine, text_model: TextModel, request: Request) -> None:
    """Let the engine hear its own answer without drafts, which forced accept counts are made from, and forget it."""
    for _ in generate(engine, text_model, replace(request, draft=False)):
        pass
    forget(engine, text_model.encode(request)[0])


def _report(lane: Lane, samples: list[Sample]) -> BenchReport:
    result = BenchReport(lane.plan, lane.engine.info, machine(), tuple(samples))
    result = replace(result, warnings=tuple(_warnings(result)))
    check(result)
    return result


def _measure(engine: Engine, text_model: TextModel, request: Request, tell: Callable[[int], None]) -> Sample:
    tell(0)
    times: list[float] = []
    for event in generate(engine, text_model, request):
        if isinstance(event, StatsEvent):
            times.append(event.stats.wall_s)
            tell(event.stats.tokens)
        elif isinstance(event, Finish):
            steps = tuple((later - sooner) * 1000 for sooner, later in pairwise(times))
            return Sample(event.stats, event.reason, steps)
    raise AssertionError("a generation ends with Finish or an exception")


def _request(text_model: TextModel, plan: BenchPlan, index: int, tokens: int) -> Request:
    text = with_first_word(text_model, bundled(plan.task)[0], index, plan.prompt_tokens)
    sampling = replace(plan.sampling, seed=plan.sampling.seed + index)
    prompt = as_prompt(plan.task, text)
    return Request(
        prompt,
        sampling,
        tokens,
        thinking=plan.thinking,
        draft=plan.draft,
        ignore_eos=True,
        full_width=plan.full_width,
    )


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
    if plan.repetitions == 1:
        yield "one repetition: no standard deviation"
    if not plan.warmup:
        yield "no warm-up: the first figures hold one-time costs"


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


def check(report: BenchReport) -> None:
    """Figures that must agree with each other do, or we have counted wrongly."""
    for sample in report.samples:
        check_counts(sample.stats)
        stats = sample.stats
        assert stats.tpot_s is None or stats.tok_s is None or math.isclose(stats.tpot_s * stats.tok_s, 1)
    check_counts(report.total)
    for summary in (report.ttft_ms, report.tpot_ms, report.step_ms):
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
