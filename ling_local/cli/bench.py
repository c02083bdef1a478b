"""`ling bench`: speed with and without drafts, and the check that drafts change nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ling_local.cli import options as opt
from ling_local.cli.bench_dummy import check_dummy_flags, print_breakdown
from ling_local.cli.bench_engines import engines_asked, explain_all, for_engine
from ling_local.cli.bench_files import check_files, command_line, deliver, stop_mark
from ling_local.cli.bench_tables import FORMATS, aligned, compared_cells, compared_lines, lane_name, warnings
from ling_local.cli.opening import Opened, open_model, open_other, sampling, wait_loaded
from ling_local.cli.output import Output
from ling_local.cli.pages import Page
from ling_local.engine.protocol import Engine, EngineInfo
from ling_local.errors import STOPS, UsageError
from ling_local.settings import TABLE, Settings, nearest

if TYPE_CHECKING:
    from ling_local.bench import BenchPlan, BenchProgress, BenchReport
    from ling_local.bench.report import Document

PAGE = Page(
    "[OPTIONS]",
    examples=(
        "ling bench --tokens 5000",
        "ling bench --modes off,mtp,dspark --task prose",
        "ling bench --speculation off --tokens 500 -r 10 --json | jq .decode.tpot_ms.p99",
        "ling bench --check --tokens 500 --modes mtp,dspark --check-blocks all --full-width",
        "ling bench --task random --requests 20           as the public record: 8,192 tokens in, 1,024 out",
        "ling bench --save before.json; ling bench --compare before.json",
        "ling bench --tokens 1000 --plot speed.svg",
        "ling bench --md >> notes.md",
        "ling bench --dummy tiny --device cuda --prompt-tokens 8192 --accept-pattern 3,0,7",
        "ling bench --dummy flash --shard 4 --device cuda --breakdown",
        "ling bench --engine native,sglang -m inclusionAI/Ling-3.0-tiny --device cuda",
    ),
    rare=("prompt_tokens", "temperature", "top_p", "top_k", "seed", "think", *opt.RARE_OF_BENCH),
    defaults=(("seed", "0"), ("task", "code; all of them for --check")),
    notes="Each repetition makes exactly --tokens tokens (the end of a turn is ignored) from a prompt of its own; "
    "exit code 1 if one could not. The model's own sampling defaults are not taken: greedy unless you say otherwise. "
    "Without --modes and --speculation a model that has a drafter is measured without and with it, repetition by "
    "repetition; JSON then holds a list of reports. Ctrl-C ends a run with the report of what is whole by then.\n\n"
    "--check makes --tokens tokens from every bundled prompt, greedy and sampled, without drafts and with each "
    "drafter asked for, and compares all ids; exit code 1 if one differs. Seconds are for information.\n\n"
    "--accept-pattern makes each step accept that many drafts: the drafter, the verify pass and the commit do all of "
    "their work, and the drafts are then replaced by what the model is known to say, or not to say. The ids stay what "
    "they are without drafts. A report of a dummy, a cut or a forced run says so in its first line.\n\n"
    "Several engines are measured one after the other, each in the modes asked for.",
)
DEFAULT_TOKENS = 128
_MEMORY_SHARE = 0.5  # of the machine, that weights of several engines may fill together
_GPU_SHARE, _GPU_EXTRA_BYTES = 1.3, 3 << 30  # a drafter, its cache; a context, graphs, buffers
_BAR = 20


@opt.flags(
    "tokens repetitions requests warmup task model modes speculation full_width",
    "dummy layers shard accept_pattern breakdown check check_blocks format save compare plot prompt_tokens",
    *opt.SAMPLING,
    "think",
    *opt.RARE_OF_BENCH,
)
def command(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The same as --format csv: a row a repetition.")] = False,
    md: Annotated[bool, typer.Option("--md", help="The same as --format md.")] = False,
) -> bool:
    """Measure how fast the model runs here: first token, time per token, tokens per second."""
    settings, output = opt.open_settings(context)
    engines = engines_asked(settings)
    settings = settings.changed(engine=engines[-1])
    wanted = _format(settings, json, csv, md)
    output.json = wanted == "json"
    names = _modes(settings)
    if settings["explain"]:
        explain_all(settings, output, engines, names or ("auto",))
        return True
    check_dummy_flags(settings)
    _check_task_flags(settings)
    then = check_files(settings)
    if settings["breakdown"]:
        return print_breakdown(settings, output, wanted)
    if settings["check"]:
        from ling_local.cli.bench_check import check_and_print

        return check_and_print(settings, output, names, wanted)
    runs: list[tuple[BenchReport, ...]] = []
    stopped: BaseException | None = None
    try:
        for engine in engines:
            _measure(for_engine(settings, engine, engines), output, names, runs)
    except STOPS as error:
        if not runs:
            raise
        stopped = error
    _deliver(runs, settings, output, wanted, then, stopped)
    return all(report.exact for run in runs for report in run)


def _check_task_flags(settings: Settings) -> None:
    """UsageError where flags of one task or of --check are given for another."""
    is_random = settings["task"] == "random"
    if settings["check_blocks"] != "own" and not settings["check"]:
        raise UsageError("--check-blocks is for --check", "Give --check, or --block N.")
    if settings["check"] and settings["accept_pattern"] is not None:
        raise UsageError("--check compares what drafts do, and --accept-pattern decides it", "Give one of them.")
    if settings["check"] and is_random:
        raise UsageError("--check has prompts of its own; --task random is for measuring", "Leave one of them away.")
    if settings["requests"] is not None and not is_random:
        raise UsageError("--requests is for --task random", "Give --repetitions N.")
    if settings["requests"] is not None and not settings.is_default("repetitions"):
        raise UsageError("both --requests and --repetitions are given", "Give one of them.")


def _format(settings: Settings, json: bool, csv: bool, md: bool) -> str:
    named = [name for name, given in (("json", json), ("csv", csv), ("md", md)) if given]
    if not settings.is_default("format"):
        named.append(settings["format"])
    if len(set(named)) > 1:
        raise UsageError(f"more than one format: {', '.join(named)}", "Give one of --json, --csv, --md, --format.")
    return named[0] if named else settings["format"]


def _modes(settings: Settings) -> tuple[str, ...]:
    """The drafters asked for, each once; () where nobody asked. --modes beats a kept --speculation."""
    text = settings["modes"]
    if text is None:
        return () if settings.is_default("speculation") else (settings["speculation"],)
    if settings.sources["speculation"].startswith("flag"):
        raise UsageError("both --modes and --speculation are given", "Give one of them.")
    known = TABLE["speculation"].choices
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            meant = nearest(name, known)
            tail = f" Did you mean '{meant}'?" if meant else f" One of: {', '.join(known)}."
            raise UsageError(f"--modes: no such mode '{name}'.{tail}")
    return tuple(dict.fromkeys(names))


def _measure(settings: Settings, output: Output, asked: tuple[str, ...], runs: list[tuple[BenchReport, ...]]) -> None:
    """Add a report for each mode to runs, those that took turns as one entry; also where something ends it early."""
    from ling_local.bench import Lane, run_lanes

    names = asked or ("off", "auto")
    first = "auto" if "auto" in names else names[0]
    with open_model(settings.changed(speculation=first), output) as opened:
        wait_loaded(opened)
        names, first = _resolved(names, first, opened, output)

        def run(engines: Mapping[str, Engine]) -> None:
            lanes = [
                Lane(name if len(names) > 1 else "", engine, _plan(settings, draft=name != "off"))
                for name, engine in engines.items()
            ]
            runs.append(run_lanes(lanes, opened.text_model, _shower(output), on_stop=runs.append))

        if len(names) == 1 or _fit_together(opened, len(names)):
            with _all_open(opened, names, first, settings) as engines:
                run({name: engines[name] for name in names})
            return
        output.warn("the machine's memory holds one engine at a time: the modes are measured one after the other")
        order = (first, *(name for name in names if name != first))
        for name in order:
            with ExitStack() as stack:
                if name == first:
                    engine = opened.engine
                    stack.callback(engine.close)
                else:
                    engine = stack.enter_context(open_other(opened, name, settings["block"] or 0))
                run({name: engine})
        made = dict(zip(order, runs[-len(order) :], strict=True))
        runs[-len(order) :] = [made[name] for name in names]


def _resolved(names: tuple[str, ...], first: str, opened: Opened, output: Output) -> tuple[tuple[str, ...], str]:
    """The same with the drafter's name in place of "auto"; without one, "auto" means the same as "off"."""
    if first != "auto":
        return names, first
    found = opened.engine.info.drafter
    if found == "off" and opened.settings.sources["modes"] != "default":
        output.warn(f"{opened.engine.info.model} has no drafter: auto is off")
    return tuple(dict.fromkeys(found if name == "auto" else name for name in names)), found


