"""The slash commands of a talk: one table, and what each makes of the settings. Nothing here prints or acts.

A line that begins with `/word` is a command; `//text` sends `/text`; `/usr/bin/env` (a second slash in the first
word) is text. A command that only changes settings gives them and a text to be said; what touches the screen,
files or the engine is in tui/acts.py. Whatever is refused is a UsageError, and nothing has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ling_local.errors import UsageError
from ling_local.settings import TABLE, Settings, nearest, parse, show

# What can be set, and what `none` stands for where it is a value.
_NONE = {"system": None, "think_budget": None, "seed": None, "stop": ()}
CAN_SET = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "max_tokens",
    "stop",
    "system",
    "think",
    "think_budget",
    "show_thinking",
    "stats",
)
BLOCK = '"""'


@dataclass(frozen=True, slots=True)
class Talk:
    """What setting commands see. started: the settings that `default` goes back to."""

    settings: Settings
    started: Settings


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table.

    argument   how it is written in the help; "": there is none
    run        the new settings and a text to be said; None where the command is an act. UsageError
    words      what the argument may be completed to, where that is fixed
    """

    name: str
    argument: str
    help: str
    run: Callable[[Talk, str], tuple[Settings, str]] | None = None
    words: tuple[str, ...] = ()

    @property
    def usage(self) -> str:
        return f"/{self.name} {self.argument}".rstrip()


def read_line(line: str, known: Iterable[str] | None = None) -> str | tuple[Command, str] | None:
    """What a line is: a text for the model, a command with its argument, or None for a blank line.

    known: the commands that can be used here, all of them if None. UsageError for a command that is none.
    """
    words = line.split(maxsplit=1)
    if not words:
        return None
    if line.startswith("//"):
        return line[1:]
    first = words[0]
    if not line.startswith("/") or "/" in first[1:]:
        return unquote_block(line)
    command, argument = find_command(first, known), line[len(first) :].strip()
    if argument and not command.argument:
        raise UsageError(f"/{command.name} takes nothing after it")
    return command, argument


def find_command(word: str, known: Iterable[str] | None = None) -> Command:
    """The command of a name or alias, in any case. UsageError with the nearest one where there is none."""
    names = list(COMMANDS if known is None else known)
    name = word.lstrip("/").lower()
    name = ALIASES.get(name, name)
    if name in names:
        return COMMANDS[name]
    meant = nearest(name, names) if name else ""
    tail = f"Did you mean '/{meant}'?" if meant else "/help lists them; //... sends a line with a slash."
    raise UsageError(f"no such command '/{name}'. {tail}")


def help_text(word: str = "", known: Iterable[str] | None = None, keys: Iterable[str] = ()) -> str:
    """The list of commands and then of keys, or what there is to know of one command. UsageError."""
    if word:
        command = find_command(word, known)
        return f"{command.usage}\n  {command.help}"
    rows = [COMMANDS[name] for name in (COMMANDS if known is None else known)]
    column = max(len(row.usage) for row in rows) + 2
    return "\n".join([*(f"{row.usage:<{column}}{row.help}" for row in rows), "", *keys])


KEYS_HELP = (
    "Enter sends · Alt-Enter or Ctrl-J: new line · a paste stays one block",
    f"{BLOCK} opens and closes a text block · //text sends /text",
    "Ctrl-G: your editor · Ctrl-R: search what you typed · Up/Down: recall it",
    "Ctrl-C stops an answer and keeps what came, or clears the line",
    "Ctrl-D leaves · Ctrl-Z suspends, `fg` comes back",
)


def block_is_open(text: str) -> bool:
    """A text block was opened and not closed: Enter gives a new line."""
    return text.lstrip().startswith(BLOCK) and text.count(BLOCK) % 2 == 1


def unquote_block(text: str) -> str:
    """The text without the marks of a block that holds all of it; any other text as it is."""
    inner = text.strip()
    if inner.startswith(BLOCK) and inner.endswith(BLOCK) and len(inner) >= 2 * len(BLOCK) and inner.count(BLOCK) == 2:
        return inner[len(BLOCK) : -len(BLOCK)].strip("\n")
    return text


def _set(talk: Talk, argument: str) -> tuple[Settings, str]:
    """`/set`, `/set NAME`, `/set NAME VALUE`."""
    name, _, value = argument.partition(" ")
    name, value = name.replace("-", "_").lower(), value.strip()
    if not name:
        return _show(talk, "")
    if name == "model":
        raise UsageError("the model is changed with /model NAME")
    _check_name(name)
    settings = _with(talk, name, value) if value else talk.settings
    return settings, f"{name} = {_shown(settings, name)}"


def _check_name(name: str) -> None:
    if name not in CAN_SET:
        meant = nearest(name, CAN_SET)
        tail = f"Did you mean '{meant}'?" if meant else f"One of: {', '.join(CAN_SET)}."
        raise UsageError(f"no such setting '{name}'. {tail}")


def _with(talk: Talk, name: str, value: str) -> Settings:
    """The settings with a value as it was typed; `default` is the one from the start of the talk."""
    if value == "default":
        return talk.settings.changed(talk.started.sources[name], **{name: talk.started[name]})
    parsed = _NONE[name] if name in _NONE and value == "none" else parse(TABLE[name], value, name)
    return talk.settings.changed("/set", **{name: parsed})


def _show(talk: Talk, argument: str) -> tuple[Settings, str]:
    """All that can be set; what differs from the start of the talk is marked."""
    name = argument.replace("-", "_").lower()
    if name:
        _check_name(name)
    rows = []
    for key in (name,) if name else CAN_SET:
        source = talk.settings.sources[key]
        mark = f"  ({source})" if source != "default" else ""
        if talk.settings[key] != talk.started[key]:
            mark = f"  (was {_shown(talk.started, key)})"
        rows.append(f"{key:<14}{_shown(talk.settings, key)}{mark}")
    return talk.settings, "\n".join(rows)


def _shown(settings: Settings, name: str) -> str:
    """A setting's value in words."""
    value = settings[name]
    return TABLE[name].default_text if value is None else show(value)


