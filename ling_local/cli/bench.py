"""`ling bench`: the report of bench.py as a table, JSON, CSV or Markdown."""

from __future__ import annotations

import csv
import io
from typing import Annotated, Any

import typer

from ling_local.cli import options as opt
from ling_local.cli.opening import Opened, open_model, sampling, wait_loaded
from ling_local.cli.output import Output
from ling_local.cli.pages import Page
from ling_local.errors import UsageError
from ling_local.settings import Settings

PAGE = Page(
    "[OPTIONS]",
    examples=(
        "ling bench --tokens 5000",
        "ling bench --tokens 500 -r 10 --task prose --json | jq .decode.tpot_ms.p99",
        "ling bench --md >> notes.md",
    ),
    rare=("prompt_tokens", "temperature", "top_p", "top_k", "seed", "think", *opt.RARE),
    defaults=(("seed", "0"),),
    notes="Each repetition makes exactly --tokens tokens (the end of a turn is ignored) from a prompt of its own; "
    "exit code 1 if one could not. The model's own sampling defaults are not taken: greedy unless you say otherwise.",
)
_ROWS = (
    ("TTFT ms", "ttft_ms", None),
    ("TPOT ms", "decode", "tpot_ms"),
    ("step ms", "decode", "step_ms"),
    ("prefill tok/s", "prefill", "tok_s"),
)
_COLUMNS = ("mean", "sd", "median", "p99", "min", "max")


def command(
    context: typer.Context,
    tokens: opt.Tokens = None,
    repetitions: opt.Repetitions = None,
    warmup: opt.Warmup = None,
    task: opt.Task = None,
    model: opt.Model = None,
    format: opt.Format = None,
    json: Annotated[bool, typer.Option("--json", help="The same as --format json.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="The same as --format csv: a row a repetition.")] = False,
    md: Annotated[bool, typer.Option("--md", help="The same as --format md.")] = False,
    prompt_tokens: opt.PromptTokens = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    seed: opt.Seed = None,
    think: opt.Think = None,
    device: opt.Device = None,
    dtype: opt.Dtype = None,
    ctx: opt.Ctx = None,
    threads: opt.Threads = None,
    engine: opt.EngineName = None,
    color: opt.Color = None,
    quiet: opt.Quiet = None,
    debug: opt.Debug = None,
) -> bool:
    """Measure how fast the model runs here: first token, time per token, tokens per second."""
    settings, output = opt.open_settings(context)
    wanted = _format(settings, json, csv, md)
    output.json = wanted == "json"
    with open_model(settings, output) as opened:
        wait_loaded(opened)
        report = _measure(opened, settings, output)
    from ling_local.bench import to_json

    document = to_json(report)
    for warning in document["warnings"]:
        output.warn(warning)
    if wanted == "json":
        output.print_json(document)
    else:
        output.print({"table": _table, "csv": _csv, "md": _markdown}[wanted](document))
    return report.exact


def _format(settings: Settings, json: bool, csv: bool, md: bool) -> str:
    named = [name for name, given in (("json", json), ("csv", csv), ("md", md)) if given]
    if not settings.is_default("format"):
        named.append(settings["format"])
    if len(set(named)) > 1:
        raise UsageError(f"more than one format: {', '.join(named)}", "Give one of --json, --csv, --md, --format.")
    return named[0] if named else settings["format"]


def _measure(opened: Opened, settings: Settings, output: Output) -> Any:
    from dataclasses import replace

    from ling_local.bench import BenchPlan, BenchProgress, run_bench

    params = sampling(settings)
    plan = BenchPlan(
        tokens=settings["tokens"],
        repetitions=settings["repetitions"],
        warmup=settings["warmup"],
        task=settings["task"],
        prompt_tokens=settings["prompt_tokens"],
        sampling=params if settings["seed"] is not None else replace(params, seed=0),
        thinking=settings["think"],
    )

    def show(progress: BenchProgress) -> None:
        text = f"{progress.stage} {progress.repetition}/{progress.repetitions}"
        if output.stderr.live:
            output.progress(f"{text}: {progress.tokens}/{progress.tokens_wanted} tokens")
        elif progress.tokens == 0:
            output.note(f"ling: {text}")

    return run_bench(opened.engine, opened.text_model, plan, show)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def _summaries(document: dict[str, Any]) -> list[list[str]]:
    """A line a figure: its name and the columns."""
    lines = []
    for name, key, inner in _ROWS:
        summary = document[key] if inner is None else document[key][inner]
        lines.append([name, *(_number(summary[column]) for column in _COLUMNS)])
    return lines


def _headline(document: dict[str, Any]) -> list[str]:
    """What was run, and the figure that people look for."""
    model, run, machine = document["model"], document["run"], document["machine"]
    decode, speculation = document["decode"], document["speculation"]
    speed = f"decode: {_number(decode['tok_s'])} tok/s"
    if speculation["drafted"]:
        speed += f", accept length {speculation['accept_length']:.2f}"
    return [
        f"{model['id']} ({model['dtype']}) on {machine['device']}: {machine['cpu']}, {machine['cpus']} CPUs",
        f"task {run['task']}, {run['prompt_tokens']} prompt tokens, {run['tokens']} tokens x {run['repetitions']}, "
        f"warm-up {run['warmup']}, temperature {run['temperature']:g}",
        speed,
    ]


def _table(document: dict[str, Any]) -> str:
    lines = [["", *_COLUMNS], *_summaries(document)]
    rows = [f"{line[0]:<14}" + "".join(f"{cell:>10}" for cell in line[1:]) for line in lines]
    return "\n".join([*_headline(document), "", *rows])


def _markdown(document: dict[str, Any]) -> str:
    lines = [["", *_COLUMNS], ["---", *(["---:"] * len(_COLUMNS))], *_summaries(document)]
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([*(f"{line}  " for line in _headline(document)), "", *rows])


def _csv(document: dict[str, Any]) -> str:
    target = io.StringIO()
    run = {"model": document["model"]["id"], "device": document["machine"]["device"], "task": document["run"]["task"]}
    rows = [{**run, "repetition": number, **sample} for number, sample in enumerate(document["samples"], 1)]
    writer = csv.DictWriter(target, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue().rstrip("\n")
