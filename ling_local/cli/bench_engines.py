"""`ling bench --engine native,sglang`: which engines are measured, and the settings of each one's part."""

from __future__ import annotations

from collections.abc import Sequence

from ling_local.cli.opening import explained
from ling_local.cli.output import Output
from ling_local.errors import UsageError
from ling_local.settings import TABLE, Settings, parse


def engines_asked(settings: Settings) -> tuple[str, ...]:
    """The engines asked for, each once. Raises UsageError."""
    text = settings["engines"]
    if text is None:
        return (settings["engine"],)
    names = tuple(dict.fromkeys(parse(TABLE["engine"], name.strip()) for name in text.split(",")))
    if len(names) > 1 and (settings["check"] or settings["breakdown"] or settings["dummy"]):
        flag = next(f"--{name}" for name in ("check", "breakdown", "dummy") if settings[name])
        raise UsageError(f"{flag} is for one engine", "Name one with --engine, or leave it out.")
    return names


def for_engine(settings: Settings, name: str, names: Sequence[str]) -> Settings:
    """The settings of one engine's part: all on the GPU beside SGLang, and its own flags not for the others."""
    settings = settings.changed(engine=name)
    if "sglang" in names and settings.is_default("device"):
        settings = settings.changed(device="cuda")
    return settings if name == "sglang" or len(names) == 1 else settings.changed(sglang_arg=())


def explain_all(settings: Settings, output: Output, engines: Sequence[str], modes: Sequence[str]) -> None:
    """Print what would be started in each mode. Raises UsageError where none of the engines can say it."""
    engine = "sglang" if "sglang" in engines else engines[-1]
    for mode in modes:
        explained(settings.changed(engine=engine, speculation=mode), output)
