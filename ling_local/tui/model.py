"""What the chat screen knows: turns, figures, and the log of what is to be printed for good. Events only.

`apply(state, event)` takes the pump's events and the screen's own, in the order in which they happen:
for each turn `Sent (TokenEvent* StatsEvent)* Finish`, or `Failed` where the generation ends with an
error. Times are the engine's own, from its Stats.

The log only grows. Whoever draws prints `log.after(len(old.log))` for good and the open tail anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ling_local.errors import LingError
from ling_local.text.clean import visible
from ling_local.tui.blocks import Block, Blocks, close, push
from ling_local.tui.events import (
    Cut,
    Failed,
    Fold,
    Item,
    Kept,
    Line,
    Question,
    Restored,
    ScreenEvent,
    Sent,
    Summary,
    ThinkShown,
    Thought,
)
from ling_local.tui.grown import Grown
from ling_local.types import (
    Channel,
    Event,
    Finish,
    FinishReason,
    Message,
    Stats,
    StatsEvent,
    TokenEvent,
    ToolCall,
)

NUM_MARKS = 64  # steps that the strip and the current figures look back on


@dataclass(frozen=True, slots=True)
class StepMark:
    """One verify step. time_s: since the step before it, 0 for the first one, whose time is the prefill's."""

    drafted: int
    accepted: int
    tokens: int = 1
    time_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and what came back so far, by channel, in pieces.

    blocks     the answer's splitter; `blocks.tail` is the open block
    open_thought  pieces of the last line of the thought under way
    thought_tokens, thought_start_s   the thought under way: its tokens, where it began on the engine's clock (None:
               with the first token); thought_s: what the thoughts before it took
    stopping   the person wants no more of it
    ids        what the engine made, from Finish
    """

    prompt: str
    answer: Grown[str] = field(default_factory=Grown)
    thinking: Grown[str] = field(default_factory=Grown)
    calls: tuple[ToolCall, ...] = ()  # of a talk that came from elsewhere; here the model is given no tools
    channel: Channel | None = None
    stopping: bool = False
    blocks: Blocks = field(default_factory=Blocks)
    open_thought: Grown[str] = field(default_factory=Grown)
    thought_tokens: int = 0
    thought_start_s: float | None = None
    thought_s: float = 0.0
    stats: Stats = field(default_factory=Stats)
    marks: tuple[StepMark, ...] = ()
    reason: FinishReason | None = None
    ids: tuple[int, ...] = ()

    @property
    def message(self) -> Message:
        """The answer as the next prompt wants it."""
        reasoning = "".join(self.thinking) or None
        return Message("assistant", "".join(self.answer), reasoning, self.calls, self.ids)


@dataclass(frozen=True, slots=True)
class ChatState:
    """Everything that the screen shows.

    turns    whole turns, the last one maybe cut; a turn that failed is not among them
    turn     the one under way
    log      what has been finished since the start, to be printed for good, in order
    """

    think_shown: bool = False
    turns: tuple[Turn, ...] = ()
    turn: Turn | None = None
    log: Grown[Item] = field(default_factory=Grown)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The talk so far, without a system message, as the next request wants it."""
        return tuple(m for turn in self.turns for m in (Message("user", turn.prompt), turn.message))


def apply(state: ChatState, event: Event | ScreenEvent) -> ChatState:
    """The state after the event. Constant time for every event but Restored and what ends a turn."""
    match event:
        case TokenEvent():
            return _take_tokens(state, event)
        case StatsEvent():
            return _take_stats(state, event.stats)
        case Finish():
            return _end(state, event)
        case Failed():
            return _fail(state, event.error)
        case Sent():
            log = state.log.add(Question(event.text)) if event.echo else state.log
            return replace(state, turn=Turn(event.text), log=log)
        case Cut():
            return _changed(state, state.turn, stopping=True) if state.turn else state
        case Line():
            return replace(state, log=state.log.add(event))
        case ThinkShown():
            return replace(state, think_shown=event.shown)
        case Kept():
            return replace(state, turns=event.turns)
        case Restored():
            return _restore(state, event)
    raise TypeError(f"the screen knows no event {event!r}")


def _changed(state: ChatState, turn: Turn, *items: Item, **changes: Any) -> ChatState:
    """The state with the turn under way changed, and items to be printed for good."""
    return replace(state, turn=replace(turn, **changes), log=state.log.add(*items))


def _take_tokens(state: ChatState, event: TokenEvent) -> ChatState:
    if state.turn is None:
        return state
    if event.channel is Channel.THINKING:
        return _think(state, event)
    if not event.text:
        return state
    return _answer(_fold(state), event.text)


