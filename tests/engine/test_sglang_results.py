"""Chunks as the real SGLang sends them, turned into steps; its reasons in our words."""

from __future__ import annotations

import json
from typing import Any

import pytest

import sglang_facts
from ling_local.engine.sglang.results import ChunkReader, finish_of, sampling_params
from ling_local.errors import EngineError, NonFinite, OutOfMemory, UsageError
from ling_local.types import FinishReason, SamplingParams, StepResult, TokenRequest

FACTS = json.loads(sglang_facts.FILE.read_text(encoding="utf-8"))
FINISH = FACTS["finish"]


def chunk(ids: list[int], made: int, finish: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """As 0.5.23 sends it with --skip-tokenizer-init."""
    meta = {
        "id": "6f1c",
        "finish_reason": finish,
        "prompt_tokens": 7,
        "weight_version": "default",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": made,
        "cached_tokens": 4,
        **more,
    }
    return {"output_ids": ids, "meta_info": meta}


def read(*chunks: dict[str, Any], block: int = 0) -> list[StepResult]:
    reader = ChunkReader(7, block, started_s=1.0)
    return [step for number, one in enumerate(chunks) for step in reader.steps(one, 2.0 + number)]


def test_a_chunk_is_a_step_and_the_first_tells_of_the_prefill() -> None:
    steps = read(chunk([11], 1), chunk([12, 13, 14], 4), chunk([15], 5, FINISH["length"]), block=8)
    assert [step.ids for step in steps] == [(11,), (12, 13, 14), (15,)]
    assert [step.drafted for step in steps] == [0, 8, 8]
    assert [step.accepted for step in steps] == [0, 2, 0]
    assert [step.time_s for step in steps] == [2.0, 3.0, 4.0]
    assert [step.finish for step in steps] == [None, None, FinishReason.LENGTH]
    assert (steps[0].cached, steps[0].prefilled, steps[0].prefill_s) == (4, 3, 1.0)
    assert [(step.cached, step.prefilled, step.prefill_s) for step in steps[1:]] == [(0, 0, 0.0)] * 2


def test_without_drafts_each_token_is_a_step() -> None:
    steps = read(chunk([11], 1), chunk([12, 13], 3, FINISH["eos"]))
    assert [step.ids for step in steps] == [(11,), (12,), (13,)]
    assert all(step.drafted == step.accepted == 0 for step in steps)
    assert [step.finish for step in steps] == [None, None, FinishReason.EOS]


def test_joined_chunks_are_cut_into_the_fewest_steps_that_they_can_be() -> None:
    steps = read(chunk([1, 2, 3, 4, 5, 6, 7, 8], 8, FINISH["length"]), block=3)
    assert [step.ids for step in steps] == [(1,), (2, 3, 4, 5), (6, 7, 8)]
    assert [step.drafted for step in steps] == [0, 3, 3]
    assert all(step.accepted <= step.drafted for step in steps)
    assert [step.finish for step in steps] == [None, None, FinishReason.LENGTH]
    assert sum(step.prefilled for step in steps) == 3


def test_an_end_without_ids_is_a_step_and_nothing_else_without_ids_is() -> None:
    steps = read(chunk([11], 1), chunk([], 1), chunk([], 1, FINISH["cancelled"]), block=2)
    assert [(step.ids, step.finish) for step in steps] == [((11,), None), ((), FinishReason.CANCELLED)]


def test_a_request_that_was_ended_before_it_ran_again_repeats_its_last_id() -> None:
    waiting = {"type": "abort", "message": "Abort in waiting queue"}
    aborted = {"output_ids": [12], "meta_info": {"id": "6f1c", "finish_reason": waiting, "completion_tokens": 2}}
    steps = read(chunk([11], 1), chunk([12], 2), aborted)
    assert [step.ids for step in steps] == [(11,), (12,), ()]
    assert steps[-1].finish is FinishReason.CANCELLED
    never_ran = {"output_ids": [], "meta_info": {"id": "6f1c", "finish_reason": waiting, "completion_tokens": 0}}
    assert [step.finish for step in read(never_ran)] == [FinishReason.CANCELLED]


@pytest.mark.parametrize("ids", [[], [12], [12, 13, 14]])
def test_ids_that_do_not_fit_the_count_are_an_error(ids: list[int]) -> None:
    with pytest.raises(EngineError, match="SGLang counts 3 tokens"):
        read(chunk([11], 1), chunk(ids, 3))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("eos", FinishReason.EOS), ("length", FinishReason.LENGTH), ("cancelled", FinishReason.CANCELLED)],
)
def test_reasons(name: str, reason: FinishReason) -> None:
    assert finish_of(FINISH[name]) is reason
    assert finish_of(None) is None


def test_failures_are_told_by_kind() -> None:
    with pytest.raises(NonFinite):
        finish_of(FINISH["nan"])
    with pytest.raises(OutOfMemory):
        finish_of(FINISH["failed"])
    with pytest.raises(UsageError, match="too long"):
        finish_of({"type": "abort", "message": "too long", "status_code": 400, "err_type": "BadRequestError"})
    with pytest.raises(EngineError, match="went wrong"):
        finish_of({"type": "abort", "message": "went wrong", "status_code": 500, "err_type": None})


def test_sampling_in_sglangs_words() -> None:
    greedy = sampling_params(TokenRequest((1,), max_tokens=9, stop_ids=frozenset({7, 3})), room=100)
    assert greedy["temperature"] == 0
    assert (greedy["max_new_tokens"], greedy["ignore_eos"], greedy["stop_token_ids"]) == (9, False, [3, 7])
    assert (greedy["top_k"], greedy["top_p"]) == (-1, 1.0)
    sampled = sampling_params(TokenRequest((1,), SamplingParams(0.7, 20, 0.9, 5), max_tokens=9), room=4)
    assert (sampled["temperature"], sampled["top_k"], sampled["top_p"], sampled["sampling_seed"]) == (0.7, 20, 0.9, 5)
    assert (sampled["max_new_tokens"], sampled["ignore_eos"]) == (4, True)
    assert "stop_token_ids" not in sampled
    narrow = sampling_params(TokenRequest((1,), SamplingParams(0.7, 20, 0.0)), room=4)
    assert (narrow["top_k"], narrow["top_p"]) == (1, 1.0)  # SGLang refuses a nucleus of nothing: the best token
    assert {*greedy, *sampled} <= set(FACTS["sampling"])
