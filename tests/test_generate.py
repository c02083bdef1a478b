"""The pump over scripted tokens: order, counts, text, stops. No model, no process."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ling_local.generate as room
from ling_local.errors import ContextTooLong, ModelError, UsageError
from ling_local.generate import generate
from ling_local.text import readers
from ling_local.types import Finish, FinishReason, Message, Request, StatsEvent, TokenEvent
from played import CHAT, EOS, Played, Write, opened, play

MIXED = "日本語のテキスト🎉 naïve — 👨‍👩‍👧 end\n\tx  "


# --- order and accounting


def test_events_come_in_order_and_each_id_once(write_script: Write) -> None:
    path = write_script([["a", "b", {"hex": "e6"}], [{"hex": "97a5"}, "c"], EOS], block=2)
    played = play(path)
    kinds = [type(event) for event in played.events]
    assert kinds == [TokenEvent, StatsEvent, TokenEvent, StatsEvent, TokenEvent, StatsEvent, Finish]
    assert played.text() == "ab日c"
    assert played.finish is not None
    assert played.ids == played.finish.ids
    assert len(played.ids) == played.finish.stats.tokens == 6
    assert played.tokens[-1].text == ""  # the end of turn is counted, not shown
    assert played.reason is FinishReason.EOS


def test_stats_grow_and_the_last_are_those_of_the_finish(write_script: Write) -> None:
    played = play(write_script([["a", "b"], ["c", "d"], "e"], block=1))
    counts = [event.stats.tokens for event in played.events if isinstance(event, StatsEvent)]
    assert counts == [2, 4, 5, 6]
    last = [event.stats for event in played.events if isinstance(event, StatsEvent)][-1]
    assert played.finish is not None
    assert last == played.finish.stats


def test_counts_come_from_ids_and_not_from_text(write_script: Write) -> None:
    """C095: 100 tokens of one space; another tokenisation of that text would count otherwise."""
    path = write_script([{"text": " " * 100, "cut": 1, "per_step": 3}, {"text": "        x", "cut": 8}])
    played = play(path)
    assert played.finish is not None
    assert played.finish.stats.tokens == 100 + 2 + 1
    assert played.text() == " " * 108 + "x"


def test_max_tokens_zero_is_a_value(write_script: Write) -> None:
    engine, text_model = opened(write_script(["a"], ["b"]))
    events = list(generate(engine, text_model, Request("go", max_tokens=0)))
    assert len(events) == 1
    assert isinstance(events[0], Finish)
    assert (events[0].reason, events[0].stats.tokens) == (FinishReason.LENGTH, 0)
    assert events[0].stats.prompt_tokens == 2
    assert Played(list(generate(engine, text_model, Request("go", max_tokens=1)))).text() == "a"


def test_no_limit_goes_on_until_the_context_is_full(write_script: Write) -> None:
    played = play(write_script({"steps": ["ab"], "loop": True}, context=50), "x" * 10)
    assert (len(played.ids), played.reason) == (40, FinishReason.LENGTH)


@pytest.mark.parametrize("length", [50, 51, 200])
def test_a_prompt_that_is_too_long_is_refused_before_work_with_both_numbers(write_script: Write, length: int) -> None:
    with pytest.raises(ContextTooLong) as caught:
        play(write_script(["a"], context=50), "x" * length)
    assert str(length) in caught.value.message
    assert "50" in caught.value.message


@pytest.mark.parametrize("wrap", [str, lambda text: (Message("user", "hi"), Message("user", text))])
def test_a_prompt_that_is_far_too_long_is_not_encoded_to_its_end(
    write_script: Write, monkeypatch: pytest.MonkeyPatch, wrap: Any
) -> None:
    engine, text_model = opened(write_script(["a"], context=50))
    encoded: list[int] = []
    encode = type(text_model.tokens).encode
    monkeypatch.setattr(room, "_PIECE", 60)
    monkeypatch.setattr(
        type(text_model.tokens), "encode", lambda self, text: encoded.append(len(text)) or encode(self, text)
    )
    with pytest.raises(ContextTooLong, match=r"more than 100 tokens long; the context holds 50"):
        next(generate(engine, text_model, Request(wrap("x" * 100_000))))
    assert sum(encoded) < 200


def test_an_empty_prompt_and_a_negative_limit_are_refused(write_script: Write) -> None:
    path = write_script(["a"])
    with pytest.raises(UsageError, match="empty"):
        play(path, "")
    with pytest.raises(UsageError, match="-1"):
        play(path, max_tokens=-1)


def test_ignore_eos_makes_exactly_max_tokens(write_script: Write) -> None:
    played = play(write_script(["a", EOS, "b"]), max_tokens=7, ignore_eos=True)
    assert (len(played.ids), played.reason) == (7, FinishReason.LENGTH)
    assert played.text() == "abab"


def test_the_prompt_is_searched_for_its_open_block_while_the_engine_reads_it(
    write_script: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, text_model = opened(write_script(["    x\n", "y", EOS]))
    done: list[str] = []
    begin, code_stop = engine.generate, readers.CodeStop
    monkeypatch.setattr(engine, "generate", lambda asked: done.append("begun") or begin(asked))
    monkeypatch.setattr(readers, "CodeStop", lambda prompt: done.append("searched") or code_stop(prompt))
    played = Played(list(generate(engine, text_model, Request("def f():\n", code_stop=True))))
    assert (played.text(), done) == ("    x\n", ["begun", "searched"])


# --- text


@pytest.mark.parametrize("prompt", ["go", CHAT])
def test_a_rune_in_two_tokens_appears_once_when_complete(
    write_script: Write, prompt: str | tuple[Message, ...]
) -> None:
    """C001."""
    for steps in ([{"hex": "f09f"}, {"hex": "8c8d"}], [{"hex": "f09f8c8d", "cut": 1}]):
        played = play(write_script([*steps, EOS]), prompt, thinking=False)
        assert [event.text for event in played.tokens if event.text] == ["🌍"]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("prompt", ["go", CHAT])
def test_every_split_into_tokens_and_blocks_gives_the_same_text(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, prompt: str | tuple[Message, ...]
) -> None:
    """C003."""
    raw = MIXED.encode()
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=30))})
    tokens = [{"hex": raw[a:b].hex()} for a, b in pairwise(cuts)]
    steps: list[Any] = []
    while tokens:
        size = data.draw(st.integers(1, 5))
        steps.append(tokens[:size])
        tokens = tokens[size:]
    path = tmp_path_factory.mktemp("split") / "s.json"
    path.write_text(json.dumps({"turns": [[*steps, EOS]]}))
    assert play(path, prompt, thinking=False).text() == MIXED


def test_bytes_that_are_no_text_are_marked_and_lose_nothing_around_them(write_script: Write) -> None:
    assert play(write_script(["a", {"hex": "ff"}, "b", {"hex": "e6"}, EOS])).text() == "a\ufffdb\ufffd"


def test_raw_text_keeps_every_blank_and_hides_control_tokens(write_script: Write) -> None:
    steps = ["\n    return", {"control": "<think>"}, " 1\n", "</think>", EOS]
    assert play(write_script(steps)).text() == "\n    return 1\n</think>"


# --- stop strings


@pytest.mark.parametrize("per_step", [1, 2, 3, 7])
@pytest.mark.parametrize("cut", [1, 2, 3, 5])
def test_a_stop_string_ends_before_itself_and_nothing_after_it_counts(
    write_script: Write, cut: int, per_step: int
) -> None:
    """C079: across tokens and blocks; ids go up to the one that completes it."""
    path = write_script([{"text": "one two STOP three four", "cut": cut, "per_step": per_step}], block=6)
    played = play(path, stop=("STOP", "four"))
    assert played.text() == "one two "
    assert played.reason is FinishReason.STOP
    assert played.finish is not None
    expected = -(-len("one two STOP") // cut)
    assert len(played.ids) == played.finish.stats.tokens == len(played.finish.ids) == expected
    assert played.finish.stats.accepted <= expected


def test_after_a_stop_the_engine_is_free_and_the_next_turn_reuses_the_state(write_script: Write) -> None:
    """C079: the state may be ahead of the text; what counts is the prompt of the next turn."""
    engine, text_model = opened(write_script([["a", "b", "STOP", "c", "d"], "e"], ["fresh"], block=4))
    first = Played(list(generate(engine, text_model, Request("go", stop=("STOP",)))))
    assert first.text() == "ab"
    second = Played(list(generate(engine, text_model, Request("goab!"))))
    assert second.text() == "fresh"
    assert second.finish is not None
    assert second.finish.stats.cached_tokens == 4


def test_text_that_could_become_a_stop_comes_at_the_end(write_script: Write) -> None:
    played = play(write_script(["one ", "STO", EOS]), stop=("STOP",))
    assert (played.text(), played.reason) == ("one STO", FinishReason.EOS)
    assert "".join(event.text for event in played.tokens[:2]) == "one "


@pytest.mark.parametrize(
    ("block", "max_tokens", "text", "reason"),
    [
        (["a", "b", EOS, "c", "d", "e"], 5, "ab", FinishReason.EOS),
        (["a", "b", "c", "d", EOS, "e"], 5, "abcd", FinishReason.EOS),
        (["a", "b", "c", "d", "e", EOS], 5, "abcde", FinishReason.LENGTH),
        (["a", "b", "#", "c", "d", "e"], 5, "ab", FinishReason.STOP),
        (["a", "b", "c", "d", "#", "e"], 5, "abcd", FinishReason.STOP),
        (["a", "b", "c", "d", "e", "#"], 5, "abcde", FinishReason.LENGTH),
        (["a", "#", EOS], 5, "a", FinishReason.STOP),
    ],
)
def test_stops_and_limits_in_one_block(
    write_script: Write, block: list[Any], max_tokens: int, text: str, reason: FinishReason
) -> None:
    """C077."""
    played = play(write_script([block], block=5), max_tokens=max_tokens, stop=("#",))
    assert (played.text(), played.reason) == (text, reason)


def test_code_stops_at_the_end_of_the_open_block(write_script: Write) -> None:
    text = "    return a + b\n\n\ndef other():\n    pass\n"
    path = write_script([{"text": text, "cut": 3, "per_step": 4}])
    prompt = "def add(a, b):\n"
    played = play(path, prompt, code_stop=True)
    assert played.text() == "    return a + b\n"
    assert played.reason is FinishReason.STOP
    assert play(path, prompt).text() == text


def test_random_blocks_with_random_stops_equal_the_cut_of_the_whole(write_script: Write) -> None:
    """Seeded: the text up to a stop is the same for any tokens and blocks, and so is its last id's text."""
    source = random.Random(20)
    for _ in range(60):
        text = "".join(source.choice("ab ") for _ in range(40))
        stop = "".join(source.choice("ab") for _ in range(3))
        steps = [{"text": text, "cut": source.randint(1, 4), "per_step": source.randint(1, 6)}, EOS]
        played = play(write_script(steps), stop=(stop,))
        head, found, _ = text.partition(stop)
        assert played.text() == head
        assert played.reason is (FinishReason.STOP if found else FinishReason.EOS)


# --- the text model


def test_end_ids_come_from_the_checkpoint_s_files(tmp_path: Path) -> None:
    from ling_local.generate import _eos_ids

    assert _eos_ids(tmp_path) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": 5}')
    generation = json.dumps({"eos_token_id": [5, 9, -1, 10**30]})  # the last two no vocabulary has
    (tmp_path / "generation_config.json").write_text("\ufeff" + generation, encoding="utf-8")
    assert _eos_ids(tmp_path) == {5, 9}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        _eos_ids(tmp_path)
