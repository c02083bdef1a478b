"""The benchmark as data: runs the same line as every other command and keeps the figures; printing is the CLI's.

What is measured: `repetitions` requests of exactly `tokens` tokens each (every end of turn ignored), after
`warmup` shorter ones. No repetition can use what another one left in the engine's state: each prompt starts with
another word, and where a chat template forces a common beginning, a request of one other token goes between.
The report tells the cached tokens of each sample, and warns if there are any.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import ling_local
from ling_local.engine.protocol import Engine, EngineInfo
from ling_local.errors import UsageError, context_too_long
from ling_local.generate import TextModel, generate
from ling_local.types import (
    Finish,
    FinishReason,
    Message,
    Request,
    SamplingParams,
    Stats,
    StatsEvent,
    TokenRequest,
)

TASKS = ("code", "prose", "chat")
_PROMPTS = Path(__file__).parent / "data" / "prompts"
_WARMUP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure. prompt_tokens 0: the task's prompt as it is, else about that many, cut or repeated."""

    tokens: int = 256
    repetitions: int = 5
    warmup: int = 1
    task: str = "code"
    prompt_tokens: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    draft: bool = True
    thinking: bool = True


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """Where a run is. stage is "warm-up" or "run", repetition counts from 1."""

    stage: str
    repetition: int
    repetitions: int
    tokens: int
    tokens_wanted: int


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
    engine: Engine,
    text_model: TextModel,
    plan: BenchPlan,
    on_progress: Callable[[BenchProgress], None] | None = None,
) -> BenchReport:
    """Measure. Raises UsageError for a plan that cannot be, ContextTooLong, and what the engine raises."""
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
    if plan.prompt_tokens >= engine.info.context_limit:
        raise context_too_long(plan.prompt_tokens, engine.info.context_limit)
    report = on_progress or (lambda _: None)
    samples = []
    for index in range(-plan.warmup, plan.repetitions):
        warm = index < 0
        stage, number = ("warm-up", index + plan.warmup + 1) if warm else ("run", index + 1)
        of, tokens = (plan.warmup, min(plan.tokens, _WARMUP_TOKENS)) if warm else (plan.repetitions, plan.tokens)
        request = _request(text_model, plan, index + plan.warmup, tokens)
        if plan.task == "chat":
            _forget(engine, text_model.encode(request)[0])

        def tell(done: int, stage: str = stage, number: int = number, of: int = of, tokens: int = tokens) -> None:
            report(BenchProgress(stage, number, of, done, tokens))

        sample = _measure(engine, text_model, request, tell)
        if not warm:
            samples.append(sample)
    result = BenchReport(plan, engine.info, machine(), tuple(samples))
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
    text = _prompt(text_model, plan, index)
    sampling = replace(plan.sampling, seed=plan.sampling.seed + index)
    prompt = (Message("user", text),) if plan.task == "chat" else text
    return Request(prompt, sampling, tokens, thinking=plan.thinking, draft=plan.draft, ignore_eos=True)


def _prompt(text_model: TextModel, plan: BenchPlan, index: int) -> str:
    """The task's text after a first word that no other repetition has."""
    body = (_PROMPTS / f"{plan.task}.txt").read_text(encoding="utf-8")
    body = body if plan.task == "code" else body.rstrip("\n")
    words = (_PROMPTS / "first_words.txt").read_text(encoding="utf-8").split()  # one for each letter
    turn, letter = divmod(index, len(words))
    word = words[letter] + (str(turn) if turn else "")
    head = f"{word} = {index}\n\n" if plan.task == "code" else f"{word.capitalize()}.\n\n"
    if not plan.prompt_tokens:
        return head + body
    num_head = len(text_model.tokens.encode(head))
    ids = text_model.tokens.encode(body)
    wanted = max(1, plan.prompt_tokens - num_head)
    ids = (ids * math.ceil(wanted / len(ids)))[-wanted:]  # the end is where the text wants to go on
    return head + text_model.tokens.decode(ids)


