"""The flags that commands share, made from the settings table, and the settings a command runs with."""

from __future__ import annotations

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
    if name in ("model", "modes"):
        return {"model": model_names, "modes": _modes}[name]
    choices = TABLE[name].choices
    return (lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)]) if choices else None


def _modes(incomplete: str) -> list[str]:
    """The next of several drafters with commas between them."""
    before, comma, last = incomplete.rpartition(",")
    known = [name for name in TABLE["speculation"].choices if name not in before.split(",")]
    return [f"{before}{comma}{name}" for name in known if name.startswith(last)]


def model_names(incomplete: str) -> list[str]:
    """Names on this machine, for the shell. A path is completed by the shell itself."""
    from ling_local import hub

    return [name for name in hub.names_here() if name.lower().startswith(incomplete.lower())]


Model = _option("model")
MaxTokens = _option("max_tokens")
Temperature = _option("temperature")
TopP = _option("top_p")
TopK = _option("top_k")
Seed = _option("seed")
Stop = _option("stop")
Until = _option("until")
System = _option("system")
Think = _option("think")
ThinkBudget = _option("think_budget")
ShowThinking = _option("show_thinking")
Plain = _option("plain")
History = _option("history")
Resume = _option("resume")
Stats = _option("stats")
StdinWait = _option("stdin_wait")
Speculation = _option("speculation")
Block = _option("block")
Device = _option("device")
Gpus = _option("gpus")
Dtype = _option("dtype")
Ctx = _option("ctx")
Threads = _option("threads")
EngineName = _option("engine")
Engines = _option("engines")
SglangArg = _option("sglang_arg")
Explain = _option("explain")
Color = _option("color")
Quiet = _option("quiet")
Verbose = _option("verbose")
Debug = _option("debug")
Offline = _option("offline")
Prompt = _option("prompt")
Json = _option("json")
Revision = _option("revision")
Verify = _option("verify")
All = _option("all")
Timeout = _option("timeout")
Format = _option("format")
PromptTokens = _option("prompt_tokens")
Tokens = _option("tokens")
Repetitions = _option("repetitions")
Warmup = _option("warmup")
Task = _option("task")
Modes = _option("modes")
FullWidth = _option("full_width")
Check = _option("check")
CheckBlocks = _option("check_blocks")
Dummy = _option("dummy")
Layers = _option("layers")
Shard = _option("shard")
AcceptPattern = _option("accept_pattern")
Breakdown = _option("breakdown")
Host = _option("host")
Port = _option("port")
ApiKey = _option("api_key")
Queue = _option("queue")
AllowHost = _option("allow_host")
AllowOrigin = _option("allow_origin")

_ENGINE = ("block", "device", "gpus", "dtype", "ctx", "threads", "engine", "engines", "sglang_arg", "explain")
RARE = (*_ENGINE, "color", "quiet", "verbose", "debug", "offline")


def open_settings(context: typer.Context, *, warn: bool = True) -> tuple[Settings, Output]:
    """Resolve the settings of this run, let the streams follow them, and say the warnings. Mutates the Output."""
    output: Output = context.obj
    flags: dict[str, Any] = {}
    for level in (context.parent, context):
        params = level.params if level is not None else {}
        flags.update({name: _clean(value) for name, value in params.items() if name in TABLE and value is not None})
    settings = settings_room.resolve(flags)
    set_colour(output, settings["color"])
    output.quiet, output.debug, output.verbose = settings["quiet"], settings["debug"], settings["verbose"]
    for warning in settings.warnings if warn else ():
        output.warn(warning)
    return settings, output


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return check_text(value)
    return [_clean(item) for item in value] if isinstance(value, list) else value
