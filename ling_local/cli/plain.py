"""A talk line by line: works on every terminal, and with stdout or stderr sent elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

from ling_local.cli.chat import Screen, chat_request, messages_for
from ling_local.cli.figures import stats_line
from ling_local.cli.opening import Answer, Opened, open_model, stream, wait_loaded
from ling_local.cli.output import Output
from ling_local.errors import EngineDied, LingError, UsageError
from ling_local.settings import TABLE, Settings, nearest, parse, show
from ling_local.text.clean import check_text
from ling_local.types import Channel, FinishReason, Message

_HELP = """/help             this list
/set              show what can be set, and its value
/set NAME VALUE   change it for the rest of the talk; the value `default` takes it back
/clear            forget the talk, keep the settings
/exit             leave (so does Ctrl-D)
//text            send a line that begins with a slash: /text
Ctrl-C stops an answer and keeps what came; on an empty line it does nothing."""
COMMANDS = ("help", "set", "clear", "exit")
_ALIASES = {"quit": "exit", "q": "exit", "?": "help"}
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


@dataclass(slots=True)
class Talk:
    """One conversation. messages holds whole turns only: a question and its answer, the last one maybe cut."""

    opened: Opened
    output: Output
    settings: Settings
    messages: tuple[Message, ...] = ()


def talk(settings: Settings, output: Output) -> None:
    """Prompt, stream an answer, prompt again, until the person leaves."""
    _prepare_line_editing(output)
    with open_model(settings, output, background=True) as opened:
        state = Talk(opened, output, opened.settings)
        output.note("/help for commands · Ctrl-C stops an answer · Ctrl-D leaves", "dim")
        while True:
            try:
                line = _read_line(output)
            except KeyboardInterrupt:
                output.say("")
                output.note("Ctrl-D or /exit leaves", "dim")
                continue
            if line is None or not _take_line(state, check_text(line)):
                return


def _prepare_line_editing(output: Output) -> None:
    """Arrow keys and recall, where escape codes of the line editor do no harm."""
    if output.stdout.live and output.stderr.live:
        import contextlib

        with contextlib.suppress(ImportError):  # Python may be built without it; lines can be typed all the same
            import readline

            readline.set_auto_history(True)


def _read_line(output: Output) -> str | None:
    """The next line without its end; None where there is no more. stdout holds answers only unless it is watched."""
    if output.stdout.live:
        try:
            return input("› " if (sys.stdout.encoding or "").lower().startswith("utf") else "> ")
        except EOFError:
            output.print()
            return None
        except UnicodeDecodeError:
            output.say("that line is not UTF-8; nothing is sent", "red")
            return ""
    output.say("> ", end="")
    data = sys.stdin.buffer.readline()
    if not data:
        output.say("")
        return None
    return data.decode("utf-8", "replace").rstrip("\r\n")


def _take_line(state: Talk, line: str) -> bool:
    """Send the line, or do what it commands. False: the person leaves."""
    words = line.split()
    if not words:
        return True
    first = words[0]
    if line.startswith("//"):
        _turn(state, line[1:])
    elif not first.startswith("/") or "/" in first[1:]:  # /usr/bin/env is text
        _turn(state, line)
    else:
        return _obey(state, first[1:].lower(), line[len(first) :].strip())
    return True


def _obey(state: Talk, name: str, argument: str) -> bool:
    name = _ALIASES.get(name, name)
    if name == "exit":
        return False
    actions: dict[str, Callable[[Talk, str], None]] = {"help": _help, "set": _set, "clear": _clear}
    if name in actions:
        actions[name](state, argument)
    else:
        meant = nearest(name, COMMANDS)
        tail = f" Did you mean '/{meant}'?" if meant else " /help lists them; //... sends a line with a slash."
        state.output.say(f"no such command '/{name}'.{tail}", "red")
    return True


def _help(state: Talk, argument: str) -> None:
    state.output.say(_HELP)


def _clear(state: Talk, argument: str) -> None:
    state.messages = ()
    state.output.say("the talk is forgotten", "dim")


def _set(state: Talk, argument: str) -> None:
    """`/set`, `/set NAME`, `/set NAME VALUE`. A bad name or value changes nothing."""
    name, _, value = argument.partition(" ")
    name = name.replace("-", "_").lower()
    if not name:
        state.output.say("\n".join(f"{key:<14}{_shown(state, key)}" for key in CAN_SET))
        return
    if name not in CAN_SET:
        meant = nearest(name, CAN_SET)
        tail = f" Did you mean '{meant}'?" if meant else f" One of: {', '.join(CAN_SET)}."
        state.output.say(f"no such setting '{name}'.{tail}", "red")
        return
    if value.strip():
        try:
            started_with = state.opened.settings[name]
            parsed = started_with if value.strip() == "default" else parse(TABLE[name], value.strip(), name)
        except UsageError as error:
            state.output.say(error.message, "red")
            return
        values = {**state.settings.values, name: parsed}
        sources = {**state.settings.sources, name: "/set"}
        state.settings = replace(state.settings, values=values, sources=sources)
    state.output.say(f"{name} = {_shown(state, name)}", "dim")


def _shown(state: Talk, name: str) -> str:
    value = state.settings[name]
    return TABLE[name].default_text if value is None else show(value)


def _turn(state: Talk, text: str) -> None:
    """One question and its answer. Ctrl-C keeps what came; an error leaves the talk as it was."""
    output, settings = state.output, state.settings
    question = Message("user", text)
    request = chat_request(settings, messages_for(settings, *state.messages, question))
    answer = Answer()
    screen = Screen(output, settings["show_thinking"])
    wait_loaded(state.opened)  # Ctrl-C here ends the load, and with it the program: there is no talk to keep yet
    try:
        stream(state.opened, request, answer, screen.take)
    except KeyboardInterrupt:
        answer.finish = FinishReason.CANCELLED.value
    except EngineDied:
        screen.end()
        raise
    except LingError as error:
        screen.end()
        output.error(error)
        return
    screen.end()
    if answer.finish == FinishReason.CANCELLED.value:
        output.say("stopped; what came is kept", "dim")
    if answer.ids:
        state.messages = (*state.messages, question, _as_message(answer))
    if settings["stats"] is not False:
        output.note(stats_line(answer.stats), "dim")


def _as_message(answer: Answer) -> Message:
    thinking = answer.text(Channel.THINKING)
    content = answer.text(Channel.ANSWER)
    return Message("assistant", content, reasoning=thinking or None, ids=tuple(answer.ids))
