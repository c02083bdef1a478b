"""`ling bench`: speed with and without drafts, and the check that drafts change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ling_local.cli import options as opt
from ling_local.cli.bench_dummy import check_dummy_flags, print_breakdown
from ling_local.cli.bench_tables import FORMATS, SIDE_BY_SIDE
from ling_local.cli.opening import Opened, open_model, open_other, sampling, wait_loaded
from ling_local.cli.output import Output
from ling_local.cli.pages import Page
from ling_local.errors import UsageError
from ling_local.settings import TABLE, Settings, nearest

if TYPE_CHECKING:
    from ling_local.bench import BenchPlan, BenchProgress, BenchReport

PAGE = Page(
    "[OPTIONS]",
    examples=(
        "ling bench --tokens 5000",
        "ling bench --modes off,mtp,dspark --task prose",
        "ling bench --speculation off --tokens 500 -r 10 --json | jq .decode.tpot_ms.p99",
        "ling bench --check --tokens 500 --modes mtp,dspark --check-blocks all --full-width",
        "ling bench --md >> notes.md",
        "ling bench --dummy tiny --device cuda --prompt-tokens 8192 --accept-pattern 3,0,7",
        "ling bench --dummy flash --shard 4 --device cuda --breakdown",
    ),
    rare=("prompt_tokens", "temperature", "top_p", "top_k", "seed", "think", *opt.RARE),
    defaults=(("seed", "0"), ("task", "code; all of them for --check")),
    notes="Each repetition makes exactly --tokens tokens (the end of a turn is ignored) from a prompt of its own; "
    "exit code 1 if one could not. The model's own sampling defaults are not taken: greedy unless you say otherwise. "
    "Without --modes and --speculation a model that has a drafter is measured without and with it, repetition by "
    "repetition; JSON then holds a list of reports.\n\n"
    "--check makes --tokens tokens from every bundled prompt, greedy and sampled, without drafts and with each "
    "drafter asked for, and compares all ids; exit code 1 if one differs. Seconds are for information.\n\n"
    "--accept-pattern makes each step accept that many drafts: the drafter, the verify pass and the commit do all of "
    "their work, and the drafts are then replaced by what the model is known to say, or not to say. The ids stay what "
    "they are without drafts. A report of a dummy, a cut or a forced run says so in its first line.",
)
_MEMORY_SHARE = 0.5  # of the machine, that weights of several engines may fill together


@opt.flags(
    "tokens repetitions requests warmup task model modes speculation full_width",
    "dummy layers shard accept_pattern breakdown check check_blocks format save compare plot prompt_tokens",
    *opt.SAMPLING,
    "think",
    *opt.RARE,
)
def command(
    context: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The same as --format csv: a row a repetition.")] = False,
    md: Annotated[bool, typer.Option("--md", help="The same as --format md.")] = False,
) -> bool:
    """Measure how fast the model runs here: first token, time per token, tokens per second."""
    settings, output = opt.open_settings(context)
    wanted = _format(settings, json, csv, md)
    output.json = wanted == "json"
    names = _modes(settings)
    check_dummy_flags(settings)
    if settings["breakdown"]:
        return print_breakdown(settings, output, wanted)
    if settings["check"]:
        from ling_local.cli.bench_check import check_and_print

        return check_and_print(settings, output, names, wanted)
    if settings["check_blocks"] != "own":
        raise UsageError("--check-blocks is for --check", "Give --check, or --block N.")
    reports, interleaved = _measure(settings, output, names)
    _print(reports, interleaved, output, wanted)
    return all(report.exact for report in reports)


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


def _measure(settings: Settings, output: Output, asked: tuple[str, ...]) -> tuple[tuple[BenchReport, ...], bool]:
    """A report for each mode, and whether they took turns."""
    from ling_local.bench import Lane, run_bench, run_lanes

    names = asked or ("off", "auto")
    first = "auto" if "auto" in names else names[0]
    with open_model(_with_speculation(settings, first), output) as opened:
        wait_loaded(opened)
        names, first = _resolved(names, first, opened, output)
        plans = {name: _plan(settings, draft=name != "off") for name in names}
        if len(names) == 1:
            return (run_bench(opened.engine, opened.text_model, plans[first], _shower(output)),), True
        if _fit_together(opened, len(names)):
            with _all_open(opened, names, first, settings) as engines:
                lanes = [Lane(name, engines[name], plans[name]) for name in names]
                return run_lanes(lanes, opened.text_model, _shower(output)), True
        output.warn("the machine's memory holds one engine at a time: the modes are measured one after the other")
        reports = {}
        for name in (first, *(name for name in names if name != first)):
            with ExitStack() as stack:
                if name == first:
                    engine = opened.engine
                    stack.callback(engine.close)
                else:
                    engine = stack.enter_context(open_other(opened, name, settings["block"] or 0))
                (reports[name],) = run_lanes([Lane(name, engine, plans[name])], opened.text_model, _shower(output))
        return tuple(reports[name] for name in names), False


def _with_speculation(settings: Settings, name: str) -> Settings:
    return replace(settings, values={**settings.values, "speculation": name})


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

    info, memory_bytes = opened.engine.info, machine()["memory_bytes"]
    if info.device == "cuda":  # what is free there is not known on this side; one is known to fit
        return False
    return memory_bytes is None or num_engines * info.weight_bytes < _MEMORY_SHARE * memory_bytes


@contextmanager
def _all_open(opened: Opened, names: Sequence[str], first: str, settings: Settings) -> Iterator[dict[str, Any]]:
    with ExitStack() as stack:
        engines = {first: opened.engine}
        for name in names:
            if name != first:
                engines[name] = stack.enter_context(open_other(opened, name, settings["block"] or 0))
        yield engines


def _plan(settings: Settings, draft: bool) -> BenchPlan:
    from ling_local.bench import BenchPlan

    params = sampling(settings)
    return BenchPlan(
        tokens=settings["tokens"],
        repetitions=settings["repetitions"],
        warmup=settings["warmup"],
        task=settings["task"],
        prompt_tokens=settings["prompt_tokens"],
        sampling=params if settings["seed"] is not None else replace(params, seed=0),
        thinking=settings["think"],
        draft=draft,
        full_width=settings["full_width"] or settings["accept_pattern"] is not None,
    )


def _shower(output: Output) -> Callable[[BenchProgress], None]:
    def show(progress: BenchProgress) -> None:
        lane = f"{progress.lane}, " if progress.lane else ""
        text = f"{lane}{progress.stage} {progress.repetition}/{progress.repetitions}"
        if output.stderr.live:
            output.progress(f"{text}: {progress.tokens}/{progress.tokens_wanted} tokens")
        elif progress.tokens == 0:
            output.note(f"ling: {text}")

    return show


def _print(reports: tuple[BenchReport, ...], interleaved: bool, output: Output, wanted: str) -> None:
    from ling_local.bench import modes_to_json, to_json

    documents = [to_json(report) for report in reports]
    for document in documents:
        lead = f"{document['model']['drafter']}: " if len(documents) > 1 else ""
        for warning in document["warnings"]:
            output.warn(lead + warning)
    if wanted == "json":
        output.print_json(documents[0] if len(documents) == 1 else modes_to_json(reports, interleaved))
    elif len(documents) == 1:
        output.print(FORMATS[wanted](documents[0]))
    else:
        output.print(SIDE_BY_SIDE[wanted](documents))
