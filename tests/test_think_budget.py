"""The thinking budget in the pump: exactly so many tokens, then </think>, and the state is gone on from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoints import write_checkpoint
from ling_local import paths
from ling_local.engine.native import NativeEngine
from ling_local.engine.script import ScriptedTokens
from ling_local.generate import CancelToken, TextModel, generate
from ling_local.types import Channel, FinishReason, Message, Request, StepResult, TokenEvent, TokenRequest
from played import CHAT, EOS, Played, Write, opened, play

THINK_END = {"control": "</think>"}


def test_thinking_is_closed_after_the_budget_and_the_answer_begins(write_script: Write) -> None:
    path = write_script(["a", "b", "c", "d", "e", THINK_END, "late", EOS], ["The ", "answer", EOS])
    played = play(path, CHAT, think_budget=3)
    assert played.text(Channel.THINKING) == "abc"
    assert played.text() == "The answer"
    assert played.reason is FinishReason.EOS
    assert played.finish is not None
    assert played.finish.stats.thinking_tokens == 3
    assert played.finish.stats.tokens == 3 + 3  # the tag that we put in is not the model's
    close_id = ScriptedTokens().control["</think>"]
    assert played.finish.ids[3] == close_id
    assert played.ids == played.finish.ids


def test_a_step_is_cut_at_the_budget(write_script: Write) -> None:
    path = write_script([["a", "b", "c", "d"], ["e", "f"]], ["yes", EOS], block=3)
    played = play(path, CHAT, think_budget=2)
    assert (played.text(Channel.THINKING), played.text()) == ("ab", "yes")


def test_no_thinking_at_all_with_a_budget_of_zero(write_script: Write) -> None:
    played = play(write_script(["yes", EOS]), CHAT, think_budget=0)
    assert (played.text(Channel.THINKING), played.text()) == ("", "yes")
    assert played.finish is not None
    assert played.finish.stats.thinking_tokens == 0


def test_a_budget_that_is_not_used_up_changes_nothing(write_script: Write) -> None:
    path = write_script(["a", THINK_END, "yes", EOS], ["wrong"])
    assert play(path, CHAT, think_budget=50).events[-1].ids == play(path, CHAT).events[-1].ids


def test_the_limit_comes_before_a_larger_budget(write_script: Write) -> None:
    path = write_script(["a", "b", "c", "d"], ["wrong"])
    played = play(path, CHAT, think_budget=50, max_tokens=2)
    assert (played.text(Channel.THINKING), played.text(), played.reason) == ("ab", "", FinishReason.LENGTH)


def test_the_limit_right_after_the_budget_loses_no_text(write_script: Write) -> None:
    path = write_script(["a", "b<", "c"], ["wrong"])
    played = play(path, CHAT, think_budget=2, max_tokens=3)
    assert (played.text(Channel.THINKING), played.text(), played.reason) == ("ab<", "", FinishReason.LENGTH)


@pytest.mark.parametrize("prompt", ["raw text", CHAT])
def test_without_thinking_there_is_nothing_to_limit(write_script: Write, prompt: str | tuple[Message, ...]) -> None:
    path = write_script(["a", "b", "c", EOS], ["wrong"])
    assert play(path, prompt, think_budget=1, thinking=False).text() == "abc"


def test_a_cancel_while_thinking_ends_there(write_script: Write) -> None:
    engine, text_model = opened(write_script(["a", "b", "c", "d"], ["wrong"]))
    token = CancelToken()
    seen = []
    for event in generate(engine, text_model, Request(CHAT, think_budget=3), token):
        seen.append(event)
        if isinstance(event, TokenEvent):
            token.cancel()
    played = Played(seen)
    assert (played.text(Channel.THINKING), played.text(), played.reason) == ("a", "", FinishReason.CANCELLED)


class _Watched:
    """An engine that notes what it was asked and what each first step found in its state."""

    def __init__(self, engine: NativeEngine) -> None:
        self.info = engine.info
        self.asked: list[TokenRequest] = []
        self.cached: list[int] = []
        self._engine = engine

    def generate(self, request: TokenRequest) -> _WatchedRun:
        self.asked.append(request)
        return _WatchedRun(self, self._engine.generate(request))

    def close(self) -> None:
        self._engine.close()


class _WatchedRun:
    def __init__(self, watched: _Watched, run) -> None:
        self._watched, self._run = watched, run
        self.cancel = run.cancel

    def __iter__(self) -> Iterator[StepResult]:
        for number, step in enumerate(self._run):
            if not number:
                self._watched.cached.append(step.cached)
            yield step


def test_the_answer_goes_on_from_the_engines_state(tmp_path: Path) -> None:
    """On a real model: nothing is prefilled twice, and the answer is that of a prompt which holds the thought."""
    folder = write_checkpoint(tmp_path / "m", vocab_size=320)
    text_model = TextModel(ScriptedTokens(), frozenset(), paths.demo_dir())
    engine = _Watched(NativeEngine.load(folder))
    request = Request(CHAT, max_tokens=40, think_budget=12)
    finish = Played(list(generate(engine, text_model, request))).finish
    assert finish is not None
    first, second = engine.asked
    close_id = ScriptedTokens().control["</think>"]
    assert second.ids == (*first.ids, *finish.ids[:12], close_id)
    assert engine.cached[1] >= len(first.ids) + 12 - 1  # all but the newest id, which goes through the next step
    fresh = NativeEngine.load(folder)
    again = [i for step in fresh.generate(TokenRequest(second.ids, max_tokens=27)) for i in step.ids]
    assert tuple(again) == finish.ids[13:]
