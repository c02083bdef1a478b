"""The slash commands of the chat screen: one table, and what each makes of a talk. Nothing here prints or acts.

A line that begins with `/word` is a command; `//text` sends `/text`; `/usr/bin/env` (a second slash in the first
word) is text. A command gives an Outcome: the talk as it is from then on, a text to be said, and an Act where
something must be done that touches the screen, files or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ling_local.errors import UsageError
from ling_local.settings import TABLE, Settings, nearest, parse, show
from ling_local.tui.talk import BLOCK, Act, Do, Outcome, Talk, unquote_block

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


@dataclass(frozen=True, slots=True)
class Command:
    """A row of the table. words: what its argument may be completed to, where that is fixed."""

    name: str
    argument: str
    help: str
    run: Callable[[Talk, str], Outcome]
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Said:
    """A line that goes to the model."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A line that is a command."""

    command: Command
    argument: str


@dataclass(frozen=True, slots=True)
class Mistyped:
    """A line that looks like a command and is none; message says so, with the nearest name."""

    message: str


def read_line(line: str) -> Said | Called | Mistyped | None:
    """What a line is; None for a blank one, of which nothing comes."""
    words = line.split(maxsplit=1)
    if not words:
        return None
    if line.startswith("//"):
        return Said(line[1:])
    first = words[0]
    if not line.startswith("/") or "/" in first[1:]:
        return Said(unquote_block(line))
    name = first[1:].lower()
    name = ALIASES.get(name, name)
    if name in COMMANDS:
        return Called(COMMANDS[name], line[len(first) :].strip())
    meant = nearest(name, list(COMMANDS)) if name else ""
    tail = f"Did you mean '/{meant}'?" if meant else "/help lists them; //... sends a line with a slash."
    return Mistyped(f"no such command '/{name}'. {tail}")


def _help(talk: Talk, argument: str) -> Outcome:
    name = argument.lstrip("/").lower().partition(" ")[0]
    name = ALIASES.get(name, name)
    if name:
        command = COMMANDS.get(name)
        if command is None:
            meant = nearest(name, list(COMMANDS))
            return _refused(talk, f"no such command '/{name}'." + (f" Did you mean '/{meant}'?" if meant else ""))
        return Outcome(talk, f"/{command.name} {command.argument}".rstrip() + f"\n  {command.help}")
    heads = {f"/{command.name} {command.argument}".rstrip(): command.help for command in COMMANDS.values()}
    column = max(map(len, heads)) + 2
    rows = [f"{head:<{column}}{text}" for head, text in heads.items()]
    return Outcome(talk, "\n".join([*rows, "", *KEYS_HELP]))


KEYS_HELP = (
    "Enter sends · Alt-Enter or Ctrl-J: new line · a paste stays one block",
    f"{BLOCK} opens and closes a text block · //text sends /text",
    "Ctrl-G: your editor · Ctrl-R: search what you typed · Up/Down: recall it",
    "Ctrl-C stops an answer and keeps what came, or clears the line",
    "Ctrl-D leaves · Ctrl-Z suspends, `fg` comes back",
)


def _exit(talk: Talk, argument: str) -> Outcome:
    return Outcome(talk, act=Act(Do.EXIT))


def _set(talk: Talk, argument: str) -> Outcome:
    """`/set`, `/set NAME`, `/set NAME VALUE`. A bad name or value changes nothing."""
    name, _, value = argument.partition(" ")
    name, value = name.replace("-", "_").lower(), value.strip()
    if not name:
        return _show(talk, "")
    if name not in CAN_SET:
        if name == "model":
            return _refused(talk, "the model is changed with /model NAME")
        return _refused(talk, _no_setting(name))
    if not value:
        return Outcome(talk, f"{name} = {shown(talk.settings, name)}")
    return _with_setting(talk, name, value)


def _no_setting(name: str) -> str:
    meant = nearest(name, CAN_SET)
    return f"no such setting '{name}'. " + (f"Did you mean '{meant}'?" if meant else f"One of: {', '.join(CAN_SET)}.")


