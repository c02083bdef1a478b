"""The check that drafts change nothing, on engines that keep the promise and on engines that do not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints import TWO_LAYERS, write_checkpoint, write_draft
from ling_local import paths
from ling_local.bench import TEXTS, CheckPlan, CheckProgress, Difference, bundled, check_to_json, run_check
from ling_local.bench.lossless import first_difference
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import Engine, EngineSpec
from ling_local.engine.scripted import ScriptedEngine
from ling_local.engine.width import PLAIN_FIRST, StepTimes
from ling_local.errors import UsageError
from ling_local.generate import TextModel
from ling_local.types import SamplingParams
from lying import LyingEngine

Write = Callable[..., Path]
TURN = {"steps": [["a", "b", "c"], ["d", "e"]], "loop": True}
NUM_PROMPTS = sum(len(bundled(task)) for task in TEXTS)


class Opener:
    """Gives scripted engines, and notes what was asked for and how many were open at once."""

    def __init__(self, path: Path, largest: int = 0, lie_at: int | None = None) -> None:
        self.spec = EngineSpec(str(path), "scripted")
        self.asked: list[tuple[str, int]] = []
        self.largest, self.lie_at, self.num_open = largest, lie_at, 0

    @contextmanager
    def __call__(self, mode: str, block: int) -> Iterator[Engine]:
        if self.largest and block > self.largest:
            raise UsageError(f"--block {block} is too large")
        self.asked.append((mode, block))
        self.num_open += 1
        assert self.num_open == 1
        engine: Any = ScriptedEngine.load(self.spec)
        if self.lie_at is not None:
            engine = LyingEngine(engine, self.lie_at)
        if self.largest:
            engine = Sized(engine, block)
        yield engine
        self.num_open -= 1

    def check(
        self, modes: tuple[str, ...] = ("dspark",), on_progress: Any = None, on_stop: Any = None, **plan: Any
    ) -> Any:
        return run_check(self, TextModel.load(self.spec), CheckPlan(**plan), modes, on_progress, on_stop)


class Sized:
    """An engine whose drafter takes the block size that is asked for."""

    def __init__(self, inner: Any, block: int) -> None:
        self.info = replace(inner.info, block=block)
        self.generate = inner.generate


def test_there_are_prompts_of_every_kind() -> None:
    prompts = [prompt for task in TEXTS for prompt in bundled(task)]
    assert len(prompts) >= 8
    assert all(len(bundled(task)) >= 2 for task in TEXTS)
    assert [bundled(task)[0].name for task in TEXTS] == list(TEXTS)
    assert len({prompt.text for prompt in prompts}) == len({prompt.name for prompt in prompts}) == len(prompts)
    assert all(len(prompt.text) > 80 for prompt in prompts)


def test_the_same_ids_pass_and_the_figures_are_those_of_the_drafts(write_script: Write) -> None:
    opener = Opener(write_script(TURN, block=3, clock="virtual"))
    report = opener.check(tokens=10)
    assert report.same
    assert opener.asked == [("off", 0), ("dspark", 0)]
    assert len(report.rows) == 2 * NUM_PROMPTS
    for row in report.rows:
        assert (row.mode, row.block, row.stats.tokens, row.stats_off.steps) == ("dspark", 3, 10, 10)
        assert row.stats.accepted_by_position == (4, 2)
        assert row.stats.accept_length == pytest.approx(2.5)
    document = json.loads(json.dumps(check_to_json(report), allow_nan=False))
    assert document["same"] is True
    assert document["rows"][0]["speculation"]["rate_by_position"] == [1.0, 0.5]
    assert document["rows"][0]["speculation"]["rate_given_previous"] == [1.0, 0.5]
    assert document["rows"][0]["first_difference"] is None


@pytest.mark.parametrize("place", [0, 1, 2, 3, 9])
def test_one_wrong_id_fails_and_is_named(write_script: Write, place: int) -> None:
    report = Opener(write_script(TURN, block=3, clock="virtual"), lie_at=place).check(tokens=10, tasks=("chat",))
    assert not report.same
    wrong = [row for row in report.rows if row.difference]
    assert [row.prompt.name for row in wrong] == [prompt.name for prompt in bundled("chat")]
    assert all(row.sampled for row in wrong)  # the greedy runs are honest
    right = b"abcdeabcde"[place]
    assert {row.difference for row in wrong} == {Difference(place, right + 1, right)}


def test_a_check_that_is_stopped_tells_what_it_compared(write_script: Write) -> None:
    known: list[Any] = []

    def stop(progress: CheckProgress) -> None:
        if (progress.mode, progress.run) == ("dspark", 3):
            raise KeyboardInterrupt

    opener = Opener(write_script(TURN, block=3, clock="virtual"), lie_at=2)
    with pytest.raises(KeyboardInterrupt):
        opener.check(on_progress=stop, on_stop=known.append, tokens=10, tasks=("chat",))
    (report,) = known
    assert [row.difference is None for row in report.rows] == [True, False]


def test_every_block_size_is_tried_until_the_engine_refuses_one(write_script: Write) -> None:
    opener = Opener(write_script(TURN, block=3, clock="virtual"), largest=4)
    report = opener.check(tokens=4, tasks=("chat",), every_block=True)
    assert opener.asked == [("off", 0), *(("dspark", block) for block in (1, 2, 3, 4))]
    assert list(dict.fromkeys(row.block for row in report.rows)) == [1, 2, 3, 4]


def test_an_engine_of_one_block_size_is_checked_once(write_script: Write) -> None:
    opener = Opener(write_script(TURN, block=3, clock="virtual"))
    report = opener.check(tokens=4, tasks=("chat",), every_block=True)
    assert {(row.mode, row.block) for row in report.rows} == {("dspark", 3)}
    assert len(report.rows) == 2 * len(bundled("chat"))


def test_auto_and_the_name_of_what_it_stands_for_are_one_mode(write_script: Write) -> None:
    report = Opener(write_script(TURN, block=2, clock="virtual")).check(("auto", "dspark"), tokens=4, tasks=("code",))
    assert len(report.rows) == 2 * len(bundled("code"))


def test_the_refusal_of_a_block_comes_through(write_script: Write) -> None:
    with pytest.raises(UsageError, match="too large"):
        Opener(write_script(TURN, block=3), largest=2).check(block=3)


def test_a_model_without_a_drafter_has_nothing_to_check(write_script: Write) -> None:
    with pytest.raises(UsageError, match="has no drafter"):
        Opener(write_script(TURN, clock="virtual")).check(("auto",), tokens=2)


def test_a_context_that_fills_up_is_said_and_is_no_difference(write_script: Write) -> None:
    opener = Opener(write_script(TURN, block=3, clock="virtual", context=1000))
    report = opener.check(tokens=900, prompt_tokens=200, tasks=("prose",))
    assert report.same
    assert any("fewer than 900" in warning for warning in report.warnings)
    assert all(row.stats.tokens == row.stats_off.tokens == 800 for row in report.rows)


def test_sampled_runs_use_the_sampling_of_the_plan(write_script: Write) -> None:
    sampling = SamplingParams(0.5, 7, 0.9, 11)
    report = Opener(write_script(TURN, block=1, clock="virtual")).check(tokens=2, sampling=sampling, tasks=("code",))
    assert check_to_json(report)["run"]["sampled"] == {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "seed": 11}


def test_progress_tells_every_run_of_every_mode(write_script: Write) -> None:
    seen: list[CheckProgress] = []
    Opener(write_script(TURN, block=2, clock="virtual")).check(("dspark",), seen.append, tokens=6, tasks=("chat",))
    runs = 2 * len(bundled("chat"))
    starts = [(p.mode, p.block, p.run, p.runs) for p in seen if p.tokens == 0]
    wanted = [(mode, block, run, runs) for mode, block in (("off", 0), ("dspark", 2)) for run in range(1, runs + 1)]
    assert starts == wanted
    assert max(p.tokens for p in seen) == 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with both drafters and the demo's tokenizer."""
    made = write_checkpoint(tmp_path_factory.mktemp("model"), vocab_size=4096, **TWO_LAYERS)
    write_draft(made / "dspark", made, block_size=3, target_layer_ids=[0, 1])
    for file in paths.demo_dir().iterdir():
        if file.name.startswith(("tokenizer", "chat_template")):
            shutil.copy(file, made)
    return made


