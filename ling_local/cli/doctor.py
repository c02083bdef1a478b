"""`ling doctor`: what is right and wrong on this machine, or with one model, with a fix a line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import typer

from ling_local import __version__
from ling_local import doctor as checks
from ling_local.cli import options as opt
from ling_local.cli.output import Output
from ling_local.cli.pages import Page
from ling_local.errors import ConfigError, LingError, UsageError
from ling_local.settings import TABLE, Settings, parse

PAGE = Page(
    "[OPTIONS]",
    examples=(
        "ling doctor",
        "ling doctor --check-model tiny",
        "ling doctor --check-model ~/my-ling --answers --device cuda",
        "ling doctor --json | jq -r '.checks[] | select(.status != \"pass\")'",
    ),
    rare=("device", "dtype", "timeout", "color", "quiet", "verbose", "debug", "offline"),
    notes="Exit code 1 if a check fails; warnings do not count. Torch and the GPUs are asked in a process of its own, "
    "so that a driver that hangs or crashes is a line of the report. Nothing is asked over the network.",
)
_STYLES = {"pass": "green", "warn": "yellow", "fail": "red"}
_BAR, _LINE_S = 24, 15.0


@opt.flags("model", "check_model", "answers", "device", "dtype", "timeout", "json", *opt.STREAMS)
def command(context: typer.Context) -> bool:
    """Check this machine, or one model, and say what to repair."""
    output, timeout = context.obj, context.params["timeout"]
    name, answers = context.params["check_model"], bool(context.params["answers"])
    if answers and name is None:
        raise UsageError("--answers needs a model", "Name it: --check-model NAME.")
    if name is not None:
        settings, output = opt.open_settings(context)
        return _report(_model(settings, output, answers), output, {"model": settings["check_model"]})
    try:
        settings, output = opt.open_settings(context, warn=False)
        limit_s = settings["timeout"]
    except ConfigError:  # a wrong file or variable is a line of the report, not the end of it; flags are right by then
        settings = None
        limit_s = parse(TABLE["timeout"], timeout) if timeout else checks.PROBE_S
    output.progress("checking")
    return _report(checks.run_checks(settings, output.stdout.terminal, limit_s), output, {})


def _report(found: Iterator[checks.Check], output: Output, facts: dict[str, str]) -> bool:
    """Write each check as it comes, or all as one document. False if one failed."""
    rows, started = [], time.monotonic()
    with closing(found):
        for check in found:
            rows.append({"name": check.name, "status": check.status.value, "detail": check.detail, "fix": check.fix})
            output.detail(f"{check.name}: after {time.monotonic() - started:.1f} s")
            if output.json:
                output.progress(f"checking: {check.name}")
                continue
            mark = output.style(output.stdout, f"{check.status.value:<5}", _STYLES[check.status.value])
            output.write_bytes(f"{mark}".encode())
            output.print(f"{check.name:<17} {check.detail}" + (f"\n{'':23}{check.fix}" if check.fix else ""))
    output.clear_progress()
    failed = any(row["status"] == checks.Status.FAIL for row in rows)
    if output.json:
        output.print_json({"schema": 1, "ling": __version__, "ok": not failed, **facts, "checks": rows})
    return not failed


def _model(settings: Settings, output: Output, answers: bool) -> Iterator[checks.Check]:
    """The checks of one model."""
    from ling_local.doctor.model import check_model, folder_of

    name = settings["check_model"]
    try:
        folder = folder_of(name, offline=settings["offline"])
    except LingError as error:
        yield checks.Check("model", checks.Status.FAIL, error.message, error.hint.replace("\n", "; "))
        return
    failed = False
    for check in check_model(folder, _meter(output, "reading", 1e9, "GB")):
        failed = failed or check.status is checks.Status.FAIL
        yield check
    if answers and failed:
        yield checks.Check("answers", checks.Status.WARN, "not asked: what failed above would fail the load")
    elif answers:
        yield from _answers(settings.changed(model=str(folder)), output)


def _answers(settings: Settings, output: Output) -> Iterator[checks.Check]:
    from ling_local.cli.opening import open_model
    from ling_local.doctor.answers import check_answers

    try:
        with open_model(settings, output) as opened:
            yield from check_answers(opened.engine, opened.text_model, _meter(output, "asking", 1, "guesses"))
    except LingError as error:
        yield checks.Check("answers", checks.Status.FAIL, error.message, error.hint.replace("\n", "; "))


def _meter(output: Output, what: str, unit: float, name: str) -> Callable[[int, int], None]:
    """A bar on a terminal, a line now and then elsewhere; takes how much is done, and how much there is."""
    told = time.monotonic()
    digits = 0 if unit == 1 else 2

    def show(done: int, total: int) -> None:
        nonlocal told
        share = done / max(total, 1)
        amount = f"{100 * share:3.0f} %  {done / unit:,.{digits}f} of {total / unit:,.{digits}f} {name}"
        full = int(share * _BAR)
        output.progress(f"{what} {'█' * full}{'░' * (_BAR - full)} {amount}")
        if not output.stderr.live and time.monotonic() - told > _LINE_S:
            told = time.monotonic()
            output.note(f"ling: {what}: {amount.strip()}")

    return show
