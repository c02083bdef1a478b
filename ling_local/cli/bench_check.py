"""`ling bench --check`: ids with drafts and without, for every bundled prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ling_local.cli.bench_files import command_line, deliver, stop_mark
from ling_local.cli.bench_tables import Cells, aligned, broken, csv_text, machine_lines, markdown, mode_name
from ling_local.cli.opening import Opened, open_model, open_other, sampling
from ling_local.cli.output import Output
from ling_local.engine.protocol import Engine
from ling_local.errors import STOPS, UsageError
from ling_local.settings import Settings

if TYPE_CHECKING:
    from ling_local.bench import CheckPlan, CheckProgress, CheckReport

Row = Mapping[str, Any]


def check_and_print(settings: Settings, output: Output, names: Sequence[str], wanted: str) -> bool:
    """Run the check and print its report; True where all ids are the same."""
    drafters = [name for name in names if name != "off"] or (["auto"] if not names else [])
    if not drafters:
        raise UsageError("--check compares drafts with none, and only off is asked for", "Give --modes dspark, mtp.")
    if settings["check_blocks"] == "all" and settings.sources["block"].startswith("flag"):
        raise UsageError("both --block and --check-blocks all are given", "Give one of them.")
    from ling_local.bench import check_to_json, run_check

    plan = _plan(settings)
    off = settings.changed(speculation="off")
    known: list[CheckReport] = []
    stopped: BaseException | None = None
    try:
        with open_model(off, output) as opened:
            show = _shower(output)
            known.append(run_check(_opener(opened), opened.text_model, plan, drafters, show, known.append))
    except STOPS as error:
        if not known:
            raise
        stopped = error
    output.clear_progress()
    document = check_to_json(known[0], command_line(settings))
    if stopped:
        document["marks"].append(stop_mark(stopped, f"{len(document['rows'])} runs"))
    if wanted in ("json", "csv") or not output.stdout.terminal:  # else a person reads them in the table
        for warning in document["warnings"]:
            output.warn(warning)
    try:
        formats = {"table": _table, "md": _markdown, "csv": _csv}
        deliver(settings, output, document, "" if wanted == "json" else formats[wanted](document), stopped)
    finally:
        for row in document["rows"]:
            if not row["same"]:
                output.say(f"ling: {_difference_text(row)}", "red")
    return known[0].same


def _plan(settings: Settings) -> CheckPlan:
    from ling_local.bench import CheckPlan

    params = sampling(settings)
    default = CheckPlan()
    sampled = params if params.temperature > 0 else default.sampling
    return replace(
        default,
        tokens=settings["tokens"] or default.tokens,
        tasks=default.tasks if settings.is_default("task") else (settings["task"],),
        prompt_tokens=settings["prompt_tokens"],
        sampling=replace(sampled, seed=settings["seed"] or 0),
        block=settings["block"] or 0,
        every_block=settings["check_blocks"] == "all",
        thinking=settings["think"],
        full_width=settings["full_width"],
    )


def _opener(opened: Opened) -> Callable[[str, int], AbstractContextManager[Engine]]:
    """The first engine, which has no drafter, serves as the reference; it is closed before another one opens."""

    def open_mode(name: str, block: int) -> AbstractContextManager[Engine]:
        return _Reference(opened) if name == "off" else open_other(opened, name, block)

    return open_mode


class _Reference:
    """Lends the engine that is open already, and closes it after use."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def __enter__(self) -> Engine:
        return self._opened.engine

    def __exit__(self, *_: object) -> None:
        self._opened.engine.close()


def _shower(output: Output) -> Callable[[CheckProgress], None]:
    def show(progress: CheckProgress) -> None:
        mode = mode_name({"drafter": progress.mode, "block": progress.block})
        if output.stderr.live:
            done = f"run {progress.run}/{progress.runs}, {progress.tokens}/{progress.tokens_wanted} tokens"
            output.progress(f"check {mode}: {done}")
        elif progress.run == 1 and progress.tokens == 0:
            output.note(f"ling: check {mode}: {progress.runs} runs of {progress.tokens_wanted} tokens")

    return show


def _difference_text(row: Row) -> str:
    """Where, and both ids."""
    found = row["first_difference"]

    def side(token_id: int | None) -> str:
        return "the end" if token_id is None else f"id {token_id}"

    return (
        f"prompt {row['prompt']} ({row['sampling']}), {row['drafter']} with block {row['block']}: "
        f"position {found['position']} is {side(found['with_drafts'])} with drafts, {side(found['without'])} without"
    )


def _cells(rows: Sequence[Row], show: Callable[[Row], str], off: Callable[[Row], str] | None = None) -> Cells:
    """Prompts down, modes across."""
    modes = list(dict.fromkeys(map(mode_name, rows)))
    lines: Cells = [["", *(["off"] if off else []), *modes]]
    for name in dict.fromkeys((row["prompt"], row["sampling"]) for row in rows):
        here = {mode_name(row): row for row in rows if (row["prompt"], row["sampling"]) == name}
        first = next(iter(here.values()))
        cells = [show(here[mode]) if mode in here else "-" for mode in modes]  # "-": stopped before that
        lines.append([f"{name[0]}, {name[1]}", *([off(first)] if off else []), *cells])
    return lines


def _accept(row: Row) -> str:
    length = f"{row['speculation']['accept_length']:.2f}"
    return length if row["same"] else f"{length} differs"


def _tables(document: Mapping[str, Any]) -> list[tuple[str, Cells]]:
    rows = document["rows"]
    return [
        ("accept length", _cells(rows, _accept)),
        (
            "seconds, prefill included",
            _cells(rows, lambda row: f"{row['seconds']:.2f}", lambda row: f"{row['seconds_off']:.2f}"),
        ),
    ]


def _headline(document: Mapping[str, Any]) -> list[str]:
    run, rows = document["run"], document["rows"]
    sampled = run["sampled"]
    different = sum(not row["same"] for row in rows)
    verdict = f"{different} of {len(rows)} runs differ" if different else f"all {len(rows)} runs have the same ids"
    return [
        *machine_lines(document),
        f"{run['tokens']} tokens a prompt; sampled: temperature {sampled['temperature']:g}, top-k {sampled['top_k']}, "
        f"top-p {sampled['top_p']:g}, seed {sampled['seed']}",
        f"with drafts and without: {verdict}",
        *(f"  - {warning}" for warning in document["warnings"]),
    ]


def _table(document: Mapping[str, Any]) -> str:
    parts = ["\n".join(_headline(document))]
    for title, lines in _tables(document):
        first = max(len(title), *(len(line[0]) for line in lines)) + 2
        width = max(len(cell) for line in lines for cell in line[1:]) + 2
        parts.append(aligned([[title, *lines[0][1:]], *lines[1:]], first, width))
    return "\n\n".join(parts)


def _markdown(document: Mapping[str, Any]) -> str:
    parts = [broken(_headline(document))]
    parts += [markdown([[title, *lines[0][1:]], *lines[1:]]) for title, lines in _tables(document)]
    return "\n\n".join(parts)


def _csv(document: Mapping[str, Any]) -> str:
    """A row a run. Rates by position stand in one cell, with spaces."""
    rows = []
    for row in document["rows"]:
        found = row["first_difference"] or {"position": None, "with_drafts": None, "without": None}
        speculation = {
            key: " ".join(map(str, value)) if isinstance(value, list) else value
            for key, value in row["speculation"].items()
        }
        plain = {key: value for key, value in row.items() if key not in ("first_difference", "speculation")}
        rows.append({**plain, **{f"difference_{key}": value for key, value in found.items()}, **speculation})
    return csv_text(rows)