def _with_setting(talk: Talk, name: str, value: str) -> Outcome:
    try:
        parsed = talk.started[name] if value == "default" else parse(TABLE[name], value, name)
    except UsageError as error:
        return _refused(talk, error.message)
    source = talk.started.sources[name] if value == "default" else "/set"
    settings = replace(
        talk.settings,
        values={**talk.settings.values, name: parsed},
        sources={**talk.settings.sources, name: source},
    )
    act = None
    if name == "show_thinking":
        act = Act(Do.SHOW_THINKING, "on" if parsed else "off")
    return Outcome(replace(talk, settings=settings), f"{name} = {shown(settings, name)}", act=act)


def _show(talk: Talk, argument: str) -> Outcome:
    """All that can be set; what differs from the start of the talk is marked."""
    name = argument.replace("-", "_").lower()
    if name and name not in CAN_SET:
        return _refused(talk, _no_setting(name))
    rows = []
    for key in (name,) if name else CAN_SET:
        value = shown(talk.settings, key)
        source = talk.settings.sources[key]
        was = shown(talk.started, key)
        mark = f"  (was {was})" if talk.settings[key] != talk.started[key] else ""
        rows.append(f"{key:<14}{value}" + (mark or (f"  ({source})" if source != "default" else "")))
    return Outcome(talk, "\n".join(rows))


def shown(settings: Settings, name: str) -> str:
    """A setting's value in words."""
    value = settings[name]
    return TABLE[name].default_text if value is None else show(value)


def _system(talk: Talk, argument: str) -> Outcome:
    if not argument:
        system = talk.settings["system"]
        return Outcome(talk, "no system message; /system TEXT sets one" if system is None else f"system: {system}")
    if argument in ("none", '""'):
        values = {**talk.settings.values, "system": None}
        sources = {**talk.settings.sources, "system": "/system"}
        settings = replace(talk.settings, values=values, sources=sources)
        return Outcome(replace(talk, settings=settings), "no system message from here on")
    outcome = _with_setting(talk, "system", unquote_block(argument))
    return replace(outcome, text="the system message is set" if argument != "default" else outcome.text)


_THINK_WORDS = ("on", "off", "show", "hide", "none")


def _think(talk: Talk, argument: str) -> Outcome:
    """`/think` tells, on and off switch, N is a budget, none takes it away, show and hide unfold and fold."""
    word = argument.lower()
    if not word:
        state = "on" if talk.settings["think"] else "off"
        budget = shown(talk.settings, "think_budget")
        return Outcome(talk, f"thinking is {state}, budget {budget}; /think on|off|show|hide|TOKENS|none")
    if word in ("show", "hide"):
        outcome = _with_setting(talk, "show_thinking", str(word == "show").lower())
        return replace(outcome, text="thinking is shown" if word == "show" else "thinking is folded")
    if word in ("on", "off"):
        return replace(_with_setting(talk, "think", word), text=f"thinking is {word}")
    if word == "none":
        values = {**talk.settings.values, "think_budget": None}
        sources = {**talk.settings.sources, "think_budget": "/think"}
        settings = replace(talk.settings, values=values, sources=sources)
        return Outcome(replace(talk, settings=settings), "thinking has no budget")
    if word.isascii() and word.lstrip("-").isdigit():
        outcome = _with_setting(talk, "think_budget", word)
        if outcome.failed:
            return outcome
        outcome = _with_setting(outcome.talk, "think", "on")
        return replace(outcome, text=f"the model may think for {int(word)} tokens")
    meant = nearest(word, _THINK_WORDS)
    tail = f" Did you mean '{meant}'?" if meant else ""
    return _refused(talk, f"/think: '{argument}' is none of {', '.join(_THINK_WORDS)}, or a number of tokens.{tail}")


def _clear(talk: Talk, argument: str) -> Outcome:
    return Outcome(talk, "a new talk begins", act=Act(Do.CLEAR))


def _undo(talk: Talk, argument: str) -> Outcome:
    question = talk.last_question
    if question is None:
        return _refused(talk, "there is nothing to undo")
    line = " ".join(question.split())
    line = line if len(line) <= 50 else line[:49] + "…"
    return Outcome(talk, f"taken back: {line}", act=Act(Do.UNDO))


