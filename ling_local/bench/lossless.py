"""The check that drafts change nothing: every bundled prompt with each drafter and without, ids compared.

Each prompt runs greedily and sampled, exactly `tokens` tokens, from an empty state. The reference is an engine that
has no drafter loaded at all. One engine is open at a time: the reference first, then one for each drafter and block
size. Seconds are told beside the accept lengths, so that a machine on which drafting is slower shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from typing import Any

from ling_local.bench.figures import check_counts
from ling_local.bench.machine import machine
from ling_local.bench.prompts import TEXTS, Prompt, as_prompt, bundled, forget, last_tokens
from ling_local.bench.report import head, machine_facts, model_facts, speculation
from ling_local.engine.protocol import Engine, EngineInfo
from ling_local.errors import STOPS, UsageError
from ling_local.generate import TextModel, generate
from ling_local.types import Finish, FinishReason, Request, SamplingParams, Stats, StatsEvent

_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)
_WARMUP_TOKENS = 16

OpenMode = Callable[[str, int], AbstractContextManager[Engine]]


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """What to compare. prompt_tokens 0: the prompts as they are, else their last so many tokens.

    sampling   of the runs that are not greedy; block 0: the drafter's own; every_block: all sizes from 1 up
    full_width verify every draft of every step, also where plain steps would be faster
    """

    tokens: int = 128
    tasks: tuple[str, ...] = TEXTS
    prompt_tokens: int = 0
    sampling: SamplingParams = field(default_factory=lambda: _SAMPLED)
    block: int = 0
    every_block: bool = False
    thinking: bool = True
    full_width: bool = False


@dataclass(frozen=True, slots=True)
class CheckProgress:
    """Where a check is: the drafter and its block (0: without drafts), the run that begins, its tokens so far."""

    mode: str
    block: int
    run: int
    runs: int
    tokens: int
    tokens_wanted: int


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where ids differ, counted from 0; None where one side has ended."""

    position: int
    with_drafts: int | None
    without: int | None


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One prompt with one drafter at one block size, beside the run without drafts. Seconds hold the prefill."""

    prompt: Prompt
    sampled: bool
    mode: str
    block: int
    stats: Stats
    stats_off: Stats
    finish: FinishReason
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """All that was compared. info is that of the engine without drafts; marks: what makes it no ordinary run."""

    plan: CheckPlan
    info: EngineInfo
    machine: dict[str, Any]
    rows: tuple[CheckRow, ...]
    marks: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return all(row.difference is None for row in self.rows)


@dataclass(frozen=True, slots=True)
class _Ask:
    prompt: Prompt
    sampled: bool
    request: Request


@dataclass(frozen=True, slots=True)
class _Outcome:
    ids: tuple[int, ...]
    stats: Stats
    finish: FinishReason


def run_check(
    open_mode: OpenMode,
    text_model: TextModel,
    plan: CheckPlan,
    modes: Sequence[str],
    on_progress: Callable[[CheckProgress], None] | None = None,
    on_stop: Callable[[CheckReport], None] | None = None,
) -> CheckReport:
    """Compare each of modes ("auto", "mtp", "dspark") with an engine that open_mode("off", 0) gives.

    on_stop: is given what was compared by then, before what ended the run goes on.
    Raises UsageError where a mode has no drafter or the block is too large, and whatever the engine fails with.
    """
    tell = on_progress or (lambda _: None)
    with open_mode("off", 0) as engine:
        info = engine.info
        reference = list(_run_all(engine, text_model, plan, "off", tell))
    rows: list[CheckRow] = []

    def report() -> CheckReport:
        result = CheckReport(plan, info, machine(), tuple(rows), info.marks, tuple(_warnings(plan, reference, rows)))
        _check(result)
        return result

    try:
        for mode in modes:
            for engine in _engines(open_mode, mode, plan):
                drafter, block = engine.info.drafter, engine.info.block
                if any((row.mode, row.block) == (drafter, block) for row in rows):
                    continue  # "auto" beside the name of what it stands for
                made = _run_all(engine, text_model, plan, drafter, tell)
                for ask, drafted, plain in zip(_asks(text_model, plan), made, reference, strict=True):
                    different = first_difference(drafted.ids, plain.ids)
                    stats = drafted.stats, plain.stats
                    rows.append(CheckRow(ask.prompt, ask.sampled, drafter, block, *stats, drafted.finish, different))
    except STOPS:
        if on_stop and rows:
            on_stop(report())
        raise
    return report()


def _engines(open_mode: OpenMode, mode: str, plan: CheckPlan) -> Iterator[Engine]:
    """The engines of a mode, each open while the caller works on it: one, or one for each block size that it takes."""
    size = 1 if plan.every_block else plan.block
    while True:
        with ExitStack() as stack:
            try:
                engine = stack.enter_context(open_mode(mode, size))
                info = engine.info
            except UsageError:
                if plan.every_block and size > 1:  # larger than this drafter's block
                    return
                raise
            if info.drafter == "off":
                raise UsageError(f"{info.model} has no drafter to check", "Its text comes without speculation anyhow.")
            if plan.every_block and size > 1 and size > info.block:
                return
            yield engine
        if not plan.every_block or info.block != size:  # an engine whose block is fixed has but one size
            return
        size += 1


def _asks(text_model: TextModel, plan: CheckPlan) -> list[_Ask]:
    made = []
    for prompt in (prompt for task in plan.tasks for prompt in bundled(task)):
        text = last_tokens(text_model, prompt.text, plan.prompt_tokens) if plan.prompt_tokens else prompt.text
        for sampled in (False, True):
            sampling = plan.sampling if sampled else SamplingParams()
            request = Request(
                as_prompt(prompt.task, text),
                sampling,
                plan.tokens,
                thinking=plan.thinking,
                ignore_eos=True,
                full_width=plan.full_width,
            )
            made.append(_Ask(prompt, sampled, request))
    return made


def _run_all(
    engine: Engine, text_model: TextModel, plan: CheckPlan, mode: str, report: Callable[[CheckProgress], None]
) -> Iterator[_Outcome]:
    """Every prompt on one engine, after a few tokens that nobody times."""
    asks = _asks(text_model, plan)
    block = engine.info.block if mode != "off" else 0
    first = asks[0].request
    _run(engine, text_model, replace(first, max_tokens=min(_WARMUP_TOKENS, plan.tokens)), mode, lambda _: None)
    for number, ask in enumerate(asks, 1):

        def tell(done: int, number: int = number) -> None:
            report(CheckProgress(mode, block, number, len(asks), done, plan.tokens))

        yield _run(engine, text_model, ask.request, mode, tell)


def _run(engine: Engine, text_model: TextModel, request: Request, mode: str, tell: Callable[[int], None]) -> _Outcome:
    forget(engine, text_model.encode(request)[0])
    tell(0)
    for event in generate(engine, text_model, replace(request, draft=mode != "off")):
        if isinstance(event, StatsEvent):
            tell(event.stats.tokens)
        elif isinstance(event, Finish):
            return _Outcome(event.ids, event.stats, event.reason)
    raise AssertionError("a generation ends with Finish or an exception")


def first_difference(with_drafts: Sequence[int], without: Sequence[int]) -> Difference | None:
    """Where two id sequences part, or None where they are the same."""
    for position, (drafted, plain) in enumerate(zip_longest(with_drafts, without)):
        if drafted != plain:
            return Difference(position, drafted, plain)
    return None


def _warnings(plan: CheckPlan, reference: list[_Outcome], rows: list[CheckRow]) -> Iterator[str]:
    short = [outcome.stats.tokens for outcome in reference if outcome.stats.tokens < plan.tokens]
    if short:
        yield f"{len(short)} of {len(reference)} runs made fewer than {plan.tokens} tokens: the context is full"
    for mode, block in dict.fromkeys((row.mode, row.block) for row in rows):
        idle = sum(not row.stats.drafted for row in rows if (row.mode, row.block) == (mode, block))
        if idle:  # equal ids say nothing there
            yield f"{mode} with block {block}: the engine verified no draft in {idle} runs, as plain steps were faster"


def _check(report: CheckReport) -> None:
    for row in report.rows:
        check_counts(row.stats)
        check_counts(row.stats_off)
        assert row.stats_off.drafted == row.stats_off.accepted == 0
        assert row.difference is not None or row.stats.tokens == row.stats_off.tokens


def check_to_json(report: CheckReport, command: str = "") -> dict[str, Any]:
    """The report as a document, schema 1. command: what to type to have it again."""
    plan, info = report.plan, report.info
    return {
        **head(command),
        "same": report.same,
        "model": model_facts(info, draft=False),
        "machine": machine_facts(report.machine, info),
        "marks": list(report.marks),
        "run": {
            "tokens": plan.tokens,
            "tasks": list(plan.tasks),
            "prompt_tokens": plan.prompt_tokens,
            "sampled": asdict(plan.sampling),
            "full_width": plan.full_width,
            "context_limit": info.context_limit,
        },
        "rows": [_row(row) for row in report.rows],
        "warnings": list(report.warnings),
    }


def _row(row: CheckRow) -> dict[str, Any]:
    return {
        "prompt": row.prompt.name,
        "task": row.prompt.task,
        "sampling": "sampled" if row.sampled else "greedy",
        "drafter": row.mode,
        "block": row.block,
        "tokens": row.stats.tokens,
        "same": row.difference is None,
        "first_difference": asdict(row.difference) if row.difference else None,
        "seconds": row.stats.wall_s,
        "seconds_off": row.stats_off.wall_s,
        "speculation": speculation(row.stats),
    }
