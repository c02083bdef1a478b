"""The values between the chat's commands and its loop: the talk, and what a command wants done. And text blocks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ling_local.settings import Settings
from ling_local.types import Message


class Do(StrEnum):
    """What the screen is asked to do; `Act.value` says with what."""

    EXIT = "exit"
    RESEND = "resend"  # value: the last question, to be asked again
    EDIT = "edit"  # value: the text to begin with
    SHOW_THINKING = "show_thinking"  # value: "on" or "off"
    UNDO = "undo"
    CLEAR = "clear"
    READ = "read"  # value: a path
    SAVE = "save"  # value: a path, "" for where the session is
    LOAD = "load"  # value: a session or a path
    SESSIONS = "sessions"
    COPY = "copy"  # value: "answer", "code" or "all"
    MODEL = "model"  # value: a name, "" for a list
    BENCH = "bench"  # value: tokens as text, "" for the usual number
    TOKENS = "tokens"  # value: a text to count, "" for the talk
    STATS = "stats"


@dataclass(frozen=True, slots=True)
class Act:
    """Something to do, with its argument. replaces: what is edited takes the place of the last turn."""

    do: Do
    value: str = ""
    replaces: bool = False


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that goes along with the next question."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Talk:
    """What commands see and change. started: the settings that `default` goes back to."""

    settings: Settings
    started: Settings
    messages: tuple[Message, ...] = ()

    @property
    def last_question(self) -> str | None:
        """The text of the last question, None where nothing was asked."""
        return next((message.content for message in reversed(self.messages) if message.role == "user"), None)

    @property
    def last_answer(self) -> Message | None:
        return next((message for message in reversed(self.messages) if message.role == "assistant"), None)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command came to. failed: the text is an error, and nothing has changed."""

    talk: Talk
    text: str = ""
    failed: bool = False
    act: Act | None = None


BLOCK = '"""'


def block_is_open(text: str) -> bool:
    """A text block was opened and not closed: Enter gives a new line, as it does in a plain terminal."""
    return text.lstrip().startswith(BLOCK) and text.count(BLOCK) % 2 == 1


def unquote_block(text: str) -> str:
    """The text without the marks of a block that holds all of it; any other text as it is."""
    inner = text.strip()
    if inner.startswith(BLOCK) and inner.endswith(BLOCK) and len(inner) >= 2 * len(BLOCK) and inner.count(BLOCK) == 2:
        return inner[len(BLOCK) : -len(BLOCK)].strip("\n")
    return text
