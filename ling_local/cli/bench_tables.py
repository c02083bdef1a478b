"""Reports of `ling bench` as a table, Markdown and CSV: what was measured, on what, how fast, and is it to be believed.

A table has a column for each way to decode, also where there is only one.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]
Cells = list[list[str]]
_COLUMNS = ("mean", "sd", "median", "p99", "min", "max")
_FIRST, _WIDTH = 22, 12


def number(value: float | None) -> str:
    """Three digits or so; "-" for what is undefined."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3f}"


def aligned(lines: Cells, first: int, width: int) -> str:
    """Cells as a plain table: the first column to the left, the others to the right."""
    return "\n".join((f"{line[0]:<{first}}" + "".join(f"{cell:>{width}}" for cell in line[1:])) for line in lines)


def markdown(lines: Cells) -> str:
    """Cells as a Markdown table; the first line is its head."""
    rule = ["---", *(["---:"] * (len(lines[0]) - 1))]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def broken(lines: Sequence[str]) -> str:
    """Lines that Markdown does not join."""
    return "\n".join(f"{line}  " for line in lines)


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
    return _lead(document, documents) + mode_name(document["model"])


def _lead(document: Document, documents: Sequence[Document]) -> str:
    several = len({_engine(other) for other in documents}) > 1
    return f"{_engine(document)} " if several else ""


def _engine(document: Document) -> str:
    """The engine without its version."""
    return document["model"]["engine"].partition(" ")[0]


def machine_lines(document: Document, documents: Sequence[Document] = ()) -> list[str]:
    """The program, the model and where it ran; what makes the run no ordinary one stands in front.

    documents: those of the same run beside it, whose engines are named, too.
    """
    model, machine = document["model"], document["machine"]
    size = f", {model['parameters'] / 1e6:,.1f} M parameters" if model["parameters"] else ""
    engines = _engines(document, *documents)
    context = f", context {document['run']['context_limit']:,}" if "run" in document else ""
    lines = [
        *(f"[{mark}]" for mark in document["marks"]),
        f"ling {document['ling']}: {model['id']}{size}, {model['dtype']}{engines} on {machine['device']}{context}",
        cpu_line(machine, machine["torch"]),
    ]
    if machine["gpu"]:
        lines.append(f"GPU: {_gpu_text(machine)}")
    return [*lines, *made_lines(document)]


def cpu_line(machine: Mapping[str, Any], torch: str | None) -> str:
    """What it ran on, a GPU apart."""
    cpu = f"{machine['cpu']}, {machine['cpus']} CPUs, {_gib(machine['memory_bytes'])}"
    version = f", torch {torch}" if torch else ""
    return f"machine: {cpu}; {machine['platform']}; Python {machine['python']}{version}"


def made_lines(document: Document) -> list[str]:
    """When it was made, and how to make it again."""
    at = document["at"].replace("T", " ").replace("Z", " UTC")
    return [f"at: {at}", *([f"again: {document['command']}"] if document["command"] else [])]


def _engines(*documents: Document) -> str:
    """The engines with their versions, where they are not only ours."""
    names = list(dict.fromkeys(document["model"]["engine"] for document in documents))
    return "" if names in (["native"], ["scripted"]) else f", {' and '.join(sorted(names))}"


def _gib(size: int | None) -> str:
    return f"{size / (1 << 30):.1f} GiB" if size else "memory unknown"


def _gpu_text(machine: Mapping[str, Any]) -> str:
    text = f"{machine['ranks']} x {machine['gpu']}" if machine["ranks"] > 1 else machine["gpu"]
    before, after = machine.get("gpu_before"), machine.get("gpu_after")
    if not before:
        return f"{text}; the driver gave no answer (nvidia-smi)"
    text += f", driver {before['driver']}, limit {number(before['power_w'])} W"
    for name, unit in (("clock_mhz", "MHz"), ("temperature_c", "C")):
        values = [number(facts[name]) for facts in (before, after) if facts]
        text += f", {' -> '.join(values)} {unit}"
    return text


