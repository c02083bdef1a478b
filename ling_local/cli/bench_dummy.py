"""`ling bench --dummy` and `--breakdown`: which flags go together, and the table of ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ling_local.cli.bench_files import command_line, deliver
from ling_local.cli.bench_tables import Cells, aligned, cpu_line, csv_text, made_lines, markdown
from ling_local.cli.opening import model_spec
from ling_local.cli.output import Output
from ling_local.errors import UsageError
from ling_local.settings import TABLE, Settings

_COLUMNS = ("op", "calls", "launches", "MB", "us", "TB/s", "of copy", "floor us")
_KEYS = ("op", "calls", "launches", "bytes", "microseconds", "share", "floor_us", "cold")


def check_dummy_flags(settings: Settings) -> None:
    """UsageError where flags contradict each other or would have no effect."""
    if settings["dummy"] is None:
        for name in ("layers", "shard", "breakdown"):
            if not settings.is_default(name):
                raise UsageError(f"{TABLE[name].flag} is for --dummy", "Give --dummy tiny or --dummy flash.")
        return
    if settings["breakdown"] and settings["modes"] is not None:
        raise UsageError("--breakdown times steps of one model", "Give --speculation NAME in place of --modes.")
    if settings["task"] == "chat" or settings["check"]:
        what = "--check" if settings["check"] else "--task chat"
        raise UsageError(f"{what} needs a model that can talk, and a dummy cannot", "Leave --dummy or that flag away.")


def print_breakdown(settings: Settings, output: Output, wanted: str) -> bool:
    """Time every op of a step of a dummy and print the table."""
    from ling_local.bench.breakdown import run_breakdown

    spec, settings = model_spec(settings)
    document = run_breakdown(spec, settings["prompt_tokens"] or 8192, output.progress, command_line(settings))
    output.clear_progress()
    deliver(settings, output, document, "" if wanted == "json" else FORMATS[wanted](document))
    return True


def _head(document: Mapping[str, Any]) -> list[str]:
    bandwidth = f"copy bandwidth measured: {document['copy_bandwidth'] / 1e12:.3f} TB/s"
    return [
        *(f"[{mark}]" for mark in document["marks"]),
        f"ling {document['ling']}: {document['model']}, {document['dtype']} on {document['device']}",
        cpu_line(document["machine"], document["torch"]),
        *made_lines(document),
        f"{document['context']:,} tokens of context, {bandwidth}",
        "each op captured once for each of its calls in a step, weights cold, time of a replay",
    ]


def _cells(step: Mapping[str, Any]) -> Cells:
    lines = []
    for row in [*step["ops"], step["total"]]:
        rate = row["bytes"] / row["microseconds"] / 1e6 if row["microseconds"] else 0.0
        lines.append(
            [
                row["op"],
                str(row["calls"]),
                str(row["launches"]),
                f"{row['bytes'] / 1e6:.2f}",
                f"{row['microseconds']:.1f}",
                f"{rate:.3f}",
                f"{100 * row['share']:.0f} %",
                f"{row['floor_us']:.1f}",
            ]
        )
    return lines


def _title(step: Mapping[str, Any]) -> str:
    drafts = f" and {step['drafts']} drafts made" if step["drafts"] else ""
    whole = f"the whole step takes {step['step_us']:.1f} us"
    rows = "1 row" if step["rows"] == 1 else f"{step['rows']} rows"
    return f"{rows}{drafts}: {whole}, its ops one by one {step['total']['microseconds']:.1f} us"


def _table(document: Mapping[str, Any]) -> str:
    parts = _head(document)
    for step in document["steps"]:
        parts += ["", _title(step), aligned([list(_COLUMNS), *_cells(step)], 34, 10)]
    return "\n".join(parts)


def _markdown(document: Mapping[str, Any]) -> str:
    parts = [f"{line}  " for line in _head(document)]
    for step in document["steps"]:
        parts += ["", _title(step), "", markdown([list(_COLUMNS), *_cells(step)])]
    return "\n".join(parts)


def _csv(document: Mapping[str, Any]) -> str:
    marks = "; ".join(document["marks"])
    rows = [
        {"rows": step["rows"], "drafts": step["drafts"], **{key: row[key] for key in _KEYS}, "marks": marks}
        for step in document["steps"]
        for row in [*step["ops"], step["total"]]
    ]
    return csv_text(rows)


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"table": _table, "md": _markdown, "csv": _csv}
