"""`ling models`: what is on this machine, whole or not, and what can be fetched."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from ling_local import hub, paths
from ling_local.cli import options as opt
from ling_local.cli.output import Output
from ling_local.cli.pages import Page
from ling_local.engine.checkpoint import hub_repository
from ling_local.errors import ModelError
from ling_local.published import PUBLISHED, Published, size_text
from ling_local.settings import Settings

PAGE = Page(
    "[OPTIONS] [FOLDER]...",
    examples=(
        "ling models",
        "ling models --all                  what can be fetched, too",
        "ling models ~/checkpoints/my-ling",
        "ling models --json | jq -r '.models[].name'",
    ),
    notes="Listed are the demo, folders in $XDG_DATA_HOME/ling/models, Ling checkpoints in the Hugging Face cache "
    "(HF_HOME and HF_HUB_CACHE are obeyed), and the folders that you name; the exit code is 1 where one of those "
    "cannot be used. Any folder can be given to -m. "
    "`ling list` is the same command.",
)


@opt.flags("all", "json", "color", "quiet", "verbose", "debug")
def command(
    context: typer.Context,
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER...", help="Checkpoint folders to look at as well.")
    ] = None,
) -> bool:
    """List the models on this machine, and say which ones are incomplete."""
    settings, output = opt.open_settings(context)
    models = hub.list_models(tuple(folders or ()))
    named = [model for model in models if model.source == "folder" and model.problem]
    if output.json:  # one document, which says it of each model
        _print_json(models, settings, output)
        return not named
    _print(models, settings, output)
    for model in named:
        closer = f"`ling doctor -m {shlex.quote(model.name)}` looks closer."
        output.error(ModelError(f"{model.name} cannot be used: {model.problem}", closer))
    return not named


def _print_json(models: tuple[hub.LocalModel, ...], settings: Settings, output: Output) -> None:
    document: dict[str, Any] = {"schema": 1, "models": [_row(model) for model in models]}
    if settings["all"]:
        document["published"] = [_published_row(row) for row in PUBLISHED]
    output.print_json(document)


def _print(models: tuple[hub.LocalModel, ...], settings: Settings, output: Output) -> None:
    published = PUBLISHED if settings["all"] else ()
    width = max(len(name) for name in (*(model.name for model in models), *(row.repo for row in published)))
    for model in models:
        output.print(f"{model.name:<{width}}  {size_text(model.size_bytes):>9}  {model.source:<18}  {_state(model)}")
    if published:
        output.print("\nTo fetch with `ling pull NAME`:")
    for row in published:
        size = size_text(row.size_bytes) if row.size_bytes else "?"
        what = f"drafter of {row.draft_for}" if row.draft_for else "model"
        output.print(f"{row.repo:<{width}}  {size:>9}  {row.name:<18}  {row.refusal or what}")
    output.note(f"folders in {paths.models_dir()} are found by name; -m takes any folder", "dim")


def _state(model: hub.LocalModel) -> str:
    if not model.problem:
        return f"drafter, {model.folder}" if model.draft else str(model.folder)
    parts = f", {size_text(model.part_bytes)} of parts" if model.part_bytes else ""
    repo = hub_repository(model.folder)
    repair = f"; `ling pull {repo}` goes on" if repo else ""
    return f"incomplete: {model.problem}{parts}{repair}"


def _row(model: hub.LocalModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "folder": str(model.folder),
        "source": model.source,
        "size_bytes": model.size_bytes,
        "usable": not model.problem,
        "problem": model.problem or None,
        "drafter": model.draft,
        "part_bytes": model.part_bytes,
    }


def _published_row(row: Published) -> dict[str, Any]:
    return {
        "name": row.name,
        "repo": row.repo,
        "size_bytes": row.size_bytes or None,
        "format": row.format,
        "drafter_of": row.draft_for or None,
        "refused": row.refusal or None,
    }
