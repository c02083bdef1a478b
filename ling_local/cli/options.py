"""The flags that commands share, made from the settings table, and the settings a command runs with."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from ling_local import settings as settings_room
from ling_local.cli.output import Output, set_colour
from ling_local.settings import TABLE, Settings
from ling_local.text.clean import check_text


def _option(name: str) -> Any:
    """The annotation of a flag: not given is None; texts are parsed by settings.py, so that a flag, a
    variable and a config key refuse the same things in the same words."""
    setting = TABLE[name]
    kinds: dict[str, Any] = {"bool": bool | None, "list": list[str] | None}
    option = typer.Option(*setting.flags, help=setting.help, autocompletion=_completion(name))
    return Annotated[kinds.get(setting.kind, str | None), option]


def _completion(name: str) -> Callable[[str], list[str]] | None:
    """What the shell offers for the flag's value; None: nothing of ours."""
    if name == "model":
        return model_names
    if name in _LISTS:
        return lambda incomplete: _next_of(TABLE[_LISTS[name]].choices, incomplete)
    choices = TABLE[name].choices
    return (lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]) if choices else None


_LISTS = {"modes": "speculation", "engines": "engine"}  # settings that hold several values of another one


def _next_of(choices: tuple[str, ...], incomplete: str) -> list[str]:
    """The next of several values with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    known = [name for name in choices if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]


def model_names(incomplete: str) -> list[str]:
    """Names on this machine, for the shell. A path is completed by the shell itself."""
    from ling_local import hub

    return [name for name in hub.names_here() if name.lower().startswith(incomplete.lower())]


SAMPLING = ("temperature", "top_p", "top_k", "seed")
ENGINE = ("block", "device", "gpus", "dtype", "ctx", "threads", "engine", "sglang_arg")
STREAMS = ("color", "quiet", "verbose", "debug", "offline")
RARE = (*ENGINE, "explain", *STREAMS)
RARE_OF_BENCH = tuple("engines" if name == "engine" else name for name in RARE)  # there it may name several


def flags(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command these settings as options, after its own parameters; several names may stand in one word list.

    It reads their values with `open_settings`.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            return command(**{name: value for name, value in given.items() if name in own.parameters})

        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name))
            for name in " ".join(names).split()
        ]
        run.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])
        run.__annotations__ = {name: part.annotation for name, part in run.__signature__.parameters.items()}
        return run

    return add


def open_settings(context: typer.Context, *, warn: bool = True) -> tuple[Settings, Output]:
    """Resolve the settings of this run, let the streams follow them, and say the warnings. Mutates the Output."""
    output: Output = context.obj
    output.json = bool(context.params.get("json"))  # as it was parsed: a prompt may be "--json"
    flags: dict[str, Any] = {}
    for level in (context.parent, context):
        params = level.params if level is not None else {}
        flags |= {name: _clean(name, value) for name, value in params.items() if name in TABLE and value is not None}
    settings = settings_room.resolve(flags)
    set_colour(output, settings["color"])
    output.quiet, output.debug, output.verbose = settings["quiet"], settings["debug"], settings["verbose"]
    for warning in settings.warnings if warn else ():
        output.warn(warning)
    return settings, output


def _clean(name: str, value: Any) -> Any:
    if name == "prompt":  # read like a file: what is not UTF-8 in it gets a warning
        return value
    if isinstance(value, str):
        return check_text(value)
    return [_clean(name, item) for item in value] if isinstance(value, list) else value