def _run_line(document: Document, order: str) -> str:
    run = document["run"]
    sampled = f"sampled at temperature {run['temperature']:g}, top-k {run['top_k']}, top-p {run['top_p']:g}"
    prompts = sorted({sample["prompt_tokens"] for sample in document["samples"]})
    exact = f"exactly {run['tokens']:,} tokens x {len(document['samples'])}"
    parts = [
        f"run: task {run['task']}",
        f"{' to '.join(f'{number:,}' for number in dict.fromkeys((prompts[0], prompts[-1])))} prompt tokens",
        exact if run["exact"] else "fewer tokens than asked for",
        f"warm-up {run['warmup']}",
        f"{sampled if run['temperature'] else 'greedy'}, seed {run['seed']}",
    ]
    if run["thinking"] is not None:
        parts.append("thinking" if run["thinking"] else "not thinking")
    if run["full_width"]:
        parts.append("every draft verified")
    return ", ".join(parts) + (f"; modes {order}" if order else "")


def _cells(documents: Sequence[Document]) -> Cells:
    """A column a mode: times first, then what its drafts brought."""
    lines: Cells = [["", *(lane_name(document, documents) for document in documents)]]

    def add(name: str, value: Callable[[Document], str]) -> None:
        lines.append([name, *(value(document) for document in documents)])

    def summary(name: str, path: tuple[str, ...], columns: Sequence[str]) -> None:
        for column in columns:
            add(f"{name} {column}", lambda d, column=column: number(_at(d, (*path, column))))

    add("tok/s", lambda d: number(d["decode"]["tok_s"]))
    summary("TPOT ms", ("decode", "tpot_ms"), _COLUMNS)
    summary("step ms", ("decode", "step_ms"), ("median", "p99"))
    if any(document["decode"]["gpu_step_ms"] is not None for document in documents):
        add("GPU step ms", lambda d: number(d["decode"]["gpu_step_ms"]))
        add("caller - GPU ms", lambda d: number(d["decode"]["host_gap_ms"]))
    summary("TTFT ms", ("ttft_ms",), ("median", "p99"))
    summary("prefill tok/s", ("prefill", "tok_s"), ("median",))
    add("cached tokens", lambda d: str(d["prefill"]["cached_tokens"]))
    add("accept length", lambda d: f"{d['speculation']['accept_length']:.2f}")
    for key in ("steps", "drafted", "accepted"):
        add(key, lambda d, key=key: str(d["speculation"][key]))
    add("accepted %", lambda d: _per_cent(d["speculation"]["rate"]))
    for position in range(max(len(d["speculation"]["rate_by_position"]) for d in documents)):
        add(f"position {position + 1} %", lambda d, at=position: _rate_at(d, at))
    return lines


def _at(document: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def _per_cent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}"


def _rate_at(document: Document, position: int) -> str:
    rates = document["speculation"]["rate_by_position"]
    drafting = position < document["model"]["block"]
    return _per_cent(rates[position] if position < len(rates) else 0.0 if drafting else None)


def _conclusions(documents: Sequence[Document]) -> Iterator[str]:
    """How the modes compare, the long answer beside the public record, and the verdict on all of it."""
    for document in documents:
        yield from _faster(document, documents)
    answer = documents[0]["answer"]
    record, made = answer["record"], f"{documents[0]['run']['tokens']:,}"
    how = "as measured" if answer["measured"] else f"from {made} tokens: TTFT + {answer['tokens'] - 1:,} x TPOT"
    here = ", ".join(f"{lane_name(d, documents)} {_seconds(d['answer']['seconds'])}" for d in documents)
    rows = ", ".join(f"{row['name']} {row['seconds']:g} s" for row in record["rows"])
    yield f"a {answer['tokens']:,}-token answer here: {here} ({how})"
    yield f"  elsewhere: {rows} ({record['machine']}; {answer['tokens']:,} x TPOT)"
    if documents[0].get("checked"):
        yield f"checked: {'; '.join(documents[0]['checked'])}"
    doubts = warnings(documents)
    spreads = [d["trust"]["spread"] for d in documents if d["trust"]["spread"] is not None]
    spread = f"repetitions differ by {100 * max(spreads):.1f} % (standard deviation of TPOT)" if spreads else ""
    others = [d["trust"]["others_cpus"] for d in documents if d["trust"]["others_cpus"] is not None]
    load = f"others used {max(others):.1f} of {documents[0]['machine']['cpus']} CPUs" if others else ""
    facts = "; ".join(part for part in (spread, load) if part)
    if doubts:
        yield f"believe it? With care: {facts}" if facts else "believe it? With care"
        yield from (f"  - {doubt}" for doubt in doubts)
    else:
        yield f"believe it? Nothing speaks against it: {facts}"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{number(value)} s"


