"""Measuring speed: repetitions of exactly the tokens asked for, and figures that agree with each other.

What is measured: `repetitions` requests of exactly `tokens` tokens each (every end of turn ignored), after
`warmup` shorter ones. No repetition can use what another one left in the engine's state: each prompt starts with
another word, and where a chat template forces a common beginning, or chance may, a request of one other token goes
between. The report tells the cached tokens of each sample, and warns if there are any.

Engines that are compared (with drafts and without) run in turns, repetition by repetition, so that a machine that
warms up or gets busy does so for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ling_local.bench.conditions import Watch
from ling_local.bench.figures import Sample
from ling_local.bench.prompts import TASKS, as_prompt, bundled, forget, random_ids, with_first_word
from ling_local.bench.result import RANDOM_IN, BenchPlan, BenchReport, finished
from ling_local.engine.protocol import Engine, EngineInfo
from ling_local.errors import STOPS, UsageError, context_too_long
from ling_local.generate import TextModel, generate
from ling_local.types import Finish, Request, StatsEvent

_WARMUP_TOKENS = 128


@dataclass(frozen=True, slots=True)
class BenchProgress:
    """Where a run is. stage is "warm-up" or "run", repetition counts from 1; lane: which of several engines.

    share: of all tokens of all engines, how many are done, from 0 to 1
    """

    stage: str
    repetition: int
    repetitions: int
    tokens: int
    tokens_wanted: int
    lane: str = ""
    share: float = 0.0


ProgressFn = Callable[[BenchProgress], None]


@dataclass(frozen=True, slots=True)
class Lane:
    """One engine of a comparison, and what to measure on it."""

    name: str
    engine: Engine
    plan: BenchPlan


def run_bench(
    engine: Engine,
    text_model: TextModel,
    plan: BenchPlan,
    on_progress: ProgressFn | None = None,
    watch: Callable[[Sequence[str]], Watch] = Watch,
) -> BenchReport:
    """Measure. Raises UsageError for a plan that cannot be, ContextTooLong, and what the engine raises."""
    return run_lanes([Lane("", engine, plan)], text_model, on_progress, watch)[0]


def run_lanes(
    lanes: Sequence[Lane],
    text_model: TextModel,
    on_progress: ProgressFn | None = None,
    watch: Callable[[Sequence[str]], Watch] = Watch,
    on_stop: Callable[[tuple[BenchReport, ...]], None] | None = None,
) -> tuple[BenchReport, ...]:
    """Measure several engines in turns. Plans must agree in repetitions and warmup; raises as run_bench does.

    watch: what looks after the machine meanwhile; it is given the driver's names of all GPUs in use
    on_stop: is given the reports of the repetitions that all lanes have made, before what ended the run goes on
    """
    infos = {lane.name: lane.engine.info for lane in lanes}  # an engine that has died gives none
    for lane in lanes:
        _check_plan(lane.plan, infos[lane.name])
    lanes = [replace(lane, plan=fitted(lane.plan, infos[lane.name])) for lane in lanes]
    first = lanes[0].plan
    samples: dict[str, list[Sample]] = {lane.name: [] for lane in lanes}
    count = _Count(lanes, on_progress or (lambda _: None))
    watching = watch(infos[lanes[0].name].device_ids)

    def reports() -> tuple[BenchReport, ...]:
        free_bytes = max(info.free_bytes for info in infos.values())  # of the first that was loaded
        conditions = replace(watching.end(), gpu_free_bytes=free_bytes)
        whole = min(map(len, samples.values()))
        return tuple(finished(lane.plan, infos[lane.name], samples[lane.name][:whole], conditions) for lane in lanes)

    try:
        for index in range(-first.warmup, first.repetitions):
            turn = index % len(lanes)  # another engine begins each time: none is always the one after the pause
            for lane in (*lanes[turn:], *lanes[:turn]):
                sample = _repeat(lane, text_model, index, count)
                if index >= 0:
                    samples[lane.name].append(sample)
    except STOPS:
        if on_stop and all(samples.values()):
            on_stop(reports())
        raise
    return reports()


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
    needed = plan.tokens if plan.may_shorten else plan.prompt_tokens
    if needed >= info.context_limit:
        raise context_too_long(plan.prompt_tokens, info.context_limit)


def fitted(plan: BenchPlan, info: EngineInfo) -> BenchPlan:
    """The plan with a prompt that leaves room for its tokens, where it may be cut."""
    room = info.context_limit - plan.tokens
    return replace(plan, prompt_tokens=room) if plan.may_shorten and plan.prompt_tokens > room else plan


class _Count:
    """Tokens done of all that all engines will make, told with each step."""

    def __init__(self, lanes: Sequence[Lane], report: ProgressFn) -> None:
        self._all = 0
        for lane in lanes:
            plan = lane.plan
            tokens = plan.warmup * min(plan.tokens, _WARMUP_TOKENS) + plan.repetitions * plan.tokens
            self._all += tokens * (2 if _is_forced(lane) else 1)
        self._done = 0
        self._report = report

    def tell(self, progress: BenchProgress) -> None:
        self._report(replace(progress, share=min(1.0, (self._done + progress.tokens) / self._all)))

    def add(self, tokens: int) -> None:
        self._done += tokens


def _repeat(lane: Lane, text_model: TextModel, index: int, count: _Count) -> Sample:
    """One repetition; those of the warm-up have an index below 0."""
    plan = lane.plan
    if index < 0:
        stage, number, of = "warm-up", index + plan.warmup + 1, plan.warmup
        tokens = min(plan.tokens, _WARMUP_TOKENS)
    else:
        stage, number, of, tokens = "run", index + 1, plan.repetitions, plan.tokens
    request, ids = _request(text_model, plan, index + plan.warmup, tokens)

    def tell(done: int) -> None:
        count.tell(BenchProgress(stage, number, of, done, tokens, lane.name))

    tell(0)
    if _is_forced(lane):
        _say_once(lane.engine, text_model, request, ids, tell)
        count.add(tokens)
    elif plan.task in ("chat", "random"):
        forget(lane.engine, _first_id(text_model, request, ids))
    sample = _measure(lane.engine, text_model, request, ids, tell)
    count.add(tokens)
    return sample


def _is_forced(lane: Lane) -> bool:
    """Each repetition is then made once more before it is measured."""
    return lane.plan.draft and bool(lane.engine.info.forced)


def _say_once(
    engine: Engine, text_model: TextModel, request: Request, ids: Sequence[int] | None, tell: Callable[[int], None]
) -> None:
    """Let the engine hear its own answer without drafts, which forced accept counts are made from, and forget it."""
    for event in generate(engine, text_model, replace(request, draft=False), ids=ids):
        if isinstance(event, StatsEvent):
            tell(event.stats.tokens)
    forget(engine, _first_id(text_model, request, ids))


def _first_id(text_model: TextModel, request: Request, ids: Sequence[int] | None) -> int:
    return (ids or text_model.encode(request))[0]


def _measure(
    engine: Engine, text_model: TextModel, request: Request, ids: Sequence[int] | None, tell: Callable[[int], None]
) -> Sample:
    times: list[float] = []
    counts: list[int] = []
    for event in generate(engine, text_model, request, ids=ids):
        if isinstance(event, StatsEvent):
            stats = event.stats
            if stats.steps > len(times):  # a last step that only says that it was cancelled has no tokens
                times.append(stats.wall_s)
                counts.append(stats.tokens - sum(counts))
            tell(stats.tokens)
        elif isinstance(event, Finish):
            return Sample(event.stats, event.reason, tuple(times), tuple(counts))
    raise AssertionError("a generation ends with Finish or an exception")


def _request(text_model: TextModel, plan: BenchPlan, index: int, tokens: int) -> tuple[Request, list[int] | None]:
    """The request of a repetition; the prompt's ids where it is none of text, whose encoding is timed, too."""
    request = Request(
        "",
        replace(plan.sampling, seed=plan.sampling.seed + index),
        tokens,
        thinking=plan.thinking,
        draft=plan.draft,
        ignore_eos=True,
        full_width=plan.full_width,
    )
    if plan.task == "random":
        return request, random_ids(text_model, plan.sampling.seed + index, plan.prompt_tokens or RANDOM_IN)
    text = with_first_word(text_model, bundled(plan.task)[0], index, plan.prompt_tokens)
    return replace(request, prompt=as_prompt(plan.task, text)), None