def _forget(engine: Engine, first_id: int) -> None:
    """Replace what the engine's state holds by one id that the next prompt does not start with."""
    other = 0 if first_id else 1
    for _ in engine.generate(TokenRequest((other,), max_tokens=1)):
        pass


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
        stats = sample.stats
        assert stats.accept_length is not None
        assert math.isclose(stats.tokens, stats.steps * stats.accept_length)
        assert stats.accepted == sum(stats.accepted_by_position) <= stats.drafted
        assert stats.tokens == stats.steps + stats.accepted
        assert stats.tpot_s is None or stats.tok_s is None or math.isclose(stats.tpot_s * stats.tok_s, 1)
    for summary in (report.ttft_ms, report.tpot_ms, report.step_ms):
        if summary is not None:
            assert summary.min <= summary.median <= summary.p99 <= summary.max
            assert summary.min <= summary.mean <= summary.max


def machine() -> dict[str, Any]:
    """What this process can tell about the machine, without torch."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    return platform.machine()


def _memory_bytes() -> int | None:
    if sys.platform == "win32":
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def to_json(report: BenchReport) -> dict[str, Any]:
    """The report as a document, schema 1. Undefined figures are None."""
    plan, info, tpot = report.plan, report.info, report.tpot_ms
    return {
        "schema": 1,
        "ling": ling_local.__version__,
        "model": {
            "id": info.model,
            "dtype": info.dtype,
            "drafter": info.drafter if plan.draft else "off",
            "block": info.block if plan.draft else 0,
            "parameters": info.parameters,
            "weight_bytes": info.weight_bytes,
        },
        "machine": {**report.machine, "device": info.device, "ranks": info.ranks, "torch": info.torch or None},
        "run": {
            "task": plan.task,
            "prompt_tokens": report.samples[0].stats.prompt_tokens,
            "tokens": plan.tokens,
            "repetitions": plan.repetitions,
            "warmup": plan.warmup,
            "temperature": plan.sampling.temperature,
            "top_k": plan.sampling.top_k,
            "top_p": plan.sampling.top_p,
            "seed": plan.sampling.seed,
            "thinking": plan.thinking if plan.task == "chat" else None,
            "context_limit": info.context_limit,
            "exact": report.exact,
        },
        "ttft_ms": _summary(report.ttft_ms),
        "prefill": {"tok_s": _summary(report.prefill_tok_s), "cached_tokens": _total(report, "cached_tokens")},
        "decode": {
            "tpot_ms": _summary(tpot),
            "step_ms": _summary(report.step_ms),
            "tok_s": 1000 / tpot.mean if tpot and tpot.mean else None,
            "peak_tok_s": 1000 / tpot.min if tpot and tpot.min else None,
        },
        "speculation": _speculation(report),
        "samples": [_sample(sample) for sample in report.samples],
        "warnings": list(report.warnings),
    }


def _speculation(report: BenchReport) -> dict[str, Any]:
    """rate_by_position: share of all steps in which at least that many drafts were accepted."""
    tokens, steps = _total(report, "tokens"), _total(report, "steps")
    drafted, accepted = _total(report, "drafted"), _total(report, "accepted")
    rows = [sample.stats.accepted_by_position for sample in report.samples]
    width = max(map(len, rows))
    counts = [sum(row[position] for row in rows if position < len(row)) for position in range(width)]
    return {
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "rate": accepted / drafted if drafted else None,
        "accept_length": tokens / steps if steps else None,
        "rate_by_position": [count / steps for count in counts],
    }


def _sample(sample: Sample) -> dict[str, Any]:
    stats = sample.stats
    return {
        "tokens": stats.tokens,
        "finish": sample.finish.value,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "ttft_ms": _ms(stats.ttft_s),
        "tpot_ms": _ms(stats.tpot_s),
        "step_ms": _ms(stats.step_s),
        "prefill_ms": _ms(stats.prefill_s),
        "steps": stats.steps,
        "accept_length": stats.accept_length,
    }


def _total(report: BenchReport, name: str) -> int:
    return sum(getattr(sample.stats, name) for sample in report.samples)


def _summary(summary: Summary | None) -> dict[str, float | None]:
    names = ("mean", "sd", "median", "p99", "min", "max")
    return asdict(summary) if summary else dict.fromkeys(names)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