def _regen(talk: Talk, argument: str) -> Outcome:
    question = talk.last_question
    if question is None:
        return _refused(talk, "there is no answer to make again")
    same = not talk.settings["temperature"]
    text = "temperature is 0, so the answer will be the same; try /set temperature 0.7" if same else ""
    return Outcome(talk, text, act=Act(Do.RESEND, question))


def _edit(talk: Talk, argument: str) -> Outcome:
    question = talk.last_question
    if question is None or argument:
        return Outcome(talk, act=Act(Do.EDIT, argument))
    return Outcome(talk, act=Act(Do.EDIT, question, replaces=True))


def _needs_answer(do: Do) -> Callable[[Talk, str], Outcome]:
    def run(talk: Talk, argument: str) -> Outcome:
        if talk.last_answer is None:
            return _refused(talk, "there is no answer yet")
        return Outcome(talk, act=Act(do, argument))

    return run


_COPY_WORDS = ("answer", "code", "all")


def _copy(talk: Talk, argument: str) -> Outcome:
    what = argument.lower() or "answer"
    if what not in _COPY_WORDS:
        return _refused(talk, f"/copy: '{argument}' is none of {', '.join(_COPY_WORDS)}")
    return _needs_answer(Do.COPY)(talk, what)


def _needs_word(do: Do, usage: str) -> Callable[[Talk, str], Outcome]:
    def run(talk: Talk, argument: str) -> Outcome:
        return Outcome(talk, act=Act(do, argument)) if argument else _refused(talk, usage)

    return run


def _bench(talk: Talk, argument: str) -> Outcome:
    if argument and not (argument.isascii() and argument.isdigit() and 0 < int(argument) <= 100_000):
        return _refused(talk, f"/bench: '{argument}' is not a number of tokens from 1 to 100000")
    return Outcome(talk, act=Act(Do.BENCH, argument))


def _acts(do: Do) -> Callable[[Talk, str], Outcome]:
    return lambda talk, argument: Outcome(talk, act=Act(do, argument))


def _refused(talk: Talk, text: str) -> Outcome:
    return Outcome(talk, text, failed=True)


_ROWS = (
    Command("help", "[COMMAND]", "this list, or one of it", _help),
    Command("set", "[NAME [VALUE]]", "show or change a setting; `default` takes it back", _set, CAN_SET),
    Command("show", "[NAME]", "all settings, with what differs from the start", _show, CAN_SET),
    Command("system", "[TEXT]", "show or set the system message; `none` drops it", _system),
    Command("think", "[on|off|show|N]", "switch, unfold, or limit thinking to N tokens", _think, _THINK_WORDS),
    Command("stats", "", "figures of the last answer and of the talk", _acts(Do.STATS)),
    Command("tokens", "[TEXT]", "how many tokens a text has, or the talk", _acts(Do.TOKENS)),
    Command("clear", "", "begin a new talk, keep the settings", _clear),
    Command("undo", "", "take back the last question and its answer", _undo),
    Command("regen", "", "make the last answer again", _regen),
    Command("edit", "[TEXT]", "change the last question in your editor", _edit),
    Command("read", "FILE", "attach a text file to the next question", _needs_word(Do.READ, "/read needs a file")),
    Command("save", "[FILE]", "write the talk to a .md or .json file", _acts(Do.SAVE)),
    Command(
        "load", "NAME|FILE", "go on with a session, or a .json file",
        _needs_word(Do.LOAD, "/load needs a session (/sessions lists them) or a .json file"),
    ),
    Command("sessions", "", "earlier talks", _acts(Do.SESSIONS)),
    Command("copy", "[code|all]", "put the answer on the clipboard, or its code", _copy, _COPY_WORDS),
    Command("model", "[NAME]", "list models, or change to another and go on", _acts(Do.MODEL)),
    Command("bench", "[TOKENS]", "measure this model here and now", _bench),
    Command("exit", "", "leave (so does Ctrl-D)", _exit),
)  # fmt: skip
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
