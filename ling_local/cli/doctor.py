"""`ling doctor`: what is right and wrong on this machine, with a fix a line."""

from __future__ import annotations

import time

import typer

from ling_local import __version__
from ling_local import doctor as checks
from ling_local.cli import options as opt
from ling_local.cli.pages import Page
from ling_local.errors import ConfigError
from ling_local.settings import TABLE, parse

PAGE = Page(
    "[OPTIONS]",
    examples=("ling doctor", "ling doctor --json | jq -r '.checks[] | select(.status != \"pass\")'"),
    rare=("device", "dtype", "timeout", "color", "quiet", "verbose", "debug", "offline"),
    notes="Exit code 1 if a check fails; warnings do not count. Torch and the GPUs are asked in a process of its own, "
    "so that a driver that hangs or crashes is a line of the report. Nothing is asked over the network.",
)
_STYLES = {"pass": "green", "warn": "yellow", "fail": "red"}


@opt.flags("model", "device", "dtype", "timeout", "json", *opt.STREAMS)
def command(context: typer.Context) -> bool:
    """Check this machine and say what to repair."""
    output, timeout = context.obj, context.params["timeout"]
    try:
        settings, output = opt.open_settings(context, warn=False)
        limit_s = settings["timeout"]
    except ConfigError:  # a wrong file or variable is a line of the report, not the end of it; flags are right by then
        settings = None
        limit_s = parse(TABLE["timeout"], timeout) if timeout else checks.PROBE_S
    found, started = [], time.monotonic()
    output.progress("checking")
    for check in checks.run_checks(settings, output.stdout.terminal, limit_s):
        found.append(check)
        output.detail(f"{check.name}: after {time.monotonic() - started:.1f} s")
        if not output.json:
            mark = output.style(output.stdout, f"{check.status.value:<5}", _STYLES[check.status.value])
            output.write_bytes(f"{mark}".encode())
            output.print(f"{check.name:<17} {check.detail}" + (f"\n{'':23}{check.fix}" if check.fix else ""))
        else:
            output.progress(f"checking: {check.name}")
    failed = any(check.status is checks.Status.FAIL for check in found)
    if output.json:
        rows = [
            {"name": check.name, "status": check.status.value, "detail": check.detail, "fix": check.fix}
            for check in found
        ]
        output.print_json({"schema": 1, "ling": __version__, "ok": not failed, "checks": rows})
    return not failed
