"""The picture fed by the pump itself: what an engine made is what stands on the screen, with its figures."""

from __future__ import annotations

import time
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from ling_local.engine.protocol import EngineSpec
from ling_local.generate import TextModel, generate
from ling_local.text.clean import visible
from ling_local.tui import view
from ling_local.tui.events import Fold, Sent, Summary
from ling_local.tui.figures import now
from ling_local.tui.model import ChatState, apply
from ling_local.types import Channel, Event, Request
from markdown_texts import SOURCES, rendered
from played import CHAT, EOS, Played, Write, play

THINK = {"control": "</think>"}
ANSWER = "\n\n".join(source for source in SOURCES if source.strip() and "never closed" not in source)


def states(events: list[Event]) -> list[ChatState]:
    """The state before the first event, and after each."""
    seen = [apply(ChatState(), Sent("go"))]
    for event in events:
        seen.append(apply(seen[-1], event))
    return seen


def printed(seen: list[ChatState], every: int = 1, width: int = 80) -> list[str]:
    """All that is printed for good when a frame is drawn every so many events."""
    frames = [*seen[::every], seen[-1]]
    file = StringIO()
    console = Console(file=file, width=width)
    for before, after in pairwise(frames):
        for item in view.finished(before, after):
            console.print(item, crop=False)
    return file.getvalue().split("\n")


@pytest.mark.parametrize("every", [1, 3, 50, 10_000])
@pytest.mark.parametrize(("cut", "per_step"), [(1, 1), (3, 4), (7, 16)])
def test_frames_at_any_pace_print_the_same_answer(write_script: Write, cut: int, per_step: int, every: int) -> None:
    """C003, C031, C037: drops frames, not tokens; each line once and in order."""
    thought = {"text": "hm, let me\nsee", "cut": 4}
    path = write_script([thought, THINK, {"text": ANSWER, "cut": cut, "per_step": per_step}, EOS], block=15)
    seen = states(play(path, CHAT).events)
    lines = printed(seen, every)
    assert lines[0].startswith("▸ thought for")
    assert lines[1:-2] == rendered(ANSWER)
    assert lines[-2].startswith("── ")


def test_figures_at_two_thousand_tokens_a_second_are_the_engines(write_script: Write) -> None:
    steps = {"tokens": ["word ", "and ", "more ", "\n"], "drafted": 5, "delay_ms": 2, "repeat": 2500}
    path = write_script([THINK, steps, EOS], clock="virtual", block=5, context=20_000)
    events = play(path, CHAT).events
    began = time.process_time()
    seen = states(events)
    assert time.process_time() - began < 2.5  # 1 ms a step, half of the time that the engine takes for it
    current = now(seen[-3].turn.marks)
    assert current.tpot_s == pytest.approx(0.0005, rel=0.02)
    assert current.step_s == pytest.approx(0.002, rel=0.02)
    assert current.accept_length == pytest.approx(4, rel=0.02)
    summary = seen[-1].log[-1]
    assert isinstance(summary, Summary)
    assert summary.stats.tok_s == pytest.approx(2000, rel=0.02)
    assert view.strip(seen[-3].turn.marks[-10:], 10).plain == "▅" * 10
    assert summary.stats.tokens == 2500 * 4 + 2


def test_thoughts_are_timed_by_the_engines_clock(write_script: Write) -> None:
    """C093: five seconds of thinking before a second of answer."""
    thought = {"tokens": ["hm"], "delay_ms": 500, "repeat": 11}
    answer = {"tokens": ["yes"], "delay_ms": 500, "repeat": 2}
    seen = states(play(write_script([thought, THINK, answer, EOS], clock="virtual"), CHAT).events)
    fold = seen[-1].log[0]
    assert isinstance(fold, Fold)
    assert fold.tokens == 12  # the closing tag is one of them
    assert fold.time_s == pytest.approx(5.0, abs=0.05)  # from the first token of it to the last


def test_a_talk_goes_on_from_the_screens_own_messages(write_script: Write) -> None:
    path = write_script([THINK, "one", EOS], [THINK, "two", EOS])
    first = states(play(path, CHAT, thinking=True).events)[-1]
    assert [message.role for message in first.messages] == ["user", "assistant"]
    played = play(path, (*first.messages, CHAT[0]))
    assert played.finish is not None
    assert played.finish.stats.prompt_tokens > len(first.messages[1].ids)


def test_the_demo_model_answers_on_the_screen() -> None:
    """What the shipped model makes, from its own ids to printed lines."""
    from ling_local.engine.native import NativeEngine

    folder = Path(view.__file__).parents[1] / "data" / "demo"
    engine = NativeEngine.load(folder, device="cpu", dtype="float32", draft="auto")
    try:
        spec = EngineSpec(str(folder))
        request = Request(CHAT, max_tokens=60, thinking=False)
        played = Played(list(generate(engine, TextModel.load(spec), request)))
    finally:
        engine.close()
    seen = states(played.events)
    text = visible(played.text(Channel.ANSWER))
    assert text.strip()
    assert printed(seen)[:-2] == rendered(text)
    turn = seen[-1].turns[-1]
    assert sum(mark.tokens for mark in turn.marks) == played.finish.stats.tokens  # type: ignore[union-attr]
    assert sum(mark.accepted for mark in turn.marks) == played.finish.stats.accepted  # type: ignore[union-attr]
    assert all(view.live_lines(state, width, 12) for state in seen[1:-1] for width in (20, 40, 200))
