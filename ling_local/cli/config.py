"""`ling config`: every setting, its value, and where it comes from."""

from __future__ import annotations

import math
from typing import Any

import typer

from ling_local import hub, paths
from ling_local.cli import options as opt
from ling_local.cli.pages import Page
from ling_local.errors import ModelError
from ling_local.settings import KEPT, Setting, show, with_model

PAGE = Page(
    "[OPTIONS]",
    examples=("ling config", "ling config -m tiny -t 0.6", "ling config --json | jq .settings.top_p"),
    rare=(*(name for name in KEPT if name not in ("model", "json")),),
    notes="Order: flag, LING_ variable, config.toml, the model's generation_config.json, default. With the flags of a "
    "run it shows what that run would use. `ling help settings` explains each.",
)


@opt.flags(
    "model max_tokens",
    *opt.SAMPLING,
    "stop until system think think_budget show_thinking stats plain history stdin_wait speculation",
    *opt.ENGINE,
    "json",
    *opt.STREAMS,
)
def command(context: typer.Context) -> None:
    """Show every setting and where its value comes from."""
    settings, output = opt.open_settings(context)
    if settings["engine"] == "native":
        try:
            completed = with_model(settings, hub.find_model(settings["model"]))
        except ModelError as error:
            output.warn(error.message)
        else:
            for warning in completed.warnings[len(settings.warnings) :]:
                output.warn(warning)
            settings = completed
    if output.json:
        rows: dict[str, Any] = {
            name: {"value": shown(row, settings[name]), "source": settings.sources[name], "variable": row.variable}
            for name, row in KEPT.items()
        }
        output.print_json({"schema": 1, "file": str(paths.config_file()), "settings": rows})
        return
    output.note(f"file: {paths.config_file()}", "dim")
    for name, row in KEPT.items():
        value = shown(row, settings[name])
        text = row.default_text if value is None or value == () else show(value).replace("\n", "\\n")
        output.print(f"{name:<14} {text:<32} {settings.sources[name]}")


def shown(row: Setting, value: Any) -> Any:
    """The value, but for a secret one, and for one that JSON has no number for."""
    if row.secret and value is not None:
        return "(set)"
    return "inf" if value == math.inf else value