class WiderIsFaster(StepTimes):
    """Step times that make the width rule draft and verify all it can."""

    def samples(self, width: int, drafting: bool) -> int:
        return PLAIN_FIRST

    def seconds(self, width: int, drafting: bool) -> float:
        return 1 / width


def test_real_drafters_pass_at_every_block_size_while_every_draft_is_verified(folder: Path) -> None:
    @contextmanager
    def open_mode(mode: str, block: int) -> Iterator[Engine]:
        engine = NativeEngine.load(folder, draft=mode, block=block, threads=1)
        engine.step_times = dict.fromkeys((True, False), WiderIsFaster())
        yield engine
        engine.close()

    text_model = TextModel.load(EngineSpec(str(folder)))
    plan = CheckPlan(tokens=6, prompt_tokens=8, tasks=("chat",), every_block=True)
    report = run_check(open_mode, text_model, plan, ("mtp", "dspark"))
    assert report.same
    sizes = list(dict.fromkeys((row.mode, row.block) for row in report.rows))
    assert sizes == [*(("mtp", n) for n in range(1, 9)), *(("dspark", n) for n in range(1, 4))]
    for row in report.rows:  # each step but the first verifies all that its room lets count
        assert row.stats.drafted >= row.block * (row.stats.steps - 1 - row.block)
        assert row.stats.drafted > 0
    assert not report.warnings


def test_runs_that_verified_no_draft_are_said(write_script: Write) -> None:
    turn = {"steps": [{"tokens": ["a"], "drafted": 0}], "loop": True}
    report = Opener(write_script(turn, block=2, clock="virtual")).check(tokens=4, tasks=("chat",))
    assert report.warnings == (
        f"dspark with block 2: the engine verified no draft in {2 * len(bundled('chat'))} runs, "
        "as plain steps were faster",
    )


@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), max_size=8))
def test_the_first_difference_is_the_end_of_the_common_beginning(a: list[int], b: list[int]) -> None:
    found = first_difference(a, b)
    assert (found is None) == (a == b)
    if found is not None:
        assert a[: found.position] == b[: found.position]
        assert a[found.position : found.position + 1] != b[found.position : found.position + 1]
        assert found.with_drafts == (a[found.position] if found.position < len(a) else None)
        assert found.without == (b[found.position] if found.position < len(b) else None)
