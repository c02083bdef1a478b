"""Help pages: one sentence, usage, options with defaults and variables, examples, exit codes."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand

from ling_local.settings import TABLE

EXIT_LINE = "0 done, 1 it failed, 2 used wrongly, 130 interrupted, 141 our reader left"
_INDENT, _COLUMN = 2, 28


@dataclass(frozen=True, slots=True)
class Page:
    """What a help page shows beyond the parameters. rare: settings listed under "More options"."""

    usage: str
    examples: tuple[str, ...] = ()
    rare: tuple[str, ...] = ()
    notes: str = ""
    defaults: tuple[tuple[str, str], ...] = ()  # what a setting's default is in this command
    events: bool = False  # its --json is one event a line, failures of every kind included


class LingCommand(TyperCommand):
    """A command whose help is rendered here, as plain text that `Output.style` may make bold."""

    page: Page = Page("")

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        if self.page.events:
            parent.obj.extra["event"] = "error"
        return super().make_context(info_name, args, parent, **extra)

    def get_help(self, ctx: typer.Context) -> str:
        return render(ctx, self.help or "", self.params, self.page)


def render(ctx: typer.Context, sentence: str, params: list[Any], page: Page, *middle: str) -> str:
    """The whole page as text, without a newline at its end; middle: blocks between usage and options."""
    output = ctx.obj
    width = max(40, min(output.columns, 100))
    ctx.color = True  # escape codes are decided by the stream; the printer must not judge again
    common = [param for param in params if param.name not in page.rare]
    rare = [param for param in params if param.name in page.rare]
    help_entry = ("-h, --help", "Show this page.")
    blocks = [
        textwrap.fill(sentence, width),
        f"Usage: {ctx.command_path} {page.usage}".rstrip(),
        *middle,
        section("Options:", [*(_entry(param, page) for param in common), help_entry], width),
    ]
    if rare:
        blocks.append(section("More options:", [_entry(param, page) for param in rare], width))
    if page.notes:
        blocks.append("\n\n".join(textwrap.fill(part, width) for part in page.notes.split("\n\n")))
    if page.examples:
        blocks.append("\n".join(["Examples:", *(f"  {line}" for line in page.examples)]))
    blocks.append(f"Exit codes: {EXIT_LINE}.")
    text = "\n\n".join(block for block in blocks if block)
    return "\n".join(_bold(output, line) for line in text.splitlines())


def _bold(output: Any, line: str) -> str:
    head, colon, rest = line.partition(":")
    if colon and head in ("Usage", "Commands", "Options", "More options", "Examples", "Exit codes"):
        return output.style(output.stdout, head + colon, "bold") + rest
    return line


def _entry(param: Any, page: Page) -> tuple[str, str]:
    """An option's spellings and its help with default and variable."""
    setting = TABLE.get(param.name)
    names = ", ".join(sorted([*param.opts, *param.secondary_opts], key=lambda name: name.startswith("--")))
    if setting is None:
        label = param.metavar or param.name.upper()
        return (label if param.param_type_name == "argument" else names), param.help or ""
    value = "|".join(setting.choices) or setting.metavar
    default = dict(page.defaults).get(setting.name, setting.default_text)
    facts = [f"default: {default}"] if setting.kept or default not in ("none", "false") else []
    if setting.kept:
        facts.append(setting.variable)
    tail = f" [{'; '.join(facts)}]" if facts else ""
    return (f"{names} {value}".rstrip(), (param.help or setting.help) + tail)


def section(title: str, entries: list[tuple[str, str]], width: int) -> str:
    """A titled two-column list; width is that of the page."""
    lines = [title]
    for names, text in entries:
        lead = " " * _INDENT + names
        body = textwrap.wrap(text, width - _COLUMN) or [""]
        if len(lead) <= _COLUMN - 2:
            lines.append((lead.ljust(_COLUMN) + body.pop(0)).rstrip())
        else:
            lines.append(lead)
        lines += [" " * _COLUMN + line for line in body]
    return "\n".join(lines)
