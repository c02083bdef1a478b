"""Speculation never changes a byte: ids and states with drafts equal plain decoding, to the bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints import GOLDEN, write_checkpoint, write_draft
from engines import another
from ling_kernels.ops import Proposal
from ling_local.engine.native import NativeEngine
from ling_local.engine.width import PLAIN_FIRST
from ling_local.errors import ModelError, UsageError
from ling_local.types import FinishReason, SamplingParams, StepResult, TokenRequest
from parity import assert_bits, assert_close

PROMPT = (5, 17, 99, 3, 42, 8, 8, 120, 77, 31)
LENGTH = 24
GREEDY = SamplingParams()
SAMPLED = SamplingParams(temperature=0.9, top_k=30, top_p=0.95, seed=5)
KINDS = ("mtp", "dspark")
WAYS = [("mtp", 1), ("mtp", 3), ("mtp", 8), ("dspark", 1), ("dspark", 5), ("dspark", 8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), seed=1)
    write_draft(folder / "dspark", folder)
    return folder


@cache
def loaded(folder: Path, draft: str, block: int) -> NativeEngine:
    """What the engines of a kind are made of."""
    return NativeEngine.load(folder, draft=draft, block=block, threads=1)


def fresh(folder: Path, draft: str = "off", block: int = 0, context: int = 0) -> NativeEngine:
    """A new engine, over weights that others have too, that finds drafting worth its while from the first step on."""
    engine = another(loaded(folder, draft, block), context)
    for _ in range(PLAIN_FIRST + 1):
        for times in engine.step_times.values():
            times.note(1, False, 1e3)
    return engine


def run(engine: NativeEngine, ids: Sequence[int] = PROMPT, max_tokens: int = LENGTH, **kw) -> list[StepResult]:
    """All results, with every draft of every step verified unless full_width=False leaves it to the width rule."""
    return list(engine.generate(TokenRequest(tuple(ids), max_tokens=max_tokens, **{"full_width": True, **kw})))


def tokens(results: list[StepResult]) -> tuple[int, ...]:
    return tuple(token for result in results for token in result.ids)


class Left(NamedTuple):
    """Everything that the kept tokens leave; nothing of rows past the end."""

    ids: list[int]
    tensors: dict[str, torch.Tensor]


def left(engine: NativeEngine) -> Left:
    """A copy of it as it stands."""
    held, state = len(engine._ids), engine._state
    found = {name: getattr(state, name) for name in ("recurrent", "conv", "length", "anchor", "mtp_hidden")}
    found["latent"] = state.latent[:, :held]
    if state.mtp_latent is not None:
        found["MTP latent"] = state.mtp_latent[:held]
    if state.draft_context is not None:
        found["draft context"] = state.draft_context[:, :, :held]
    return Left(list(engine._ids), {name: tensor.clone() for name, tensor in found.items() if tensor is not None})


def assert_same_state(got: NativeEngine, want: NativeEngine | Left) -> None:
    """To the bit."""
    a, b = left(got), want if isinstance(want, Left) else left(want)
    assert a.ids == b.ids
    assert a.tensors.keys() == b.tensors.keys()
    for name, tensor in a.tensors.items():
        assert_bits(tensor, b.tensors[name], name)


class Plain(NamedTuple):
    """Plain decoding: the ids, and what 1, 2, ... of them leave."""

    ids: tuple[int, ...]
    after: list[Left]


def decode_plainly(engine: NativeEngine, sampling: SamplingParams = GREEDY) -> Plain:
    ids: list[int] = []
    after = []
    for result in engine.generate(TokenRequest(PROMPT, sampling=sampling, max_tokens=LENGTH, draft=False)):
        assert (len(result.ids), result.drafted) == (1, 0)
        ids += result.ids
        after.append(left(engine))
    return Plain(tuple(ids), after)


@cache
def plainly(folder: Path, draft: str, sampling: SamplingParams = GREEDY) -> Plain:
    """What an engine that could draft does without."""
    return decode_plainly(fresh(folder, draft), sampling)


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[int, ...]:
    return plainly(folder, "off").ids


class Oracle:
    """A drafter that knows the answer and spoils one token of it, after as many as the pattern says, step by step."""

    def __init__(self, inner, answer: Sequence[int], pattern: Sequence[int]) -> None:
        self.inner, self.answer, self.pattern, self.calls = inner, answer, pattern, 0

    def __getattr__(self, name: str):
        return getattr(self.inner, name)

    def propose(self, ops, weights, state, num: int) -> Proposal:
        made = self.inner.propose(ops, weights, state, num)
        good = self.pattern[self.calls % len(self.pattern)]
        self.calls += 1
        at = int(state.length) - (len(PROMPT) - 1)  # the anchor is answer[at - 1]
        right = [*self.answer[at : at + num], *[0] * num][:num]
        drafts = [(t + 1) % 128 if j == good else t for j, t in enumerate(right)]
        return Proposal(torch.tensor(drafts), torch.full_like(made.confidence, 0.99))


def forced(folder: Path, draft: str, block: int, answer: Sequence[int], pattern: Sequence[int]) -> NativeEngine:
    engine = fresh(folder, draft, block)
    engine.drafter = Oracle(engine.drafter, answer, pattern)
    return engine


@pytest.mark.parametrize(("draft", "block"), WAYS)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_untrained_draft_changes_nothing(folder: Path, draft: str, block: int, sampling: SamplingParams) -> None:
    alone = plainly(folder, draft, sampling)
    assert alone.ids == plainly(folder, "off", sampling).ids
    for full_width in (True, False):
        engine = fresh(folder, draft, block)
        results = run(engine, sampling=sampling, full_width=full_width)
        assert tokens(results) == alone.ids
        assert any(r.drafted for r in results) or not full_width
        assert_same_state(engine, alone.after[-1])


@pytest.mark.parametrize("draft", KINDS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    block=st.integers(1, 8),
    pattern=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    max_tokens=st.integers(1, LENGTH),
    stop=st.integers(0, LENGTH - 1) | st.none(),
)
def test_any_accept_pattern_leaves_plain_decodings_ids_and_state(
    folder: Path, plain: tuple[int, ...], draft: str, block: int, pattern: list[int], max_tokens: int, stop: int | None
) -> None:
    stop_ids = frozenset() if stop is None else frozenset({plain[stop]})
    engine = forced(folder, draft, block, plain, pattern)
    results = run(engine, max_tokens=max_tokens, stop_ids=stop_ids)
    stopped = stop is not None and plain.index(plain[stop]) < max_tokens
    num = plain.index(plain[stop]) + 1 if stopped else max_tokens
    assert tokens(results) == plain[:num]
    assert results[-1].finish is (FinishReason.EOS if stopped else FinishReason.LENGTH)
    assert_same_state(engine, plainly(folder, draft).after[num - 1])
    assert all(len(r.ids) == r.accepted + 1 for r in results)
    assert all(r.accepted <= r.drafted <= block for r in results)


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("accepted", range(9))
def test_every_accept_length_is_reached(folder: Path, plain: tuple[int, ...], draft: str, accepted: int) -> None:
    engine = forced(folder, draft, 8, plain, [accepted])
    results = run(engine, max_tokens=12)
    assert tokens(results) == plain[:12]
    full = [r for r in results[1:-1] if r.drafted == 8]
    assert full
    assert all(r.accepted == accepted for r in full)


OTHERS = tuple(range(30, 30 + LENGTH))  # tokens that differ, so that each place has its own stop


@pytest.fixture(scope="module", params=KINDS)
def forced_plainly(request: pytest.FixtureRequest, folder: Path) -> tuple[str, Plain]:
    """Plain decoding to those tokens, with a drafter beside it."""
    engine = fresh(folder, request.param)
    force_answer(engine, OTHERS)
    return request.param, decode_plainly(engine)


@pytest.mark.parametrize("place", range(10))
def test_a_stop_at_every_place_of_a_block(folder: Path, forced_plainly: tuple[str, Plain], place: int) -> None:
    draft, alone = forced_plainly
    engine = forced(folder, draft, 8, OTHERS, [8])
    force_answer(engine, OTHERS)
    results = run(engine, stop_ids=frozenset({OTHERS[1 + place]}))
    assert tokens(results) == alone.ids[: place + 2] == OTHERS[: place + 2]
    assert results[-1].finish is FinishReason.EOS
    assert len(results) == (2 if place < 9 else 3)
    assert_same_state(engine, alone.after[place + 1])


def force_answer(engine: NativeEngine, answer: Sequence[int]) -> None:
    """Make the target's greedy choice at each position the given one, by its logits."""
    verdict = engine.ops.verdict

    def forced_verdict(logits, drafts, positions, *rest):
        wanted = [answer[min(max(int(p) - (len(PROMPT) - 1), 0), len(answer) - 1)] for p in positions]
        logits = logits.clone()
        logits[torch.arange(logits.shape[0]), torch.tensor(wanted)] = 1e4
        return verdict(logits, drafts, positions, *rest)

    engine.ops.verdict = forced_verdict


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("room", [1, 2, 5, 9, 10, 11])  # the second step may hold tokens 2 to 10
def test_the_end_of_the_context_may_lie_inside_a_block(
    folder: Path, plain: tuple[int, ...], draft: str, room: int
) -> None:
    engine = fresh(folder, draft, 8, context=len(PROMPT) + room)
    engine.drafter = Oracle(engine.drafter, plain, [8])
    results = run(engine, max_tokens=100)
    assert tokens(results) == plain[:room]
    assert results[-1].finish is FinishReason.LENGTH
    assert_same_state(engine, plainly(folder, draft).after[room - 1])


