"""The script format, and the engine that plays it: directly and behind the worker."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_local.engine.protocol import Engine, EngineSpec
from ling_local.engine.remote import RemoteEngine
from ling_local.engine.script import CONTROL_TOKENS, ScriptedTokens
from ling_local.engine.scripted import ScriptedEngine, cut_block
from ling_local.errors import EngineError, LingError, ModelError, NonFinite, OutOfMemory
from ling_local.types import FinishReason, StepResult, TokenRequest

Open = Callable[[Path], Engine]
PROMPT = (65, 66, 67)


@pytest.fixture(params=["direct", "remote"])
def open_script(request: pytest.FixtureRequest) -> Iterator[Open]:
    opened: list[Engine] = []

    def open_one(path: Path) -> Engine:
        spec = EngineSpec(str(path), "scripted")
        opened.append(ScriptedEngine.load(spec) if request.param == "direct" else RemoteEngine(spec))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def play(engine: Engine, max_tokens: int = 100, **fields: Any) -> list[StepResult]:
    return list(engine.generate(TokenRequest(PROMPT, max_tokens=max_tokens, **fields)))


def text_of(path: Path, steps: list[StepResult]) -> str:
    return ScriptedTokens.load(path).decode([token_id for step in steps for token_id in step.ids])


def test_every_way_to_write_a_token(write_script: Callable[..., Path]) -> None:
    tokens = ["He", {"hex": "f09f"}, {"hex": "8c"}, {"control": "</think>"}, {"id": 97}, "é", "x", "</think>"]
    path = write_script(tokens)
    steps = play(ScriptedEngine.load(EngineSpec(str(path), "scripted")), len(tokens))
    ids = [step.ids[0] for step in steps]
    book = ScriptedTokens.load(path)
    assert [book.token_bytes(i) for i in ids] == [
        b"He", b"\xf0\x9f", b"\x8c", b"</think>", b"a", "é".encode(), b"x", b"</think>",
    ]  # fmt: skip
    assert [book.is_control(i) for i in ids] == [False, False, False, True, False, False, False, False]
    assert ids[2] == 0x8C
    assert ids[6] == ord("x")
    assert max(ids) < book.size


def test_a_text_is_cut_into_tokens_and_steps(write_script: Callable[..., Path]) -> None:
    path = write_script([{"text": "abcdefgh日本", "cut": 3, "per_step": 2, "repeat": 2}], block=4)
    steps = play(ScriptedEngine.load(EngineSpec(str(path), "scripted")), 8)
    assert [len(step.ids) for step in steps] == [2, 2, 2, 2]
    assert text_of(path, steps) == "abcdefgh日本" * 2
    assert [step.drafted for step in steps] == [4] * 4
    assert [step.accepted for step in steps] == [1, 1, 1, 1]


def test_bytes_are_cut_into_single_bytes(write_script: Callable[..., Path]) -> None:
    path = write_script([{"hex": "f09f8c8d", "cut": 1}])
    steps = play(ScriptedEngine.load(EngineSpec(str(path), "scripted")), 4)
    assert [step.ids for step in steps] == [(0xF0,), (0x9F,), (0x8C,), (0x8D,)]


def test_without_drafts_each_token_is_a_step(write_script: Callable[..., Path]) -> None:
    engine = ScriptedEngine.load(EngineSpec(str(write_script([["a", "b", "c"], "d"], block=2)), "scripted"))
    with_drafts, without = play(engine, 4), play(engine, 4, draft=False)
    assert [step.ids for step in with_drafts] == [(97, 98, 99), (100,)]
    assert [step.ids for step in without] == [(97,), (98,), (99,), (100,)]
    assert [(step.drafted, step.accepted) for step in without] == [(0, 0)] * 4


def test_turns_are_played_in_order_and_then_again(open_script: Open, write_script: Any) -> None:
    path = write_script(["a"], {"steps": ["b"]}, ["c"])
    engine = open_script(path)
    assert [play(engine, 1)[0].ids for _ in range(4)] == [(97,), (98,), (99,), (97,)]


def test_the_end_of_turn_follows_the_steps(open_script: Open, write_script: Any) -> None:
    path = write_script(["a", "b"])
    eos = ScriptedTokens.load(path).control["<|role_end|>"]
    engine = open_script(path)
    steps = play(engine, stop_ids=frozenset({eos}))
    assert [step.ids for step in steps] == [(97,), (98,), (eos,)]
    assert steps[-1].finish is FinishReason.EOS
    ignored = play(engine, 5)
    assert [step.ids for step in ignored] == [(97,), (98,), (eos,), (97,), (98,)]
    assert ignored[-1].finish is FinishReason.LENGTH


def test_a_looping_turn_has_no_end(open_script: Open, write_script: Any) -> None:
    path = write_script({"steps": ["a", ["b", "c"]], "loop": True}, context=40_000, block=1)
    steps = play(open_script(path), 30_000, stop_ids=frozenset({257}))
    assert text_of(path, steps) == "abc" * 10_000


def test_accept_length_stops_at_the_end_of_turn(open_script: Open, write_script: Any) -> None:
    """C087: five drafts accepted, the third is the end of turn: three come out, and three count."""
    block = ["a", "b", {"control": "<|role_end|>"}, "c", "d", "e"]
    (step,) = play(open_script(write_script([block], block=5)), stop_ids=frozenset({257}))
    assert len(step.ids) == 3
    assert (step.drafted, step.accepted) == (5, 2)
    assert step.finish is FinishReason.EOS


@given(ids=st.lists(st.integers(0, 5), min_size=1, max_size=9), room=st.integers(1, 10), stop=st.integers(0, 5))
def test_cut_block_keeps_what_one_by_one_would(ids: list[int], room: int, stop: int) -> None:
    expected: list[int] = []
    reason = None
    for token_id in ids:
        expected.append(token_id)
        if token_id == stop:
            reason = FinishReason.EOS
        elif len(expected) == room:
            reason = FinishReason.LENGTH
        if reason:
            break
    assert cut_block(tuple(ids), frozenset({stop}), room) == (tuple(expected), reason)


def test_prefill_counts_what_the_state_holds(open_script: Open, write_script: Any) -> None:
    engine = open_script(write_script(["a", "b", "c"]))
    first = play(engine, 3)
    assert (first[0].cached, first[0].prefilled) == (0, 3)
    # The third token was never an input of the model; the turn that follows computes it.
    longer = list(engine.generate(TokenRequest((*PROMPT, 97, 98, 99, 5, 6), max_tokens=1)))
    assert (longer[0].cached, longer[0].prefilled) == (5, 3)
    same = play(engine, 1)
    assert (same[0].cached, same[0].prefilled) == (2, 1)
    other = list(engine.generate(TokenRequest((9, 9), max_tokens=1)))
    assert (other[0].cached, other[0].prefilled) == (0, 2)


def test_nan_ends_with_step_and_position_and_the_next_request_is_clean(open_script: Open, write_script: Any) -> None:
    """C121, and an error after partial output: what was made before it has arrived."""
    engine = open_script(write_script(["a", "b", {"fail": "nan"}], ["c"]))
    got = []
    with pytest.raises(NonFinite, match=r"step 3.*position 5") as caught:  # noqa: PT012
        for step in engine.generate(TokenRequest(PROMPT)):
            got.append(step.ids)
    assert got == [(97,), (98,)]
    assert caught.value.hint
    clean = play(engine, 1)
    assert clean[0].ids == (99,)
    assert (clean[0].cached, clean[0].prefilled) == (0, 3)


def test_an_error_of_ours_arrives_as_itself(open_script: Open, write_script: Any) -> None:
    fail = {"kind": "OutOfMemory", "message": "61.2 GiB needed, 22.9 free", "hint": "a smaller --ctx"}
    engine = open_script(write_script([{"fail": fail}], ["a"]))
    with pytest.raises(OutOfMemory) as caught:
        play(engine)
    assert (caught.value.message, caught.value.hint) == (fail["message"], fail["hint"])
    assert play(engine, 1)[0].ids == (97,)


def test_a_failed_load_is_raised_by_info(open_script: Open, write_script: Any) -> None:
    path = write_script(["a"], load={"fail": {"kind": "ModelError", "message": "shard 3 is short"}})
    with pytest.raises(ModelError, match="shard 3 is short"):
        _ = open_script(path).info


def test_the_real_clock_keeps_the_rate(open_script: Open, write_script: Any) -> None:
    """2,000 tokens a second: sleeps that are too long do not add up."""
    turn = {"steps": [{"tokens": ["a", "b", "c", "d"], "delay_ms": 2}], "loop": True}
    steps = play(open_script(write_script(turn, block=3)), 1600)
    took_s = steps[-1].time_s - steps[0].time_s
    assert 0.99 < took_s / (399 * 0.002) < 1.25


def test_the_virtual_clock_does_not_wait(open_script: Open, write_script: Any) -> None:
    turn = {"steps": [{"tokens": ["a"], "delay_ms": 5000}], "loop": True, "prefill_ms": 700}
    engine = open_script(write_script(turn, clock="virtual"))
    _ = engine.info
    begun = time.monotonic()
    steps = play(engine, 100)
    assert time.monotonic() - begun < 5
    assert steps[-1].time_s - steps[0].time_s == pytest.approx(99 * 5)
    assert steps[0].prefill_s == pytest.approx(0.7)


def test_context_is_the_smaller_of_script_and_spec(write_script: Any) -> None:
    path = str(write_script(["a"], context=100))
    limits = [ScriptedEngine.load(EngineSpec(path, "scripted", context=c)).info.context_limit for c in (0, 50, 500)]
    assert limits == [100, 50, 100]


@pytest.mark.parametrize(
    ("turns", "place"),
    [
        ([["a", {"hex": "zz"}]], "turn 1: step 2"),
        ([["a"], [{"tokens": ["a", "b", "c"], "drafted": 1}]], "turn 2: step 1: 1 drafted"),
        ([[{"fail": "NoSuchError"}]], "NoSuchError"),
        ([[{"control": "<nonsense>"}]], "<nonsense>"),
        ([[{"tokens": ["a"], "delay": 5}]], "'delay'"),
        ([[{"tokens": ["a"], "text": "b"}]], "exactly one"),
        ([[{"kill": "SIGNONE"}]], "SIGNONE"),
        ([[{"tokens": ["a"], "delay_ms": -1}]], "delay_ms"),
        ([[""]], "empty token"),
        ([{"steps": [], "loop": True}], "loops"),
        ([], "turns"),
    ],
)
def test_a_faulty_script_is_refused_with_its_place(write_script: Any, turns: list[Any], place: str) -> None:
    with pytest.raises(ModelError) as caught:
        ScriptedTokens.load(write_script(*turns))
    assert place in caught.value.message
    assert "script.json" in caught.value.message


def test_a_script_that_is_not_there_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        ScriptedTokens.load(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        ScriptedTokens.load(tmp_path / "bad.json")


@given(st.text(st.characters(exclude_categories=())))
def test_text_never_becomes_control_ids_and_comes_back(text: str) -> None:
    tokens = ScriptedTokens()
    for whole in (text, text + CONTROL_TOKENS[1]):
        ids = tokens.encode(whole)
        assert not any(map(tokens.is_control, ids))
        assert tokens.decode(ids) == whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def test_the_format_in_the_documentation_is_accepted(write_script: Any) -> None:
    from ling_local.engine import scripted

    documented = scripted.__doc__ or ""
    example = next(line.strip() for line in documented.splitlines() if line.strip().startswith('{"turns"'))
    path = write_script(name="documented")
    path.write_text(json.dumps(json.loads(example)))
    steps = play(ScriptedEngine.load(EngineSpec(str(path), "scripted")), stop_ids=frozenset({257}))
    assert text_of(path, steps) == "Hello\n world<|role_end|>"


def test_each_error_class_can_be_scripted(write_script: Any) -> None:
    for kind in ("EngineError", "EngineDied", "ExchangeTimeout", "ModelError"):
        engine = ScriptedEngine.load(EngineSpec(str(write_script([{"fail": kind}])), "scripted"))
        with pytest.raises(LingError) as caught:
            play(engine)
        assert type(caught.value).__name__ == kind
    engine.close()
    with pytest.raises(EngineError):
        play(engine)
