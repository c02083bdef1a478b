"""`ling models`: what is on this machine, whole or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ling_local import hub, paths
from ling_local.cli import options as opt
from ling_local.cli.pages import Page

PAGE = Page(
    "[OPTIONS] [FOLDER]...",
    examples=(
        "ling models",
        "ling models ~/checkpoints/my-ling",
        "ling models --json | jq -r '.models[].name'",
    ),
    notes="Listed are the demo, folders in $XDG_DATA_HOME/ling/models, Ling checkpoints in the Hugging Face cache "
    "(HF_HOME and HF_HUB_CACHE are obeyed), and the folders that you name. Any folder can be given to -m.",
)


def command(
    context: typer.Context,
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="FOLDER...", help="Checkpoint folders to look at as well.")
    ] = None,
    json: opt.Json = None,
    color: opt.Color = None,
    quiet: opt.Quiet = None,
    verbose: opt.Verbose = None,
    debug: opt.Debug = None,
) -> None:
    """List the models on this machine, and say which ones are incomplete."""
    _, output = opt.open_settings(context)
    models = hub.list_models(tuple(folders or ()))
    if output.json:
        rows = [
            {
                "name": model.name,
                "folder": str(model.folder),
                "source": model.source,
                "size_bytes": model.size_bytes,
                "usable": not model.problem,
                "problem": model.problem or None,
            }
            for model in models
        ]
        output.print_json({"schema": 1, "models": rows})
        return
    width = max(len(model.name) for model in models)
    for model in models:
        state = f"incomplete: {model.problem}" if model.problem else str(model.folder)
        output.print(f"{model.name:<{width}}  {_size(model.size_bytes):>9}  {model.source:<18}  {state}")
    output.note(f"folders in {paths.models_dir()} are found by name; -m takes any folder", "dim")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
