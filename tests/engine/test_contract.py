"""What every engine behind the door must do. A new engine joins with one line in FACTORIES.

Each factory makes an engine that can give at least 40 tokens after PROMPT, in blocks that may hold several, and
whose first 40 greedy ids are the same for each request, so that any of them can be declared a stop id. More of them
take their time, so that there is something to cancel.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoints import TWO_LAYERS, write_checkpoint
from forks import forked_workers
from ling_local.engine.protocol import Engine, EngineSpec
from ling_local.engine.remote import RemoteEngine
from ling_local.engine.scripted import ScriptedEngine
from ling_local.errors import ContextTooLong, EngineBusy, EngineError, UsageError
from ling_local.types import FinishReason, StepResult, TokenRequest
from sglang_stand_in import HOPPER, importable, make_spec

PROMPT = (3, 1, 4, 1, 5)
CONTEXT = 500
NUM = 40
LONG = 400  # tokens that are under way for so long that a cancel comes in time on any machine
Factory = Callable[[Path], Engine]


def _spec(folder: Path) -> EngineSpec:
    words = [f"w{i:02}" for i in range(NUM)]
    steps: list[dict[str, object]] = []
    at = 0
    while at < NUM:  # blocks of 1 to 4
        size = 1 + len(steps) % 4
        steps.append({"tokens": words[at : at + size]})
        at += size
    steps.append({"tokens": ["w"], "repeat": LONG, "delay_ms": 500})
    path = folder / "contract.json"
    path.write_text(json.dumps({"turns": [steps], "block": 3, "context": CONTEXT}), encoding="utf-8")
    return EngineSpec(str(path), "scripted")


def _native(folder: Path, draft: str) -> EngineSpec:
    """A small random model whose drafts hardly ever hit: what counts here is the door."""
    model = write_checkpoint(folder / "model", seed=1, **TWO_LAYERS)
    return EngineSpec(str(model), context=CONTEXT, draft=draft, threads=1)


def _load_native(folder: Path, draft: str) -> Engine:
    from ling_local.engine.native import NativeEngine  # torch: only where it is run in this process

    spec = _native(folder, draft)
    return NativeEngine.load(spec.model, draft=spec.draft, context=spec.context, threads=1)


def _load_sglang(folder: Path, draft: str) -> Engine:
    """Our SGLang engine on a stand-in for the package."""
    from ling_local.engine.sglang.engine import SGLangEngine

    with importable():
        return SGLangEngine.load(make_spec(folder, draft, CONTEXT), gpus=HOPPER)


FACTORIES: dict[str, Factory] = {
    "scripted": lambda folder: ScriptedEngine.load(_spec(folder)),
    "remote": lambda folder: RemoteEngine(_spec(folder)),
    "native": lambda folder: _load_native(folder, "off"),
    "native mtp": lambda folder: _load_native(folder, "mtp"),
    "remote native": lambda folder: RemoteEngine(_native(folder, "off")),
    "sglang": lambda folder: _load_sglang(folder, "dspark"),
    "sglang plain": lambda folder: _load_sglang(folder, "off"),
}


def open_engine(kind: str, folder: Path) -> Iterator[Engine]:
    """One whose process, if it has one, has torch already."""
    with forked_workers():
        opened = FACTORIES[kind](folder)
        yield opened
        opened.close()


@pytest.fixture(scope="module", params=FACTORIES)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One engine for all tests of this file: each leaves it usable for the next."""
    yield from open_engine(request.param, tmp_path_factory.mktemp("engine"))


@pytest.fixture
def fresh(request: pytest.FixtureRequest, engine: Engine, tmp_path: Path) -> Iterator[Engine]:
    """An engine of the same kind that a test may close."""
    yield from open_engine(request.node.callspec.params["engine"], tmp_path)


def run(engine: Engine, max_tokens: int = NUM, stop_ids: frozenset[int] = frozenset()) -> list[StepResult]:
    return list(engine.generate(TokenRequest(PROMPT, max_tokens=max_tokens, stop_ids=stop_ids)))


def ids_of(steps: list[StepResult]) -> tuple[int, ...]:
    return tuple(token_id for step in steps for token_id in step.ids)


@pytest.fixture(scope="module")
def greedy(engine: Engine) -> tuple[int, ...]:
    """What the engine answers before anything has happened to it."""
    return ids_of(run(engine))


def test_info_says_what_it_is(engine: Engine) -> None:
    info = engine.info
    assert info.model
    assert info.context_limit == CONTEXT
    assert info.vocab_size > max(PROMPT)
    assert info == engine.info


def test_only_the_last_step_has_a_reason_and_times_never_go_back(engine: Engine) -> None:
    begun = time.monotonic()
    steps = run(engine)
    assert [step.finish for step in steps[:-1]] == [None] * (len(steps) - 1)
    assert steps[-1].finish is FinishReason.LENGTH
    times = [begun, *(step.time_s for step in steps), time.monotonic()]
    assert times == sorted(times)


def test_counts_of_each_step_agree_with_its_ids(engine: Engine) -> None:
    steps = run(engine)
    for step in steps:
        assert 0 <= step.accepted <= step.drafted
        assert len(step.ids) in (step.accepted, step.accepted + 1)
    # The last prompt id may be computed by the prefill, or as the anchor of the first step.
    assert steps[0].cached + steps[0].prefilled in (len(PROMPT) - 1, len(PROMPT))
    assert all(step.prefilled == step.cached == 0 for step in steps[1:])


def test_same_request_gives_same_ids(engine: Engine, greedy: tuple[int, ...]) -> None:
    assert len(greedy) == NUM
    assert ids_of(run(engine)) == greedy