@pytest.mark.parametrize("draft", KINDS)
@pytest.mark.parametrize("length", [1, 2, 9, 17])
def test_prompts_of_any_length_start_right(folder: Path, draft: str, length: int) -> None:
    ids = [(i * 37 + 11) % 128 for i in range(length)]
    engine, reference = fresh(folder, draft, 8), fresh(folder, draft, 8)
    assert tokens(run(engine, ids, 8)) == tokens(run(reference, ids, 8, draft=False))
    assert_same_state(engine, reference)


@pytest.mark.parametrize("draft", KINDS)
def test_speculation_may_be_switched_between_requests(folder: Path, plain: tuple[int, ...], draft: str) -> None:
    engine, reference = forced(folder, draft, 8, plain, [3, 0, 8]), fresh(folder, draft, 8)
    ids = PROMPT
    for turn, drafting in enumerate((True, False, True, True, False)):
        made = tokens(run(engine, ids, 9, draft=drafting))
        assert made == tokens(run(reference, ids, 9, draft=False))
        assert_same_state(engine, reference)
        ids = (*ids, *made, turn, turn + 50)


@pytest.mark.parametrize("draft", KINDS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cancel=st.integers(0, 6), keep=st.integers(0, 12), ahead=st.integers(1, 3))
def test_any_cancel_point_leaves_a_usable_state(
    folder: Path, plain: tuple[int, ...], draft: str, cancel: int, keep: int, ahead: int
) -> None:
    engine = forced(folder, draft, 4, plain, [2, 4, 0])
    engine.run_ahead = ahead
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=LENGTH))
    made: list[int] = []
    for number, result in enumerate(generation):
        made += result.ids
        if number == cancel:
            generation.cancel()
    assert tuple(made) == plain[: len(made)]
    # a stop string keeps less than what was made; the next turn goes on from there
    longer = (*PROMPT, *made[:keep], 9, 100)
    assert tokens(run(engine, longer, 8)) == tokens(run(fresh(folder), longer, 8))


