"""The chat screen's own events, and the items that it prints for good. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ling_local.errors import LingError
from ling_local.tui.blocks import Block
from ling_local.types import FinishReason, Message, Stats

if TYPE_CHECKING:
    from ling_local.tui.model import Turn

# --- the screen's own events


@dataclass(frozen=True, slots=True)
class Sent:
    """A question was sent. echo: it does not stand on the screen yet (/regen, a message that waited)."""

    text: str
    echo: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """The person stopped the answer; its Finish (or Failed) is still to come."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The generation, or something between turns, ended with this error."""

    error: LingError


@dataclass(frozen=True, slots=True)
class ThinkShown:
    """Thoughts are printed in full from now on, or folded to one line."""

    shown: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """The talk is these turns from here on; what is printed stays."""

    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """A saved talk takes the place of this one; its last turn is printed."""

    turns: tuple[tuple[str, Message], ...]


# --- what is both: it is printed as it comes


@dataclass(frozen=True, slots=True)
class Line:
    """A line, or lines, of ours for the person. style is "dim", "warning", "error" or ""; hint: the next step."""

    text: str
    style: str = "dim"
    hint: str = ""


ScreenEvent = Sent | Cut | Failed | ThinkShown | Kept | Restored | Line


# --- what is printed for good


@dataclass(frozen=True, slots=True)
class Question:
    """What the person asked, where it does not stand on the screen yet."""

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
class Summary:
    """The quiet line that ends a turn."""

    stats: Stats
    reason: FinishReason
    answered: bool = True


Item = Question | Fold | Thought | Block | Summary | Line