def test_the_length_limit_cuts_at_every_position_of_a_block(engine: Engine, greedy: tuple[int, ...]) -> None:
    for limit in range(1, 14):
        steps = run(engine, limit)
        assert ids_of(steps) == greedy[:limit]
        assert steps[-1].finish is FinishReason.LENGTH


def test_a_stop_id_cuts_at_every_position_of_a_block(engine: Engine, greedy: tuple[int, ...]) -> None:
    """C075: what was drafted after it never comes out, and the reason is right. C087: nor does it count."""
    for stop in greedy[:14]:
        steps = run(engine, stop_ids=frozenset({stop}))
        end = greedy.index(stop) + 1
        assert ids_of(steps) == greedy[:end]
        assert steps[-1].finish is FinishReason.EOS
        assert all(step.accepted <= len(step.ids) for step in steps)


def test_a_stop_id_and_the_limit_in_one_block(engine: Engine, greedy: tuple[int, ...]) -> None:
    """C077: a stop inside the limit or exactly at it is EOS; one past it is not seen, LENGTH."""
    for stop in greedy[1:10]:
        end = greedy.index(stop) + 1
        for limit, reason in (
            (end + 2, FinishReason.EOS),
            (end, FinishReason.EOS),
            (end - 1, FinishReason.LENGTH),
        ):
            if limit < 1:
                continue
            steps = run(engine, limit, frozenset({stop}))
            assert ids_of(steps) == greedy[: min(limit, end)]
            assert steps[-1].finish is reason


def test_a_full_context_ends_with_length(engine: Engine) -> None:
    prompt = PROMPT * (CONTEXT // len(PROMPT) - 1)
    steps = list(engine.generate(TokenRequest(prompt, max_tokens=1000)))
    assert len(ids_of(steps)) == CONTEXT - len(prompt)
    assert steps[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 4 * CONTEXT])
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(engine: Engine, length: int) -> None:
    with pytest.raises(ContextTooLong) as caught:
        engine.generate(TokenRequest((1,) * length))
    assert str(length) in caught.value.message
    assert str(CONTEXT) in caught.value.message
    assert caught.value.hint
    assert len(ids_of(run(engine, 3))) == 3


def test_a_request_without_ids_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError):
        engine.generate(TokenRequest(()))


def test_cancel_before_the_first_step(engine: Engine, greedy: tuple[int, ...]) -> None:
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=LONG))
    generation.cancel()
    steps = list(generation)
    assert steps[-1].finish is FinishReason.CANCELLED
    assert len(ids_of(steps)) < LONG
    assert ids_of(run(engine)) == greedy


@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_cancel_between_steps_leaves_a_usable_engine(engine: Engine, greedy: tuple[int, ...], after: int) -> None:
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=LONG))
    steps = []
    for step in generation:
        steps.append(step)
        if len(steps) == after:
            generation.cancel()
            generation.cancel()
    assert steps[-1].finish is FinishReason.CANCELLED
    assert ids_of(steps)[:NUM] == greedy[: len(ids_of(steps))]
    assert ids_of(run(engine)) == greedy


def test_cancel_from_another_thread_while_iterating(engine: Engine) -> None:
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=LONG))
    steps = iter(generation)
    first = next(steps)
    thread = threading.Thread(target=generation.cancel)
    thread.start()
    thread.join()
    rest = list(steps)
    assert first.finish is None
    assert rest[-1].finish is FinishReason.CANCELLED


def test_cancel_after_the_end_does_nothing(engine: Engine, greedy: tuple[int, ...]) -> None:
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=3))
    assert len(ids_of(list(generation))) == 3
    generation.cancel()
    assert list(generation) == []
    assert ids_of(run(engine)) == greedy


def test_a_second_request_meanwhile_is_refused_and_harms_nothing(engine: Engine, greedy: tuple[int, ...]) -> None:
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=NUM))
    steps = iter(generation)
    got = [next(steps)]
    with pytest.raises(EngineBusy):
        engine.generate(TokenRequest(PROMPT))
    got += steps
    assert ids_of(got) == greedy


def test_leaving_the_loop_frees_the_engine(engine: Engine, greedy: tuple[int, ...]) -> None:
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=LONG))
    for _ in generation:
        break
    assert ids_of(run(engine)) == greedy


def test_closing_the_iterator_frees_the_engine(engine: Engine, greedy: tuple[int, ...]) -> None:
    steps = iter(engine.generate(TokenRequest(PROMPT, max_tokens=LONG)))
    next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert ids_of(run(engine)) == greedy


def test_a_generation_that_nobody_wants_frees_the_engine(engine: Engine, greedy: tuple[int, ...]) -> None:
    engine.generate(TokenRequest(PROMPT, max_tokens=LONG))
    gc.collect()
    assert ids_of(run(engine)) == greedy


def test_close_twice(fresh: Engine) -> None:
    assert len(ids_of(run(fresh, 3))) == 3
    fresh.close()
    fresh.close()
    with pytest.raises(EngineError):
        fresh.generate(TokenRequest(PROMPT))


def test_close_before_any_request(fresh: Engine) -> None:
    fresh.close()
    with pytest.raises(EngineError):
        fresh.generate(TokenRequest(PROMPT))


def test_close_in_the_middle_of_a_generation_ends_it(fresh: Engine) -> None:
    steps = iter(fresh.generate(TokenRequest(PROMPT, max_tokens=LONG)))
    next(steps)
    fresh.close()
    try:
        rest = list(steps)
    except EngineError:
        return
    assert rest[-1].finish is FinishReason.CANCELLED