@pytest.mark.parametrize("draft", KINDS)
def test_a_restored_snapshot_and_a_prefill_equal_a_fresh_run(folder: Path, plain: tuple[int, ...], draft: str) -> None:
    engine = forced(folder, draft, 8, plain, [8, 1])
    run(engine)
    again = (*PROMPT, *plain[:3], 77)
    results = run(engine, again, 12)
    assert results[0].cached == len(PROMPT) - 1
    other = fresh(folder, draft, 8)
    with torch.inference_mode():
        other._prefill(other._state, 0, again[: len(PROMPT) - 1], again[1 : len(PROMPT)])
    other._ids = list(again[: len(PROMPT) - 1])
    assert tokens(run(other, again, 12)) == tokens(results)
    assert_same_state(engine, other)


def test_a_sampled_request_gives_the_same_bytes_with_and_without_drafts_that_hit(folder: Path) -> None:
    alone = plainly(folder, "off", SAMPLED).ids
    engine = forced(folder, "dspark", 8, alone, [8, 5, 2])
    results = run(engine, sampling=SAMPLED)
    assert tokens(results) == alone
    assert max(len(r.ids) for r in results) > 3


def linked(folder: Path, tmp_path: Path) -> Path:
    """The model's files in a new folder, without its draft."""
    copied = tmp_path / "copy"
    copied.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (copied / file.name).symlink_to(file)
    return copied


