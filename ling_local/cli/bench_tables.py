"""Reports of `ling bench` as a table, Markdown and CSV: one way to decode, or several side by side."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ling_local.cli.figures import rates_text

Document = Mapping[str, Any]
Cells = list[list[str]]
_ROWS = (
    ("TTFT ms", "ttft_ms", None),
    ("TPOT ms", "decode", "tpot_ms"),
    ("step ms", "decode", "step_ms"),
    ("prefill tok/s", "prefill", "tok_s"),
)
_COLUMNS = ("mean", "sd", "median", "p99", "min", "max")


def number(value: float | None) -> str:
    """Three digits or so; "-" for what is undefined."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def aligned(lines: Cells, first: int, width: int) -> str:
    """Cells as a plain table: the first column to the left, the others to the right."""
    return "\n".join((f"{line[0]:<{first}}" + "".join(f"{cell:>{width}}" for cell in line[1:])) for line in lines)


def markdown(lines: Cells) -> str:
    """Cells as a Markdown table; the first line is its head."""
    rule = ["---", *(["---:"] * (len(lines[0]) - 1))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of one shape as CSV with a head."""
    target = io.StringIO()
    writer = csv.DictWriter(target, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue().rstrip("\n")


def mode_name(model: Mapping[str, Any]) -> str:
    """`dspark/8`: the drafter and its block; `off`."""
    return f"{model['drafter']}/{model['block']}" if model["block"] else model["drafter"]


def lane_name(document: Document, documents: Sequence[Document]) -> str:
    """What tells a report from those beside it: its mode, and its engine where they differ in that."""
    engines = {other["model"]["engine"] for other in documents}
    lead = f"{_engine(document)} " if len(engines) > 1 else ""
    return lead + mode_name(document["model"])


def _engine(document: Document) -> str:
    """The engine without its version."""
    return document["model"]["engine"].partition(" ")[0]


def _summaries(document: Document) -> Cells:
    """A line a figure: its name and the columns."""
    lines = []
    for name, key, inner in _ROWS:
        summary = document[key] if inner is None else document[key][inner]
        lines.append([name, *(number(summary[column]) for column in _COLUMNS)])
    return lines


def machine_line(document: Document) -> str:
    """The model and where it runs; what makes the run no ordinary one stands in front."""
    marks = "".join(f"[{mark}]\n" for mark in document.get("marks", ()))
    model, machine = document["model"], document["machine"]
    where = f"{machine['device']}: {machine['cpu']}, {machine['cpus']} CPUs"
    engine = "" if model.get("engine", "native") in ("native", "scripted") else f", {model['engine']}"
    return f"{marks}{model['id']} ({model['dtype']}{engine}) on {where}"


def _run_line(document: Document) -> str:
    run = document["run"]
    return (
        f"task {run['task']}, {run['prompt_tokens']} prompt tokens, {run['tokens']} tokens x {run['repetitions']}, "
        f"warm-up {run['warmup']}, temperature {run['temperature']:g}"
    )


def _headline(document: Document) -> list[str]:
    """What was run, and the figure that people look for."""
    speculation = document["speculation"]
    lines = [machine_line(document), _run_line(document), f"decode: {number(document['decode']['tok_s'])} tok/s"]
    if document["decode"]["gpu_step_ms"] is not None:
        step, gap = document["decode"]["gpu_step_ms"], document["decode"]["host_gap_ms"]
        lines.append(f"step on the GPU: {number(step)} ms; the caller sees {number(gap)} ms more")
    if speculation["drafted"]:
        lines[2] += f", accept length {speculation['accept_length']:.2f} with {mode_name(document['model'])}"
        lines.append(
            f"drafts: {speculation['steps']} steps, {speculation['drafted']} drafted, "
            f"{speculation['accepted']} accepted ({100 * speculation['rate']:.1f} %)"
        )
    if speculation["rate_by_position"]:
        lines.append(
            f"by position: {rates_text(speculation['rate_by_position'])}; "
            f"where the one before it was accepted: {rates_text(speculation['rate_given_previous'])}"
        )
    return lines


def _table(document: Document) -> str:
    return "\n".join([*_headline(document), "", aligned([["", *_COLUMNS], *_summaries(document)], 14, 10)])


def _broken(lines: Sequence[str]) -> list[str]:
    """Lines that Markdown does not join."""
    return [f"{line}  " for line in "\n".join(lines).split("\n")]


def _markdown(document: Document) -> str:
    return "\n".join([*_broken(_headline(document)), "", markdown([["", *_COLUMNS], *_summaries(document)])])


def _csv(document: Document) -> str:
    return csv_text(_csv_rows(document))


def _csv_rows(document: Document) -> list[dict[str, Any]]:
    model = document["model"]
    run = {
        "model": model["id"],
        "engine": model["engine"],
        "device": document["machine"]["device"],
        "task": document["run"]["task"],
        "drafter": model["drafter"],
        "block": model["block"],
        "marks": "; ".join(document["marks"]),
    }
    return [{**run, "repetition": index, **sample} for index, sample in enumerate(document["samples"], 1)]


def _columns(documents: Sequence[Document]) -> Cells:
    """A column a mode: times first, then what its drafts brought."""
    lines: Cells = [["", *(lane_name(document, documents) for document in documents)]]

    def add(name: str, value: Callable[[Document], str]) -> None:
        lines.append([name, *(value(document) for document in documents)])

    def summary(name: str, path: tuple[str, ...], column: str) -> None:
        def read(document: Document) -> str:
            inner: Any = document
            for key in path:
                inner = inner[key]
            return number(inner[column])

        add(f"{name} {column}", read)

    add("tok/s", lambda d: number(d["decode"]["tok_s"]))
    for column in ("mean", "sd", "median", "p99"):
        summary("TPOT ms", ("decode", "tpot_ms"), column)
    summary("step ms", ("decode", "step_ms"), "median")
    if any(document["decode"]["gpu_step_ms"] is not None for document in documents):
        add("GPU step ms", lambda d: number(d["decode"]["gpu_step_ms"]))
        add("caller - GPU ms", lambda d: number(d["decode"]["host_gap_ms"]))
    summary("TTFT ms", ("ttft_ms",), "median")
    summary("prefill tok/s", ("prefill", "tok_s"), "median")
    add("accept length", lambda d: f"{d['speculation']['accept_length']:.2f}")
    for key in ("steps", "drafted", "accepted"):
        add(key, lambda d, key=key: str(d["speculation"][key]))
    add("accepted %", lambda d: _per_cent(d["speculation"]["rate"]))
    for position in range(max(len(d["speculation"]["rate_by_position"]) for d in documents)):
        add(f"position {position + 1} %", lambda d, at=position: _rate_at(d, at))
    return lines


def _per_cent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}"


def _rate_at(document: Document, position: int) -> str:
    rates = document["speculation"]["rate_by_position"]
    drafting = position < document["model"]["block"]
    return _per_cent(rates[position] if position < len(rates) else 0.0 if drafting else None)


def _compare(documents: Sequence[Document]) -> list[str]:
    marked = max(documents, key=lambda document: len(document["marks"]))
    lines = [machine_line({**documents[0], "marks": marked["marks"]}), _run_line(documents[0])]
    for document in documents:
        others = [other for other in documents if other is not document]
        if document["model"]["drafter"] != "off":
            same = [other for other in others if _engine(other) == _engine(document)]
            lines += _faster(document, [other for other in same if other["model"]["drafter"] == "off"], documents)
        if _engine(document) != _engine(documents[0]):
            there = [other for other in others if _engine(other) == _engine(documents[0])]
            mode = document["model"]["drafter"]
            lines += _faster(document, [other for other in there if other["model"]["drafter"] == mode], documents)
    return lines


def _faster(document: Document, beside: Sequence[Document], documents: Sequence[Document]) -> list[str]:
    """How much faster a report's tokens come than those of the first beside it; nothing where there is none."""
    times = [other["decode"]["tpot_ms"]["mean"] for other in (document, *beside[:1])]
    if len(times) < 2 or not all(times):
        return []
    name, other = lane_name(document, documents), lane_name(beside[0], documents)
    return [f"{name}: {times[1] / times[0]:.2f} times as fast as {other}"]


def _table_of(documents: Sequence[Document]) -> str:
    lines = _columns(documents)
    width = max(12, *(len(name) + 2 for name in lines[0]))
    return "\n".join([*_compare(documents), "", aligned(lines, 22, width)])


def _markdown_of(documents: Sequence[Document]) -> str:
    return "\n".join(
        [*(f"{line}  " for line in "\n".join(_compare(documents)).split("\n")), "", markdown(_columns(documents))]
    )


def _csv_of(documents: Sequence[Document]) -> str:
    return csv_text([row for document in documents for row in _csv_rows(document)])


FORMATS: Mapping[str, Callable[[Document], str]] = {"table": _table, "csv": _csv, "md": _markdown}
SIDE_BY_SIDE: Mapping[str, Callable[[Sequence[Document]], str]] = {
    "table": _table_of,
    "csv": _csv_of,
    "md": _markdown_of,
}