def _fit_together(opened: Opened, num_engines: int) -> bool:
    from ling_local.bench import machine

    return fit_together(opened.engine.info, num_engines, machine()["memory_bytes"])


def fit_together(info: EngineInfo, num_engines: int, memory_bytes: int | None) -> bool:
    """Whether so many engines like this one may be open at once. memory_bytes: of the machine, None where unknown."""
    if info.device.startswith("cuda"):
        if info.ranks > 1 or info.engine != "native":  # what is free on each GPU is not known, or taken all at once
            return False
        # the first one's weights and state, and what a drafter, a context and graphs may take
        each = info.weight_bytes + info.state_bytes
        return num_engines * (_GPU_SHARE * each + _GPU_EXTRA_BYTES) < info.free_bytes
    return memory_bytes is None or num_engines * info.weight_bytes < _MEMORY_SHARE * memory_bytes


@contextmanager
def _all_open(opened: Opened, names: Sequence[str], first: str, settings: Settings) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        engines = {first: opened.engine}
        for name in names:
            if name != first:
                engines[name] = stack.enter_context(open_other(opened, name, settings["block"] or 0))
        yield engines


def _plan(settings: Settings, draft: bool) -> BenchPlan:
    from ling_local.bench import RANDOM_IN, RANDOM_OUT, BenchPlan

    params = sampling(settings)
    is_random, prompt_tokens = settings["task"] == "random", settings["prompt_tokens"]
    return BenchPlan(
        tokens=settings["tokens"] or (RANDOM_OUT if is_random else DEFAULT_TOKENS),
        repetitions=settings["requests"] or settings["repetitions"],
        warmup=settings["warmup"],
        task=settings["task"],
        prompt_tokens=prompt_tokens or (RANDOM_IN if is_random else 0),
        sampling=params if settings["seed"] is not None else replace(params, seed=0),
        thinking=settings["think"],
        draft=draft,
        full_width=settings["full_width"] or settings["accept_pattern"] is not None,
        may_shorten=is_random and not prompt_tokens,
    )


