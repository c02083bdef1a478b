"""The chat screen's own events, and the items that it prints for good. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from ling_local.engine.protocol import EngineInfo, Progress
from ling_local.errors import LingError
from ling_local.tui.blocks import Block
from ling_local.types import FinishReason, Message, Stats

# --- the screen's own events


@dataclass(frozen=True, slots=True)
class Loading:
    """The weights are on their way."""

    progress: Progress


@dataclass(frozen=True, slots=True)
class Loaded:
    """The engine is ready."""

    info: EngineInfo


@dataclass(frozen=True, slots=True)
class Sent:
    """A question was sent. echo: it does not stand on the screen yet (/regen, a message that waited)."""

    text: str
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Prefilling:
    """The engine has the request and reads the prompt; num_tokens 0 where nobody has counted it."""

    num_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The person stopped the answer; its Finish (or Failed) is still to come."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The generation, or something between turns, ended with this error."""

    error: LingError


@dataclass(frozen=True, slots=True)
class Notice:
    """A line, or lines, of ours for the person. style is "dim", "warning", "error" or ""."""

    text: str
    style: str = "dim"


@dataclass(frozen=True, slots=True)
class ThinkShown:
    """Thoughts are printed in full from now on, or folded to one line."""

    shown: bool


@dataclass(frozen=True, slots=True)
class Cleared:
    """The talk is forgotten; what is printed stays."""


@dataclass(frozen=True, slots=True)
class Undone:
    """The last turn is taken back."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A saved talk takes the place of this one. echo: print its last turn."""

    turns: tuple[tuple[str, Message], ...]
    echo: bool = True


ScreenEvent = Loading | Loaded | Sent | Prefilling | Cut | Failed | Notice | ThinkShown | Cleared | Undone | Restored


# --- what is printed for good


@dataclass(frozen=True, slots=True)
class Question:
    """What the person asked. gap: a blank line comes before it."""

    text: str


@dataclass(frozen=True, slots=True)
class Fold:
    """One line for a whole thought. time_s None: it is not known. cut: the limit or the person ended it."""

    tokens: int
    time_s: float | None = None
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Thought:
    """A finished line of a thought that is shown in full."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call. name "" where the model wrote something that is none; arguments is then that text."""

    name: str
    arguments: str
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """The quiet line that ends a turn."""

    stats: Stats
    reason: FinishReason
    answered: bool = True


@dataclass(frozen=True, slots=True)
class Line:
    """A line of ours, as in Notice. hint: the next step after an error."""

    text: str
    style: str = "dim"
    hint: str = ""


Item = Question | Fold | Thought | Block | Call | Summary | Line