def _system(talk: Talk, argument: str) -> tuple[Settings, str]:
    if not argument:
        system = talk.settings["system"]
        return talk.settings, "no system message; /system TEXT sets one" if system is None else f"system: {system}"
    settings = _with(talk, "system", "none" if argument == '""' else unquote_block(argument))
    return settings, "no system message from here on" if settings["system"] is None else "the system message is set"


_THINK_WORDS = ("on", "off", "show", "hide", "none")


def _think(talk: Talk, argument: str) -> tuple[Settings, str]:
    """`/think` tells, on and off switch, N is a budget, none takes it away, show and hide unfold and fold."""
    word = argument.lower()
    if not word:
        state = "on" if talk.settings["think"] else "off"
        budget = _shown(talk.settings, "think_budget")
        return talk.settings, f"thinking is {state}, budget {budget}; /think on|off|show|hide|TOKENS|none"
    if word in ("show", "hide"):
        shown = word == "show"
        return talk.settings.changed("/think", show_thinking=shown), f"thinking is {'shown' if shown else 'folded'}"
    if word in ("on", "off"):
        return talk.settings.changed("/think", think=word == "on"), f"thinking is {word}"
    if word == "none":
        return _with(talk, "think_budget", "none"), "thinking has no budget"
    if word.isascii() and word.lstrip("-").isdigit():
        settings = _with(talk, "think_budget", word).changed("/think", think=True)
        return settings, f"the model may think for {settings['think_budget']} tokens"
    meant = nearest(word, _THINK_WORDS)
    tail = f" Did you mean '{meant}'?" if meant else ""
    raise UsageError(f"/think: '{argument}' is none of {', '.join(_THINK_WORDS)}, or a number of tokens.{tail}")


_ROWS = (
    Command("help", "[COMMAND]", "this list, or one of it"),
    Command("set", "[NAME [VALUE]]", "show or change a setting; `default` takes it back", _set, CAN_SET),
    Command("show", "[NAME]", "all settings, with what differs from the start", _show, CAN_SET),
    Command("system", "[TEXT]", "show or set the system message; `none` drops it", _system),
    Command("think", "[on|off|show|N]", "switch, unfold, or limit thinking to N tokens", _think, _THINK_WORDS),
    Command("stats", "", "figures of the last answer and of the talk"),
    Command("tokens", "[TEXT]", "how many tokens a text has, or the talk"),
    Command("clear", "", "begin a new talk, keep the settings"),
    Command("undo", "", "take back the last question and its answer"),
    Command("regen", "", "make the last answer again"),
    Command("edit", "[TEXT]", "change the last question in your editor"),
    Command("read", "FILE", "attach a text file to the next question"),
    Command("save", "[FILE]", "write the talk to a .md or .json file"),
    Command("load", "NAME|FILE", "go on with a session, or a .json file"),
    Command("sessions", "", "earlier talks"),
    Command("copy", "[code|all]", "put the answer on the clipboard, or its code", words=("answer", "code", "all")),
    Command("model", "[NAME]", "list models, or change to another and go on"),
    Command("bench", "[TOKENS]", "measure this model here and now"),
    Command("exit", "", "leave (so does Ctrl-D)"),
)
COMMANDS: Mapping[str, Command] = {row.name: row for row in _ROWS}
ALIASES: Mapping[str, str] = {
    "quit": "exit",
    "q": "exit",
    "bye": "exit",
    "?": "help",
    "h": "help",
    "status": "stats",
    "retry": "regen",
    "regenerate": "regen",
    "new": "clear",
    "file": "read",
    "resume": "load",
}