def _shower(output: Output) -> Callable[[BenchProgress], None]:
    begun = time.monotonic()

    def show(progress: BenchProgress) -> None:
        lane = f"{progress.lane}, " if progress.lane else ""
        text = f"{lane}{progress.stage} {progress.repetition}/{progress.repetitions}"
        if output.stderr.live:
            output.progress(bar(text, progress, time.monotonic() - begun)[: output.columns - 1])
        elif progress.tokens == 0:
            output.note(f"ling: {text}")

    return show


def bar(text: str, progress: BenchProgress, seconds: float) -> str:
    """One line: where the run is, how much of all is done, and about how long the rest takes."""
    full = int(_BAR * progress.share)
    left = seconds * (1 - progress.share) / progress.share if progress.share else 0.0
    rest = f", {left:.0f} s left" if progress.share and seconds > 1 else ""
    tokens = f"{progress.tokens}/{progress.tokens_wanted} tokens"
    return f"[{'#' * full}{'.' * (_BAR - full)}] {100 * progress.share:3.0f} %  {text}: {tokens}{rest}"


def _deliver(
    runs: Sequence[tuple[BenchReport, ...]],
    settings: Settings,
    output: Output,
    wanted: str,
    then: tuple[Document, ...],
    stopped: BaseException | None,
) -> None:
    """Show and save what was measured. Raises stopped after that."""
    from ling_local.bench import compare, modes_to_json, plot, to_json

    output.clear_progress()
    again, order = command_line(settings), "interleaved" if len(runs) == 1 else "one after the other"
    reports = [_marked(report, stopped) for run in runs for report in run]
    documents = [to_json(report, again) for report in reports]
    alone = len(documents) == 1
    document = documents[0] if alone else modes_to_json(reports, order, again)
    compared = compare(documents, then, settings["compare"]) if then else None
    if compared:
        document["compared"] = compared
    picture = ""
    if settings["plot"] is not None:
        names = [lane_name(document, documents) for document in documents]
        title = f"{reports[0].info.model}, task {reports[0].plan.task}: {reports[0].plan.tokens:,} tokens"
        picture = plot(reports, names, title)
    if wanted in ("json", "csv") or not output.stdout.terminal:  # else a person reads them in the table
        for warning in warnings(documents):
            output.warn(warning)
    if compared and wanted == "csv":
        output.note("\n".join([*compared_lines(compared), aligned(compared_cells(compared), 32, 15)]))
    text = "" if wanted == "json" else FORMATS[wanted](documents, "" if alone else order, compared)
    deliver(settings, output, document, text, stopped, picture)


def _marked(report: BenchReport, stopped: BaseException | None) -> BenchReport:
    if stopped is None:
        return report
    done = f"{len(report.samples)} of {report.plan.repetitions} repetitions"
    return replace(report, marks=(*report.marks, stop_mark(stopped, done)))