def _faster(document: Document, documents: Sequence[Document]) -> Iterator[str]:
    """How much faster its tokens come than without drafts, and than those of the first engine in the same mode."""
    mode, engine, first = document["model"]["drafter"], _engine(document), _engine(documents[0])
    beside = [("off", engine)] if mode != "off" else []
    beside += [(mode, first)] if engine != first else []
    tpot = document["decode"]["tpot_ms"]["mean"]
    for wanted in beside:
        other = next((d for d in documents if (d["model"]["drafter"], _engine(d)) == wanted), None)
        if other is not None and tpot and other["decode"]["tpot_ms"]["mean"]:
            ratio = other["decode"]["tpot_ms"]["mean"] / tpot
            yield f"{lane_name(document, documents)}: {ratio:.2f} times as fast as {lane_name(other, documents)}"


def warnings(documents: Sequence[Document]) -> list[str]:
    """All warnings, each once: with the mode's name where not all of several modes have it."""
    everywhere = [warning for warning in documents[0]["warnings"] if all(warning in d["warnings"] for d in documents)]
    own = [
        f"{_lead(document, documents)}{document['model']['drafter']}: {warning}"
        for document in documents
        for warning in document["warnings"]
        if warning not in everywhere
    ]
    return [*everywhere, *own]


def compared_lines(compared: Mapping[str, Any]) -> list[str]:
    """What a comparison says besides its ratios."""
    lines = [f"compared with {compared['file']}:"]
    lines += [f"  - not the same: {difference}" for difference in compared["differs"]]
    if compared["only_in_one"]:
        lines.append(f"  - only in one of the two: {', '.join(compared['only_in_one'])}")
    return lines


def compared_cells(compared: Mapping[str, Any]) -> Cells:
    """A line a figure: then, now, ratio."""
    lines: Cells = [["", "then", "now", "ratio", ""]]
    for mode in compared["modes"]:
        for row in mode["figures"]:
            noise = "within spread" if row["within_spread"] else ""
            name = f"{mode['mode']} {row['figure']}"
            lines.append([name, number(row["then"]), number(row["now"]), f"{row['ratio']:.3f}", noise])
    return lines


def table(documents: Sequence[Document], order: str, compared: Mapping[str, Any] | None) -> str:
    """For a terminal."""
    lines = _cells(documents)
    width = max(_WIDTH, *(len(name) + 2 for name in lines[0]))
    parts = [*machine_lines(_most_marked(documents), documents), _run_line(documents[0], order), ""]
    parts += [aligned(lines, _FIRST, width), "", *_conclusions(documents)]
    if compared:
        cells = compared_cells(compared)
        parts += ["", *compared_lines(compared), aligned(cells, max(len(line[0]) for line in cells) + 2, 15)]
    return "\n".join(line.rstrip() for line in "\n".join(parts).split("\n"))


def markdown_page(documents: Sequence[Document], order: str, compared: Mapping[str, Any] | None) -> str:
    """For a page of notes."""
    head = [*machine_lines(_most_marked(documents), documents), _run_line(documents[0], order)]
    parts = [broken(head), markdown(_cells(documents)), broken(list(_conclusions(documents)))]
    if compared:
        parts += [broken(compared_lines(compared)), markdown(compared_cells(compared))]
    return "\n\n".join(parts)


def _most_marked(documents: Sequence[Document]) -> Document:
    return max(documents, key=lambda document: len(document["marks"]))


def csv_rows(documents: Sequence[Document], order: str, compared: Mapping[str, Any] | None) -> str:
    """A row a repetition; what holds for all of them stands in each. Ratios have no place here."""
    return csv_text([row for document in documents for row in _csv_rows(document)])


def _csv_rows(document: Document) -> list[dict[str, Any]]:
    model, machine = document["model"], document["machine"]
    run = {
        "ling": document["ling"],
        "at": document["at"],
        "model": model["id"],
        "engine": model["engine"],
        "dtype": model["dtype"],
        "device": machine["device"],
        "machine": machine["gpu"] or machine["cpu"],
        "task": document["run"]["task"],
        "temperature": document["run"]["temperature"],
        "drafter": model["drafter"],
        "block": model["block"],
        "marks": "; ".join(document["marks"]),
        "warnings": "; ".join(document["warnings"]),
        "command": document["command"],
    }
    return [{**run, "repetition": index, **sample} for index, sample in enumerate(document["samples"], 1)]


FORMATS: Mapping[str, Callable[[Sequence[Document], str, Mapping[str, Any] | None], str]] = {
    "table": table,
    "md": markdown_page,
    "csv": csv_rows,
}
