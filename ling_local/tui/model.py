"""What the chat screen knows: turns, figures, and the log of what is to be printed for good. Events only.

`apply(state, event)` takes the pump's events and the screen's own, in the order in which they happen:
for each turn `Sent [Prefilling] (TokenEvent* StatsEvent)* Finish`, or `Failed` where the generation ends with an
error. Texts are gathered per step: what a step brought reaches `ChatState.log` with its
StatsEvent, so that a thought's time and tokens are those of the engine.

The log only grows. Whoever draws prints `log.after(len(old.log))` for good and the open tail anew each time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from ling_local.errors import LingError, ModelError
from ling_local.text.channels import parse_tool_call
from ling_local.text.clean import visible
from ling_local.tui.blocks import Block, Blocks, close, push
from ling_local.tui.events import (
    Call,
    Cut,
    Failed,
    Fold,
    Item,
    Kept,
    Line,
    Notice,
    Prefilling,
    Question,
    Restored,
    ScreenEvent,
    Sent,
    Summary,
    ThinkShown,
    Thought,
)
from ling_local.tui.grown import Grown, newest_text
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
_CALL_END = "</tool_call>"


@dataclass(frozen=True, slots=True)
class _FoldDue:
    """A Fold whose time is known at the end of the step. start_s None: the thought began with the first token."""

    tokens: int
    start_s: float | None
    cut: bool


@dataclass(frozen=True, slots=True)
class StepMark:
    """One verify step. time_s: since the step before it, 0 for the first one, whose time is the prefill's."""

    drafted: int
    accepted: int
    tokens: int = 1
    time_s: float = 0.0


