"""`ling help`: pages on commands and on topics that belong to no single command."""

from __future__ import annotations

import difflib
import inspect
import textwrap
from typing import Annotated

import typer

from ling_local import errors
from ling_local.cli import options as opt
from ling_local.cli.output import Output
from ling_local.cli.pages import Page, section
from ling_local.errors import UsageError
from ling_local.settings import KEPT

TOPICS = {
    "exit-codes": "What the exit code says.",
    "settings": "Every setting: flag, variable, config key, default.",
    "speculation": "Drafts: what they change (speed), what not (text), and their figures.",
    "scripted": "The scripted engine and its file format.",
}
PAGE = Page("[COMMAND|TOPIC]", examples=("ling help", "ling help chat", "ling help exit-codes"))


def command(
    context: typer.Context,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="A command or a topic.")] = None,
    color: opt.Color = None,
) -> None:
    """Explain a command or a topic."""
    output: Output = context.obj
    group = context.parent
    assert group is not None
    if topic is None:
        output.print_help(group.get_help())
        output.print("\n" + section("Topics (ling help TOPIC):", list(TOPICS.items()), _width(output)))
    elif topic in TOPICS:
        pages = {
            "exit-codes": _exit_codes,
            "settings": _settings,
            "speculation": _speculation,
            "scripted": _scripted,
        }
        output.print(pages[topic](_width(output)))
    else:
        commands = group.command.list_commands(group)
        if topic not in commands:
            meant = difflib.get_close_matches(topic, [*TOPICS, *commands], n=1, cutoff=0.5)
            tail = f" Did you mean '{meant[0]}'?" if meant else f" Topics: {', '.join(TOPICS)}."
            raise UsageError(f"no help on '{topic}'.{tail}")
        target = group.command.get_command(group, topic)
        with target.make_context(topic, [], parent=group, resilient_parsing=True) as inner:
            output.print_help(target.get_help(inner))


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


def _speculation(width: int) -> str:
    paragraphs = (
        "A drafter guesses the next few tokens, and the model verifies all of them in one step. A step keeps the "
        "drafts up to the first that the model would not have chosen, and adds one token of the model's own, the "
        "bonus token. So a step gives between 1 and block + 1 tokens for little more than the time of one.",
        "The text never changes. Each position's token is drawn by the model itself, with noise that is keyed by the "
        "seed and the position; a draft is kept only where it equals that draw. The ids are the same with every "
        "drafter, every block size and none, at temperature 0 and when sampling, for every seed. `ling bench --check` "
        "compares them on all bundled prompts and fails if one differs.",
    )
    drafters = [
        ("auto", "dspark where the model's folder has a draft, else mtp where it has such a layer, else off."),
        ("dspark", "A small network of its own, trained on blocks, that reads the model's inner layers."),
        ("mtp", "The model's own layer for the token after the next, fed with its own output for longer blocks."),
        ("off", "One token a step. The drafter is not loaded."),
    ]
    sizes = (
        "--block N drafts N tokens a step, from 1 to the size that the drafter was trained on (mtp: 8, and 1 unless "
        "you say otherwise); a larger N is refused. It caps the accept length at N + 1, and saves time where "
        "later drafts are seldom right. The engine may draft less than that by itself: it times its steps, and rests "
        "or narrows a drafter that costs more than it brings. `ling bench --full-width` has it verify all drafts.",
    )
    figures = [
        ("steps", "Verify steps, those without drafts included."),
        ("drafted, accepted", "Drafts that were verified, and those of them that were kept; their ratio is rate."),
        ("accept length", "Tokens / steps, the bonus token counted; 1.00 without drafts."),
        (
            "rate by position",
            "Share of all steps that kept at least that many drafts. 1 + the sum of all is the accept length.",
        ),
        ("rate given previous", "Of the steps that kept every draft before it, the share that kept this one, too."),
    ]
    cut = (
        "A step that an end of turn, a stop or --max-tokens cuts short counts with what was kept: its last token is "
        "its bonus token. Figures are in --stats, in --json, and in `ling bench`.",
    )

    def prose(texts: tuple[str, ...]) -> str:
        return "\n\n".join(textwrap.fill(text, width) for text in texts)

    return "\n\n".join(
        [
            prose(paragraphs),
            section("--speculation:", drafters, width),
            prose(sizes),
            section("Figures:", figures, width),
            prose(cut),
        ]
    )


def _scripted(width: int) -> str:
    from ling_local.engine import scripted

    use = "Choose it with: ling complete --engine scripted -m script.json < file, or LING_ENGINE=scripted."
    return f"{use}\n\n{inspect.cleandoc(scripted.__doc__ or '')}"
