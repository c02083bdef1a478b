"""The chat's state by events alone."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from ling_local.errors import EngineError
from ling_local.tui.blocks import Block
from ling_local.tui.events import (
    Cut,
    Failed,
    Fold,
    Item,
    Kept,
    Line,
    Question,
    Restored,
    Sent,
    Summary,
    ThinkShown,
    Thought,
)
from ling_local.tui.model import NUM_MARKS, ChatState, StepMark, apply
from ling_local.types import Channel, Finish, FinishReason, Message, Stats, StatsEvent, TokenEvent

THINKING, ANSWER = Channel.THINKING, Channel.ANSWER


def after(*events: object, state: ChatState | None = None) -> ChatState:
    state = state or ChatState()
    for event in events:
        state = apply(state, event)
    return state


def step(number: int, *pieces: tuple[Channel, str], drafted: int = 0, accepted: int = 0, **fields: object) -> list:
    """The events of step number (from 1), 10 ms after the one before; a piece is a token or accepted ones too."""
    tokens = [TokenEvent(text, (number,), channel) for channel, text in pieces]
    figures = {"tokens": number, "steps": number, "drafted": drafted, "accepted": accepted, "ttft_s": 0.5}
    return [*tokens, StatsEvent(Stats(wall_s=0.5 + 0.01 * (number - 1), **{**figures, **fields}))]


def finish(number: int, reason: FinishReason = FinishReason.EOS, ids: Iterable[int] = (1,)) -> Finish:
    return Finish(reason, Stats(tokens=number, steps=number, ttft_s=0.5, wall_s=0.5 + 0.01 * (number - 1)), tuple(ids))


def logged(state: ChatState, kind: type = object) -> list[Item]:
    return [item for item in state.log if isinstance(item, kind)]


def text(state: ChatState) -> list[str]:
    return [block.text for block in logged(state, Block)]


def test_a_turn_from_question_to_summary() -> None:
    state = after(Sent("hi"))
    assert state.turn is not None
    state = after(*step(1, (ANSWER, "Hel")), *step(2, (ANSWER, "lo")), state=state)
    assert state.turn.blocks.tail == "Hello"
    assert text(state) == []
    state = after(finish(2, ids=(1, 2)), state=state)
    assert state.turn is None
    assert text(state) == ["Hello"]
    assert isinstance(state.log[-1], Summary)
    assert state.messages == (Message("user", "hi"), Message("assistant", "Hello", ids=(1, 2)))


def test_blocks_reach_the_log_as_soon_as_they_are_finished() -> None:
    state = after(Sent("hi"), TokenEvent("one\n", (1,)))
    assert text(state) == []
    assert text(after(TokenEvent("\ntwo", (2,)), state=state)) == ["one\n\n"]


def test_applying_changes_no_older_state() -> None:
    first = after(Sent("hi"), *step(1, (ANSWER, "a\n\nb")))
    one, two = after(*step(2, (ANSWER, "\n\none")), state=first), after(*step(2, (ANSWER, "\n\ntwo\n\n")), state=first)
    assert text(first) == ["a\n\n"]
    assert text(one) == ["a\n\n", "b\n\n"]
    assert text(two) == ["a\n\n", "b\n\n", "two\n\n"]
    assert "".join(first.turn.answer) == "a\n\nb"


def test_thinking_is_folded_with_the_engines_time_and_tokens() -> None:
    state = after(
        Sent("q"),
        *step(1, (THINKING, "let me\nsee")),
        *step(2, (THINKING, " more")),
        *step(3, (THINKING, ""), (ANSWER, "yes")),
    )
    assert logged(state) == [Fold(3, pytest.approx(0.01))]  # from its first step to its last whole one
    assert state.turn.message.reasoning == "let me\nsee more"


def test_a_thought_of_blanks_leaves_no_trace() -> None:
    state = after(Sent("q"), *step(1, (THINKING, "\n\n")), *step(2, (ANSWER, "yes")), finish(2))
    assert logged(state, Fold) == []


def test_a_second_thought_has_its_own_time() -> None:
    state = after(
        Sent("q"),
        *step(1, (THINKING, "a")),
        *step(2, (ANSWER, "b")),
        *step(3, (THINKING, "c")),
        *step(4, (THINKING, "d")),
        *step(6, (ANSWER, "e")),
        finish(6),
    )
    assert [(fold.tokens, round(fold.time_s, 3)) for fold in logged(state, Fold)] == [(1, 0), (2, 0.02)]
    kinds = [type(item) for item in state.log]
    assert kinds == [Fold, Block, Fold, Block, Summary]
    assert logged(state, Block)[1].gap


def test_thoughts_in_full_come_line_by_line() -> None:
    state = after(ThinkShown(True), Sent("q"), *step(1, (THINKING, "one\ntw")), *step(2, (THINKING, "o\nthree")))
    assert logged(state) == [Thought("one"), Thought("two")]
    state = after(*step(3, (ANSWER, "so")), state=state)
    assert logged(state)[2:] == [Thought("three"), Fold(2, pytest.approx(0.01))]


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CANCELLED])
def test_a_thought_that_was_cut_is_no_answer(reason: FinishReason) -> None:
    state = after(Sent("q"), *step(1, (THINKING, "hm")), finish(1, reason))
    fold, summary = logged(state)
    assert fold.cut
    assert not summary.answered
    assert state.messages[1] == Message("assistant", "", reasoning="hm", ids=(1,))


def test_marks_say_how_each_step_was_accepted() -> None:
    state = after(
        Sent("q"),
        *step(1, (ANSWER, "a"), drafted=3, accepted=1, tokens=2),
        *step(2, (ANSWER, "b"), drafted=6, accepted=4, tokens=6),
        *step(3, (ANSWER, "c"), drafted=6, accepted=4, tokens=7),
    )
    assert state.turn.marks == (
        StepMark(3, 1, 2, 0.0),
        StepMark(3, 3, 4, pytest.approx(0.01)),
        StepMark(0, 0, 1, pytest.approx(0.01)),
    )
    more = [event for number in range(4, 300) for event in step(number, (ANSWER, "x"))]
    assert len(after(*more, state=state).turn.marks) == NUM_MARKS


def test_a_last_step_without_tokens_makes_no_mark() -> None:
    state = after(Sent("q"), *step(1, (ANSWER, "a")), StatsEvent(Stats(tokens=1, steps=1, wall_s=3)))
    assert len(state.turn.marks) == 1


def test_stopping_is_shown_until_the_turn_ends_and_what_came_is_kept() -> None:
    state = after(Sent("q"), *step(1, (ANSWER, "par")), Cut())
    assert state.turn.stopping
    state = after(*step(2, (ANSWER, "tial")), state=state)
    assert state.turn.stopping
    state = after(finish(2, FinishReason.CANCELLED), state=state)
    assert text(state) == ["partial"]
    assert state.messages[1].content == "partial"
    assert after(Cut(), state=state) == state


def test_a_turn_without_a_token_is_not_part_of_the_talk() -> None:
    state = after(Sent("q"), finish(0, FinishReason.CANCELLED, ids=()))
    assert state.messages == ()
    assert state.turn is None


def test_an_error_shows_what_came_and_leaves_the_talk_as_it_was() -> None:
    state = after(Sent("one"), *step(1, (ANSWER, "a")), finish(1), Sent("two"), TokenEvent("half", (1,)))
    state = after(Failed(EngineError("it broke", "Try again.")), state=state)
    assert text(state) == ["a", "half"]
    assert state.log[-1] == Line("it broke", "error", "Try again.")
    assert len(state.turns) == 1
    assert state.turn is None


def test_undo_clear_and_restore() -> None:
    turn = [Sent("q"), *step(1, (ANSWER, "a")), finish(1)]
    state = after(*turn, *turn)
    assert len(state.turns) == 2
    assert after(Kept(state.turns[:-1]), state=state).turns == state.turns[:1]
    assert after(Kept(()), state=state).messages == ()
    saved = (("q1", Message("assistant", "a1", ids=(1,))), ("q2", Message("assistant", "# a2\n\nb", "why", ids=(2,))))
    state = after(Restored(saved), state=state)
    assert state.messages == (Message("user", "q1"), saved[0][1], Message("user", "q2"), saved[1][1])
    assert list(state.log.after(len(state.log) - 3)) == [
        Question("q2"), Block("# a2\n"), Block("\nb", gap=True),
    ]  # fmt: skip


def test_what_is_not_seen_yet_is_echoed() -> None:
    assert logged(after(Sent("typed"))) == []
    assert logged(after(Sent("waited", echo=True))) == [Question("waited")]
    assert logged(after(Line("hello", "warning"))) == [Line("hello", "warning")]


def test_control_characters_are_visible_on_the_screen_and_kept_in_the_talk() -> None:
    state = after(Sent("q"), *step(1, (ANSWER, "a\x1b[2J\r\x07b")), finish(1))
    assert text(state) == ["a␛[2J␍␇b"]
    assert state.messages[1].content == "a\x1b[2J\r\x07b"


def test_tokens_outside_a_turn_are_ignored() -> None:
    assert after(TokenEvent("late", (1,)), StatsEvent(Stats(steps=1)), finish(1)) == ChatState()


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(TypeError, match="knows no event"):
        apply(ChatState(), "what")


@pytest.mark.parametrize("channel", list(Channel))
def test_fifteen_thousand_tokens_cost_no_more_each_than_five_hundred(channel: Channel) -> None:
    def seconds(num_tokens: int) -> float:
        events = [event for number in range(1, num_tokens) for event in step(number, (channel, "some words "))]
        state = after(Sent("q"))
        began = time.process_time()
        for event in events:
            state = apply(state, event)
        spent = time.process_time() - began
        assert state.turn.stats.steps == num_tokens - 1
        return spent

    few, many = min(seconds(500) for _ in range(3)), seconds(15_000)
    assert many < 3 * 30 * few