def _think(state: ChatState, event: TokenEvent) -> ChatState:
    turn = state.turn
    start_s = turn.thought_start_s
    if turn.channel is not Channel.THINKING:
        state = _close_block(state)
        turn = state.turn
        start_s = turn.stats.wall_s if turn.stats.steps else None
    shown = visible(event.text)
    head, newline, rest = shown.rpartition("\n")
    line = "".join(turn.open_thought) + head if newline and state.think_shown else None
    return _changed(
        state,
        turn,
        *(() if line is None else (Thought(line),)),
        channel=Channel.THINKING,
        thinking=turn.thinking.add(event.text) if event.text else turn.thinking,
        thought_tokens=turn.thought_tokens + len(event.ids),
        thought_start_s=start_s,
        open_thought=Grown([rest]) if newline else turn.open_thought.add(shown),
    )


def _fold(state: ChatState, cut: bool = False) -> ChatState:
    """The thought under way, if any, ends with the last step. One of blanks only leaves no trace."""
    turn = state.turn
    if not turn.thought_tokens and not turn.open_thought:
        return state
    start_s = turn.stats.ttft_s if turn.thought_start_s is None else turn.thought_start_s
    time_s = None if start_s is None else max(turn.stats.wall_s - start_s, 0.0)
    items: list[Item] = []
    rest = "".join(turn.open_thought)
    if state.think_shown and rest.strip():
        items.append(Thought(rest))
    if any(piece.strip() for piece in turn.thinking):
        items.append(Fold(turn.thought_tokens, time_s, cut))
    thought_s = turn.thought_s + (time_s or 0.0)
    return _changed(
        state, turn, *items, thought_tokens=0, thought_start_s=None, open_thought=Grown(), thought_s=thought_s
    )


def _answer(state: ChatState, text: str) -> ChatState:
    turn = state.turn
    blocks, done = push(turn.blocks, visible(text))
    return _changed(state, turn, *done, channel=Channel.ANSWER, answer=turn.answer.add(text), blocks=blocks)


def _close_block(state: ChatState) -> ChatState:
    """Something else than answer follows: the open block ends here."""
    done = close(state.turn.blocks)
    return _changed(state, state.turn, *done, blocks=Blocks(opened=Block("", gap=True))) if done else state


def _take_stats(state: ChatState, stats: Stats) -> ChatState:
    turn = state.turn
    if turn is None:
        return state
    old, marks = turn.stats, turn.marks
    if stats.steps > old.steps:
        time_s = stats.wall_s - old.wall_s if old.steps else 0.0
        mark = StepMark(stats.drafted - old.drafted, stats.accepted - old.accepted, stats.tokens - old.tokens, time_s)
        marks = (*marks[1 - NUM_MARKS :], mark)
    return _changed(state, turn, stats=stats, marks=marks)


def _close(state: ChatState, cut: bool) -> ChatState:
    """All that was still open is finished, and in the log."""
    if state.turn is None:
        return state
    return _close_block(_fold(state, cut))


def _end(state: ChatState, event: Finish) -> ChatState:
    if state.turn is None:
        return state
    state = _close(_take_stats(state, event.stats), event.reason in (FinishReason.LENGTH, FinishReason.CANCELLED))
    turn = replace(state.turn, reason=event.reason, ids=event.ids)
    answered = any(piece.strip() for piece in turn.answer)
    turns = (*state.turns, turn) if event.ids else state.turns  # nothing came: nothing to go on from
    log = state.log.add(Summary(event.stats, event.reason, answered))
    return replace(state, turn=None, turns=turns, log=log)


def _fail(state: ChatState, error: LingError) -> ChatState:
    """What came is printed, and not part of the talk."""
    state = _close(state, cut=True)
    log = state.log.add(Line(error.message, "error", error.hint))
    return replace(state, turn=None, log=log)


def _restore(state: ChatState, event: Restored) -> ChatState:
    turns = tuple(_past(prompt, message) for prompt, message in event.turns)
    log = state.log
    if turns:
        shown = visible("".join(turns[-1].answer))
        blocks, done = push(Blocks(), shown)
        log = log.add(Question(turns[-1].prompt), *done, *close(blocks))
    return replace(state, turns=turns, log=log)


def _past(prompt: str, message: Message) -> Turn:
    thinking = Grown([message.reasoning] if message.reasoning else ())
    return Turn(prompt, Grown([message.content]), thinking, message.tool_calls, ids=message.ids)