@pytest.mark.parametrize(
    ("head", "changes"),
    [
        ("vanilla", {}),
        ("gated", {}),
        ("rnn", {}),
        ("gated", {"num_key_value_heads": 1}),
        ("vanilla", {"rope_is_neox_style": False}),
        ("gated", {"sample_from_anchor": False}),
        ("rnn", {"sample_from_anchor": False}),
    ],
)
def test_every_kind_of_draft_is_lossless(
    folder: Path, plain: tuple[int, ...], tmp_path: Path, head: str, changes: dict
) -> None:
    copied = linked(folder, tmp_path)
    write_draft(copied / "dspark", folder, markov_head_type=head, **changes)
    assert tokens(run(fresh(copied, "dspark"))) == plain


@pytest.fixture(scope="module")
def golden_mtp() -> NativeEngine:
    return NativeEngine.load(GOLDEN / "flashlike", draft="mtp", threads=1)


@pytest.mark.parametrize("length", [1, 7, 65, 130])
def test_mtp_logits_are_the_goldens(golden_mtp: NativeEngine, length: int) -> None:
    import numpy as np

    from ling_local.engine.nextn import mtp_forward

    engine = golden_mtp
    golden = np.load(GOLDEN / "flashlike" / "golden.npz")
    ids = golden[f"prompt_{length}"].tolist()
    following = [*ids[1:], int(golden[f"greedy_tokens_{length}"][0])]
    state = engine.new_state(length)
    seen: list[torch.Tensor] = []
    with torch.inference_mode():
        hidden = engine._prefill(state, 0, ids, following)
        seen = mtp_forward(
            engine.ops, engine.weights, state, hidden, torch.tensor(following), torch.arange(length), None
        )
        logits = engine.ops.head(seen, engine.weights.lm_head)
    assert_close(logits, golden[f"mtp_logits_{length}"], "golden logits")


def load_engine(folder: Path, draft: str, block: int = 0) -> NativeEngine:
    return NativeEngine.load(folder, draft=draft, block=block, threads=1)


def test_auto_takes_the_best_drafter_there_is(folder: Path, tmp_path: Path) -> None:
    assert load_engine(folder, "auto").info.drafter == "dspark"
    assert load_engine(folder, "auto").info.block == 8
    assert load_engine(GOLDEN / "flashlike", "auto").info.drafter == "mtp"
    assert load_engine(GOLDEN / "tinylike_realdims", "auto").info.drafter == "off"
    assert load_engine(folder, "dspark", 3).info.block == 3


def test_what_cannot_be_is_refused_with_the_reason(folder: Path) -> None:
    with pytest.raises(UsageError, match="trained on blocks of 8"):
        load_engine(folder, "dspark", 9)
    with pytest.raises(UsageError, match="at most 8"):
        load_engine(folder, "mtp", 9)
    with pytest.raises(ModelError, match="no MTP layer"):
        load_engine(GOLDEN / "tinylike_realdims", "mtp")
    with pytest.raises(ModelError, match="dspark"):
        load_engine(GOLDEN / "flashlike", "dspark")
    with pytest.raises(UsageError, match="no drafter 'x'"):
        load_engine(folder, "x")


def test_draft_files_are_checked_like_all_others(folder: Path, tmp_path: Path) -> None:
    copied = linked(folder, tmp_path)
    draft = write_draft(copied / "dspark", folder)
    assert load_engine(copied, "dspark").info.drafter == "dspark"
    (draft / "confidence_calibration.json").write_text(json.dumps({"temperatures": [1.0]}))
    with pytest.raises(ModelError, match="needs 8 temperatures"):
        load_engine(copied, "dspark")
    (draft / "confidence_calibration.json").unlink()
    data = (draft / "model.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(data[:-2])
    with pytest.raises(ModelError, match="its header says"):
        load_engine(copied, "dspark")


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_draft_exports_are_read_under_their_other_names(
    folder: Path, tmp_path: Path, copies: bool, prefix: str
) -> None:
    copied = linked(folder, tmp_path)
    write_draft(copied / "dspark", folder, prefix=prefix, copies=copies, alias=True)
    plain_draft = load_engine(folder, "dspark").drafter.params
    got = load_engine(copied, "dspark").drafter.params
    for field in dataclasses.fields(got):
        a, b = getattr(got, field.name), getattr(plain_draft, field.name)
        if isinstance(a, torch.Tensor):
            assert_bits(a, b, field.name)