class Phase(StrEnum):
    """What the screen waits for."""

    IDLE = "idle"
    WAITING = "waiting"  # sent, and the engine has not begun: it loads
    PREFILL = "prefill"
    ANSWERING = "answering"  # tokens come; Turn.channel says what they are
    STOPPING = "stopping"  # the person wants no more of them


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and what came back so far, by channel, in pieces.

    blocks     the answer's splitter; `blocks.tail` is the open block
    ready      items that the step under way has finished
    open_call  pieces of the tool call under way; open_thought those of the thought's last line
    thought_tokens, thought_start_s   the thought under way: its tokens, where it began on the engine's clock (None:
               with the first token); thought_s: what the thoughts before it took
    ids        what the engine made, from Finish
    """

    prompt: str
    answer: Grown[str] = field(default_factory=Grown)
    thinking: Grown[str] = field(default_factory=Grown)
    calls: tuple[ToolCall, ...] = ()
    channel: Channel | None = None
    blocks: Blocks = field(default_factory=Blocks)
    ready: tuple[Item | _FoldDue, ...] = ()
    open_call: Grown[str] = field(default_factory=Grown)
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

    phase: Phase = Phase.IDLE
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
            return replace(state, turn=Turn(event.text), phase=Phase.WAITING, log=log)
        case Prefilling():
            return replace(state, phase=Phase.PREFILL) if state.phase is Phase.WAITING else state
        case Cut():
            return replace(state, phase=Phase.STOPPING) if state.turn else state
        case Notice():
            return replace(state, log=state.log.add(Line(event.text, event.style)))
        case ThinkShown():
            return replace(state, think_shown=event.shown)
        case Kept():
            return replace(state, turns=event.turns)
        case Restored():
            return _restore(state, event)
    raise TypeError(f"the screen knows no event {event!r}")


def _take_tokens(state: ChatState, event: TokenEvent) -> ChatState:
    turn = state.turn
    if turn is None:
        return state
    shown = visible(event.text)
    if event.channel is Channel.THINKING:
        turn = _think(turn, event, shown, state.think_shown)
    elif event.text:
        turn = _fold(turn, state.think_shown)
        turn = _answer(turn, event.text, shown) if event.channel is Channel.ANSWER else _call(turn, event.text)
    phase = Phase.STOPPING if state.phase is Phase.STOPPING else Phase.ANSWERING
    return replace(state, turn=turn, phase=phase)


def _think(turn: Turn, event: TokenEvent, shown: str, print_it: bool) -> Turn:
    start_s = turn.thought_start_s
    if turn.channel is not Channel.THINKING:
        turn = _close_block(turn)
        start_s = turn.stats.wall_s if turn.stats.steps else None
    ready = turn.ready
    head, newline, rest = shown.rpartition("\n")
    if not newline:
        open_thought = turn.open_thought.add(shown) if shown else turn.open_thought
    else:
        open_thought = Grown([rest])
        if print_it:
            ready = (*ready, Thought("".join(turn.open_thought) + head))
    return replace(
        turn,
        channel=Channel.THINKING,
        thinking=turn.thinking.add(event.text) if event.text else turn.thinking,
        thought_tokens=turn.thought_tokens + len(event.ids),
        thought_start_s=start_s,
        open_thought=open_thought,
        ready=ready,
    )


def _fold(turn: Turn, print_it: bool, cut: bool = False) -> Turn:
    """The thought under way, if any, ends here. One of blanks only leaves no trace."""
    if not turn.thought_tokens and not turn.open_thought:
        return turn
    ready, rest = turn.ready, "".join(turn.open_thought)
    if print_it and rest.strip():
        ready = (*ready, Thought(rest))
    if any(piece.strip() for piece in turn.thinking):
        ready = (*ready, _FoldDue(turn.thought_tokens, turn.thought_start_s, cut))
    return replace(turn, thought_tokens=0, thought_start_s=None, open_thought=Grown(), ready=ready)


def _answer(turn: Turn, text: str, shown: str) -> Turn:
    blocks, done = push(turn.blocks, shown)
    answer = turn.answer.add(text)
    return replace(turn, channel=Channel.ANSWER, answer=answer, blocks=blocks, ready=(*turn.ready, *done))


def _close_block(turn: Turn) -> Turn:
    """Something else than answer follows: the open block ends here."""
    done = close(turn.blocks)
    if not done:
        return turn
    return replace(turn, blocks=Blocks(opened=Block("", gap=True)), ready=(*turn.ready, *done))


def _call(turn: Turn, text: str) -> Turn:
    """A piece of a tool call, or the end of one and the beginning of the next."""
    if not turn.open_call:
        if not text.strip():
            return turn  # blanks between calls
        turn = _close_block(turn)
    pieces = turn.open_call.add(text)
    if _CALL_END not in newest_text(pieces, len(text) + len(_CALL_END)):
        return replace(turn, channel=Channel.TOOL, open_call=pieces)
    *done, rest = "".join(pieces).split(_CALL_END)
    for call in done:
        turn = _called(turn, call)
    return replace(turn, channel=Channel.TOOL, open_call=Grown([rest] if rest.strip() else ()))


def _called(turn: Turn, text: str, cut: bool = False) -> Turn:
    try:
        call = parse_tool_call(text)
    except ModelError:
        return replace(turn, ready=(*turn.ready, Call("", visible(text.strip()), cut)))
    calls = turn.calls if cut else (*turn.calls, call)
    return replace(turn, calls=calls, ready=(*turn.ready, Call(visible(call.name), visible(call.arguments), cut)))


def _take_stats(state: ChatState, stats: Stats) -> ChatState:
    turn = state.turn
    if turn is None:
        return state
    old, marks = turn.stats, turn.marks
    if stats.steps > old.steps:
        time_s = stats.wall_s - old.wall_s if old.steps else 0.0
        mark = StepMark(stats.drafted - old.drafted, stats.accepted - old.accepted, stats.tokens - old.tokens, time_s)
        marks = (*marks[1 - NUM_MARKS :], mark)
    return _log_step(replace(state, turn=replace(turn, stats=stats, marks=marks)))


def _log_step(state: ChatState) -> ChatState:
    """What the step has finished goes to the log."""
    turn = state.turn
    if turn is None or not turn.ready:
        return state
    items = [_with_time(item, turn.stats) if isinstance(item, _FoldDue) else item for item in turn.ready]
    thought_s = turn.thought_s + sum(item.time_s or 0.0 for item in items if isinstance(item, Fold))
    return replace(state, turn=replace(turn, ready=(), thought_s=thought_s), log=state.log.add(*items))


def _with_time(due: _FoldDue, stats: Stats) -> Fold:
    start_s = stats.ttft_s if due.start_s is None else due.start_s
    time_s = None if start_s is None else max(stats.wall_s - start_s, 0.0)
    return Fold(due.tokens, time_s, due.cut)


def _close(state: ChatState, cut: bool) -> ChatState:
    """All that was still open is finished, and in the log."""
    turn = state.turn
    if turn is None:
        return state
    turn = _fold(turn, state.think_shown, cut)
    turn = _close_block(turn)
    if turn.open_call:
        turn = replace(_called(turn, "".join(turn.open_call), cut=True), open_call=Grown())
    return _log_step(replace(state, turn=turn))


def _end(state: ChatState, event: Finish) -> ChatState:
    if state.turn is None:
        return state
    state = _close(_take_stats(state, event.stats), event.reason in (FinishReason.LENGTH, FinishReason.CANCELLED))
    turn = replace(state.turn, reason=event.reason, ids=event.ids)
    answered = bool(turn.calls) or any(piece.strip() for piece in turn.answer)
    turns = (*state.turns, turn) if event.ids else state.turns  # nothing came: nothing to go on from
    log = state.log.add(Summary(event.stats, event.reason, answered))
    return replace(state, turn=None, turns=turns, phase=Phase.IDLE, log=log)


def _fail(state: ChatState, error: LingError) -> ChatState:
    """What came is printed, and not part of the talk."""
    state = _close(state, cut=True)
    log = state.log.add(Line(error.message, "error", error.hint))
    return replace(state, turn=None, phase=Phase.IDLE, log=log)


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
