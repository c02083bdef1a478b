"""A talk line by line: works on every terminal, and with stdout or stderr sent elsewhere."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FrameType

from ling_local.cli.chat import Screen, chat_request, messages_for
from ling_local.cli.figures import stats_line
from ling_local.cli.opening import Answer, Opened, open_model, stream, wait_loaded
from ling_local.cli.output import Output
from ling_local.errors import EngineDied, LingError, UsageError
from ling_local.settings import Settings
from ling_local.text.clean import check_text
from ling_local.tui.commands import BLOCK, Command, Talk, block_is_open, help_text, read_line
from ling_local.types import Channel, FinishReason, Message

COMMANDS = ("help", "set", "show", "system", "think", "clear", "exit")
KEYS_HELP = (
    f"{BLOCK} opens and closes a text block · //text sends /text",
    "Ctrl-C stops an answer and keeps what came; on an empty line it does nothing",
)


@dataclass(slots=True)
class Conversation:
    """One conversation. messages holds whole turns only: a question and its answer, the last one maybe cut."""

    opened: Opened
    output: Output
    talk: Talk
    ctrl_c: CtrlC
    messages: tuple[Message, ...] = ()


class CtrlC:
    """Ctrl-C at a prompt and while an answer is due: the first ends that, and more of them do nothing until the next.

    A KeyboardInterrupt that came while the stopped answer is put away would end the talk.
    """

    def __init__(self) -> None:
        self._heard = False

    @contextmanager
    def installed(self) -> Iterator[CtrlC]:
        """Take SIGINT over, and give it back. Where it was ignored from the start, as with nohup, it stays so."""
        before = signal.getsignal(signal.SIGINT)
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, before)

    @contextmanager
    def heard(self) -> Iterator[None]:
        """KeyboardInterrupt comes out of here, once at most."""
        self._heard = True
        try:
            yield
        finally:
            self._heard = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            self._heard = False
            raise KeyboardInterrupt


def talk(settings: Settings, output: Output) -> None:
    """Prompt, stream an answer, prompt again, until the person leaves."""
    _prepare_line_editing(output)
    with open_model(settings, output, background=True) as opened, CtrlC().installed() as ctrl_c:
        state = Conversation(opened, output, Talk(opened.settings, opened.settings), ctrl_c)
        output.note("/help for commands · Ctrl-C stops an answer · Ctrl-D leaves", "dim")
        while True:
            try:
                with ctrl_c.heard():
                    text = _read_text(output)
            except KeyboardInterrupt:
                output.say("")
                output.note("Ctrl-D or /exit leaves", "dim")
                continue
            if text is None or not _take(state, check_text(text)):
                return


def _prepare_line_editing(output: Output) -> None:
    """Arrow keys and recall, where escape codes of the line editor do no harm."""
    if output.stdout.live and output.stderr.live:
        import contextlib

        with contextlib.suppress(ImportError):  # Python may be built without it; lines can be typed all the same
            import readline

            readline.set_auto_history(True)


def _read_text(output: Output) -> str | None:
    """A line, or all lines of a text block; None where there is no more."""
    text = _read_line(output)
    while text is not None and block_is_open(text):
        line = _read_line(output)
        if line is None:
            return None
        text += "\n" + line
    return text


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


def _take(state: Conversation, text: str) -> bool:
    """Send the text, or do what it commands. False: the person leaves."""
    try:
        said = read_line(text, COMMANDS)
        if said is None:
            return True
        if not isinstance(said, str):
            return _obey(state, *said)
    except UsageError as error:
        state.output.error(error)
        return True
    _turn(state, said)
    return True


def _obey(state: Conversation, command: Command, argument: str) -> bool:
    if command.run is not None:
        settings, text = command.run(state.talk, argument)
        state.talk = replace(state.talk, settings=settings)
        state.output.say(text)
    elif command.name == "help":
        state.output.say(help_text(argument, COMMANDS, KEYS_HELP))
    elif command.name == "clear":
        state.messages = ()
        state.output.say("a new talk begins")
    return command.name != "exit"


def _turn(state: Conversation, text: str) -> None:
    """One question and its answer. Ctrl-C keeps what came; an error leaves the talk as it was."""
    output, settings = state.output, state.talk.settings
    question = Message("user", text)
    request = chat_request(settings, messages_for(settings, *state.messages, question))
    answer = Answer()
    screen = Screen(output, settings["show_thinking"])
    with state.ctrl_c.heard():  # ends the load, and with it the program: there is no talk to keep yet
        wait_loaded(state.opened)
    try:
        with state.ctrl_c.heard():
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
    if settings["stats"]:
        output.note(stats_line(answer.stats), "dim")


def _as_message(answer: Answer) -> Message:
    thinking = answer.text(Channel.THINKING)
    content = answer.text(Channel.ANSWER)
    return Message("assistant", content, reasoning=thinking or None, ids=tuple(answer.ids))
