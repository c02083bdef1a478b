"""`ling help`: pages on commands and on topics that belong to no single command."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from collections.abc import Iterable
from typing import Annotated

import typer
from typer.core import TyperGroup

from ling_local import errors
from ling_local.cli import options as opt
from ling_local.cli import topics as topic_pages
from ling_local.cli.output import Output
from ling_local.cli.pages import Page, section
from ling_local.errors import UsageError
from ling_local.settings import KEPT

_MADE = {  # pages that follow from the program itself
    "exit-codes": "What the exit code says.",
    "settings": "Every setting: flag, variable, config key, default.",
    "scripted": "The scripted engine and its file format.",
}
PAGE = Page(
    "[COMMAND|TOPIC]", examples=("ling help", "ling help chat", "ling help speed", "ling help exit-codes | less")
)


def topics(commands: Iterable[str]) -> dict[str, str]:
    """Topics that are no commands, with their summaries, by name."""
    known = set(commands)
    written = {name: topic_pages.summary(name) for name in topic_pages.page_names() if name not in known}
    return dict(sorted({**written, **_MADE}.items()))


def _complete(context: typer.Context, incomplete: str) -> list[str]:
    group = context.parent.command if context.parent else None
    commands = list(group.list_commands(context.parent)) if isinstance(group, TyperGroup) else []
    return [name for name in (*commands, *topics(commands)) if name.startswith(incomplete)]


@opt.flags("color")
def command(
    context: typer.Context,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="A command or a topic.", autocompletion=_complete)
    ] = None,
) -> None:
    """Explain a command or a topic."""
    output: Output = context.obj
    group, width = context.parent, _width(context.obj)
    assert group is not None
    commands = group.command.list_commands(group)
    known = topics(commands)
    if topic is None:
        output.print_help(group.get_help())
        output.print("\n" + section("Topics (ling help TOPIC):", list(known.items()), width))
    elif topic in known:
        output.print(_page(topic, width))
    else:
        target = group.command.get_command(group, topic)
        if target is None:
            meant = difflib.get_close_matches(topic, [*known, *commands], n=1, cutoff=0.5)
            tail = f" Did you mean '{meant[0]}'?" if meant else f" Topics: {', '.join(known)}."
            raise UsageError(f"no help on '{topic}'.{tail}")
        with target.make_context(target.name, [], parent=group, resilient_parsing=True) as inner:
            output.print_help(target.get_help(inner))
        more = topic_pages.body(target.name, width)
        if more:
            output.print(f"\n{more}")


def _page(topic: str, width: int) -> str:
    made = {"exit-codes": _exit_codes, "settings": _settings, "scripted": _scripted, "keys": _keys}
    if topic in made:
        return made[topic](width)
    return f"{textwrap.fill(topic_pages.summary(topic), width)}\n\n{topic_pages.body(topic, width)}"


def _width(output: Output) -> int:
    return max(40, min(output.columns, 100))


def _exit_codes(width: int) -> str:
    rows = [
        (str(errors.EXIT_OK), "Done. An interactive chat that you leave ends with this, too."),
        (
            str(errors.EXIT_FAILED),
            "It failed: model, generation, network, disk, or a check of `ling doctor`.",
        ),
        (
            str(errors.EXIT_USAGE),
            "Used wrongly: a flag, the input, the config, or a prompt that is too long.",
        ),
        (str(errors.EXIT_INTERRUPTED), "Interrupted (Ctrl-C) before the answer was complete."),
        (str(errors.EXIT_BROKEN_PIPE), "The reader of our pipe left, as `head` does; nothing is said."),
        ("143, 129", "Ended by SIGTERM or SIGHUP; the engine is released first."),
    ]
    return section("Exit codes:", rows, width)


def _settings(width: int) -> str:
    intro = (
        "Order: flag, LING_ variable, $XDG_CONFIG_HOME/ling/config.toml, the model's own generation_config.json "
        "(temperature, top_p, top_k), default. Keys in config.toml stand at the top level and are named as here; "
        "stop is a list. A LING_ variable for a switch takes 1 or 0. `ling config` shows the values in force."
    )
    rows = []
    for row in KEPT.values():
        choices = f" {' or '.join(row.choices)}." if row.choices else ""
        rows.append((row.name, f"{row.help}{choices} [{row.flags[0]}, {row.variable}; default: {row.default_text}]"))
    return f"{textwrap.fill(intro, width)}\n\n{section('Settings:', rows, width)}"


def _keys(width: int) -> str:
    from ling_local.tui.commands import ALIASES, COMMANDS, KEYS_HELP

    rows = [(f"/{row.name} {row.argument}".rstrip(), row.help) for row in COMMANDS.values()]
    rows.append((", ".join(f"/{name}" for name in ALIASES), "other words for some of these"))
    keys = "\n".join(f"  {line}" for line in KEYS_HELP)
    return f"{topic_pages.summary('keys')}\n\nKeys:\n{keys}\n\n{section('Commands:', rows, width)}"


def _scripted(width: int) -> str:
    from ling_local.engine import scripted

    use = "Choose it with: ling complete --engine scripted -m script.json < file, or LING_ENGINE=scripted."
    return f"{use}\n\n{inspect.cleandoc(scripted.__doc__ or '')}"
