"""The benchmark's data over scripted tokens: exact counts, no reuse, figures that agree, nulls where undefined."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_local.bench import (
    RANDOM_OUT,
    TASKS,
    BenchPlan,
    BenchProgress,
    BenchReport,
    Lane,
    modes_to_json,
    run_bench,
    run_lanes,
    summarise,
    to_json,
)
from ling_local.bench.conditions import Conditions
from ling_local.bench.figures import check_counts
from ling_local.engine.protocol import EngineSpec
from ling_local.engine.script import read_script
from ling_local.engine.scripted import ScriptedEngine
from ling_local.errors import ContextTooLong, UsageError
from ling_local.generate import TextModel
from ling_local.types import Message, Request, SamplingParams, Stats, TokenRequest

Write = Callable[..., Path]
BLOCKS = {"steps": [{"tokens": ["a", "b", "c", "d"], "delay_ms": 20}], "loop": True, "prefill_ms": 50}


class Still:
    """A machine on which nothing else goes on, or what a test says."""

    def __init__(self, **facts: Any) -> None:
        self._facts = facts

    def __call__(self, gpus: Sequence[str]) -> Still:
        return self

    def end(self) -> Conditions:
        return Conditions(2, **self._facts)


def bench(path: Path, on_progress: Any = None, still: Any = None, **plan: Any) -> BenchReport:
    spec = EngineSpec(str(path), "scripted")
    engine, text_model = ScriptedEngine.load(spec), TextModel.load(spec)
    return run_bench(engine, text_model, BenchPlan(**plan), on_progress, still or Still())


def test_figures_of_a_known_run(write_script: Write) -> None:
    """C089, C091: each figure once by hand, and the document is plain JSON."""
    report = bench(write_script(BLOCKS, block=5, clock="virtual"), tokens=40, repetitions=6)
    document = json.loads(json.dumps(to_json(report), allow_nan=False))
    assert document["schema"] == 1
    assert document["decode"]["tpot_ms"]["mean"] == pytest.approx(5)
    assert document["decode"]["tpot_ms"]["p99"] == pytest.approx(5)
    assert document["decode"]["step_ms"]["median"] == pytest.approx(20)
    assert document["decode"]["tok_s"] == pytest.approx(200)
    assert document["ttft_ms"]["mean"] == pytest.approx(70, abs=30)
    speculation = document["speculation"]
    assert (speculation["steps"], speculation["drafted"], speculation["accepted"]) == (60, 300, 180)
    assert speculation["accept_length"] == 4
    assert speculation["rate"] == pytest.approx(0.6)
    assert speculation["rate_by_position"] == speculation["rate_given_previous"] == [1, 1, 1]
    assert [sample["tokens"] for sample in document["samples"]] == [40] * 6
    assert document["run"]["tokens"] == 40
    assert document["run"]["repetitions"] == 6
    assert document["run"]["task"] == "code"
    assert document["machine"]["cpus"] >= 1
    assert document["machine"]["torch"] is None
    assert document["warnings"] == []
    assert document["trust"]["believe"] is True
    assert document["speculation"]["accept_histogram"] == [0, 0, 0, 60]
    assert document["ling"].startswith("0.1.0")


def test_five_repetitions_are_the_default(write_script: Write) -> None:
    assert len(bench(write_script(BLOCKS, clock="virtual"), tokens=8).samples) == 5


@pytest.mark.parametrize("tokens", [1, 2, 7, 37])
def test_every_repetition_makes_exactly_the_tokens_asked_for(write_script: Write, tokens: int) -> None:
    """The end of turn is ignored: a script that says it at once goes on all the same."""
    path = write_script([{"control": "<|role_end|>"}, ["a", "b"]], clock="virtual", block=3)
    report = bench(path, tokens=tokens)
    assert [sample.stats.tokens for sample in report.samples] == [tokens] * 5
    assert report.exact


def test_a_context_that_is_too_small_is_said(write_script: Write) -> None:
    report = bench(write_script(BLOCKS, clock="virtual", context=2100), tokens=5000, repetitions=2)
    assert not report.exact
    assert not to_json(report)["run"]["exact"]
    made = {str(sample.stats.tokens) for sample in report.samples}
    assert any("5000" in warning and "2100" in warning for warning in report.warnings)
    assert any(number in report.warnings[0] for number in made)


def test_a_prompt_that_cannot_fit_is_refused(write_script: Write) -> None:
    with pytest.raises(ContextTooLong):
        bench(write_script(BLOCKS, context=100), prompt_tokens=100)
    with pytest.raises(ContextTooLong):
        bench(write_script(BLOCKS, context=100))


@pytest.mark.parametrize("task", TASKS)
def test_no_repetition_uses_what_another_one_left(write_script: Write, task: str) -> None:
    """C097: also for chat, where every prompt begins with the same role."""
    report = bench(
        write_script(BLOCKS, clock="virtual"), tokens=4, repetitions=30, task=task, warmup=2, prompt_tokens=400
    )
    assert [sample.stats.cached_tokens for sample in report.samples] == [0] * 30
    assert to_json(report)["prefill"]["cached_tokens"] == 0
    assert not any("state" in warning for warning in report.warnings)


def test_reuse_is_said_if_it_happens(write_script: Write) -> None:
    spec = EngineSpec(str(write_script(BLOCKS, clock="virtual")), "scripted")

    class Reusing(ScriptedEngine):
        """Finds three tokens of every prompt, as an engine with a cache of its own may."""

        def generate(self, request: TokenRequest) -> Any:
            self._state = list(request.ids[:3])
            return super().generate(request)

    engine = Reusing(read_script(Path(spec.model)))
    report = run_bench(engine, TextModel.load(spec), BenchPlan(tokens=2, repetitions=4))
    assert to_json(report)["prefill"]["cached_tokens"] == 12
    assert any("12" in warning for warning in report.warnings)


def test_one_token_and_one_repetition_leave_nulls(write_script: Write) -> None:
    """C103."""
    report = bench(write_script(BLOCKS, clock="virtual"), tokens=1, repetitions=1)
    document = to_json(report)
    assert document["decode"]["tpot_ms"] == dict.fromkeys(("mean", "sd", "median", "p99", "min", "max"))
    assert document["decode"]["tok_s"] is None
    assert document["ttft_ms"]["sd"] is None
    assert document["ttft_ms"]["mean"] > 0
    assert document["samples"][0]["tpot_ms"] is None
    assert len(document["warnings"]) == 2
    assert document["answer"]["seconds"] is None
    assert document["trust"] == {"believe": False, "spread": None, "load_1m": None, "others_cpus": None, "stolen": None}
    json.dumps(document, allow_nan=False)


def test_without_drafts_nothing_is_speculated(write_script: Write) -> None:
    report = bench(write_script(BLOCKS, block=3, clock="virtual"), tokens=8, draft=False)
    speculation = to_json(report)["speculation"]
    assert speculation["accept_length"] == 1
    assert speculation["rate"] is None
    assert speculation["rate_by_position"] == []
    assert to_json(report)["model"]["drafter"] == "off"


def test_rates_by_position_are_of_all_steps_and_given_the_one_before(write_script: Write) -> None:
    """Ten tokens as 3 + 2 + 1 + 4 with drafts of two rounds: by hand."""
    turn = {"steps": [["a", "b", "c"], ["d", "e"], "f", ["g", "h", "i", "j"]], "loop": True}
    report = bench(write_script(turn, block=3, clock="virtual"), tokens=10, repetitions=3)
    speculation = to_json(report)["speculation"]
    assert (speculation["steps"], speculation["accepted"], speculation["accept_length"]) == (12, 18, 2.5)
    assert speculation["rate_by_position"] == [0.75, 0.5, 0.25]
    assert speculation["rate_given_previous"] == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert report.total.tokens == 30


@pytest.mark.parametrize(
    "stats",
    [
        Stats(tokens=10, steps=5, drafted=9, accepted=4, accepted_by_position=(4,)),
        Stats(tokens=10, steps=5, drafted=9, accepted=5, accepted_by_position=(2, 3)),
        Stats(tokens=10, steps=5, drafted=4, accepted=5, accepted_by_position=(5,)),
        Stats(tokens=12, steps=5, drafted=9, accepted=7, accepted_by_position=(6, 1)),
        Stats(tokens=10, steps=5, drafted=9, accepted=5, accepted_by_position=(3, 1)),
    ],
    ids=["a token too many", "a later position more often", "more accepted than drafted", "more than steps", "sum"],
)
def test_counts_that_do_not_fit_are_caught(stats: Stats) -> None:
    with pytest.raises(AssertionError):
        check_counts(stats)


def test_lanes_take_turns_on_the_same_prompts(write_script: Write) -> None:
    path = write_script(BLOCKS, block=5, clock="virtual")
    spec = EngineSpec(str(path), "scripted")
    asked: list[tuple[str, tuple[int, ...]]] = []

    class Watched(ScriptedEngine):
        name = ""

        def generate(self, request: TokenRequest) -> Any:
            asked.append((self.name, request.ids))
            return super().generate(request)

    lanes = []
    for name in ("off", "dspark"):
        engine = Watched(read_script(path))
        engine.name = name
        lanes.append(Lane(name, engine, BenchPlan(tokens=8, repetitions=3, draft=name != "off")))
    reports = run_lanes(lanes, TextModel.load(spec))
    assert [name for name, _ in asked] == ["dspark", "off", "off", "dspark", "dspark", "off", "off", "dspark"]
    for (_, one), (_, other) in zip(asked[::2], asked[1::2], strict=True):
        assert one == other
    document = modes_to_json(reports, "interleaved")
    assert (document["schema"], document["order"]) == (1, "interleaved")
    models = [(d["model"]["drafter"], d["model"]["block"]) for d in document["reports"]]
    assert models == [("off", 0), ("dspark", 5)]
    assert [d["speculation"]["accept_length"] for d in document["reports"]] == [1, 4]


def test_progress_names_warm_up_and_repetition(write_script: Write) -> None:
    seen: list[BenchProgress] = []
    bench(write_script(BLOCKS, clock="virtual"), seen.append, tokens=8, repetitions=2, warmup=1)
    starts = [(p.stage, p.repetition, p.repetitions) for p in seen if p.tokens == 0]
    assert starts == [("warm-up", 1, 1), ("run", 1, 2), ("run", 2, 2)]
    assert all(p.tokens <= p.tokens_wanted == 8 for p in seen)
    shares = [p.share for p in seen]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)


def test_the_timed_prompt_is_not_that_of_the_warm_up(write_script: Write) -> None:
    path = write_script(BLOCKS, clock="virtual")
    spec = EngineSpec(str(path), "scripted")
    asked: list[tuple[int, ...]] = []

    class Watched(ScriptedEngine):
        def generate(self, request: TokenRequest) -> Any:
            asked.append(request.ids)
            return super().generate(request)

    watched = Watched(read_script(path))
    run_bench(watched, TextModel.load(spec), BenchPlan(tokens=2, repetitions=4, warmup=2))
    assert len({ids[0] for ids in asked}) == 6
    assert len({ids[-20:] for ids in asked}) == 1


@pytest.mark.parametrize("wanted", [40, 700, 3000])
def test_prompt_length_can_be_asked_for(write_script: Write, wanted: int) -> None:
    report = bench(write_script(BLOCKS, clock="virtual"), tokens=2, prompt_tokens=wanted, repetitions=3)
    assert {sample.stats.prompt_tokens for sample in report.samples} == {wanted}


@pytest.mark.parametrize(
    "plan", [{"task": "poem"}, {"tokens": 0}, {"repetitions": 0}, {"warmup": -1}, {"prompt_tokens": -5}]
)
def test_a_plan_that_cannot_be_is_a_usage_error(write_script: Write, plan: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        bench(write_script(BLOCKS), **plan)


def test_random_is_the_records_protocol_and_no_two_requests_are_alike(write_script: Write) -> None:
    """Exactly 8,192 tokens in, 1,024 out; texts that are repeated, from another place each time."""
    path = write_script(BLOCKS, clock="virtual", context=16_000)
    spec = EngineSpec(str(path), "scripted")
    asked: list[tuple[int, ...]] = []

    class Watched(ScriptedEngine):
        def generate(self, request: TokenRequest) -> Any:
            asked.append(request.ids)
            return super().generate(request)

    plan = BenchPlan(task="random", tokens=RANDOM_OUT, prompt_tokens=8192, repetitions=3, may_shorten=True)
    report = run_bench(Watched(read_script(path)), TextModel.load(spec), plan, watch=Still())
    assert {(s.stats.prompt_tokens, s.stats.tokens) for s in report.samples} == {(8192, 1024)}
    assert report.marks == ()
    prompts = [ids for ids in asked if len(ids) > 1]
    assert len(set(prompts)) == len(prompts) == 4
    assert report.total.cached_tokens == 0
    again = run_bench(Watched(read_script(path)), TextModel.load(spec), plan, watch=Still())
    assert [ids for ids in asked if len(ids) > 1][4:] == prompts
    assert again.total.tokens == 3 * 1024


def test_random_is_cut_to_a_small_context_and_every_report_says_so(write_script: Write) -> None:
    path = write_script(BLOCKS, clock="virtual", context=3000)
    plan = {"task": "random", "tokens": 1024, "prompt_tokens": 8192, "repetitions": 2}
    report = bench(path, may_shorten=True, **plan)
    assert report.exact
    assert report.samples[0].stats.prompt_tokens == 1976
    assert to_json(report)["marks"] == [
        "NOT THE RECORD'S LENGTHS: 1,976 tokens in, 1,024 out, as the context holds 3,000"
    ]
    with pytest.raises(ContextTooLong, match="8192 tokens long; the context holds 3000"):
        bench(path, **plan)
    with pytest.raises(ContextTooLong):
        bench(write_script(BLOCKS, context=1024), may_shorten=True, **plan)


def test_a_long_answer_is_measured_or_reckoned(write_script: Write) -> None:
    """5 ms a token: 25 s and the first token's time; measured where 5,000 tokens were really made."""
    path = write_script(BLOCKS, clock="virtual")
    document = to_json(bench(path, tokens=40, repetitions=2))["answer"]
    assert (document["measured"], document["seconds"]) == (False, pytest.approx(25, abs=0.3))
    assert [(row["name"], row["seconds"]) for row in document["record"]["rows"]] == [
        ("plain", 16.6),
        ("NEXTN", 7.7),
        ("DSpark", 3.9),
    ]
    assert all(row["seconds"] == pytest.approx(5 * row["tpot_ms"], abs=0.06) for row in document["record"]["rows"])
    assert "four Blackwell GPUs" in document["record"]["machine"]
    made = bench(write_script(BLOCKS, clock="virtual", context=9000), tokens=5000, repetitions=1)
    answer = to_json(made)["answer"]
    assert (answer["measured"], answer["seconds"]) == (True, made.samples[0].stats.wall_s)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"others_cpus": 0.9}, "other processes kept 0.9 of 2 CPUs busy"),
        ({"stolen": 0.2}, "the hypervisor took 20 % of the CPU time"),
        ({"gpu": {"throttled": ["its heat"], "memory_mib": None}}, "the GPU was slowed down by its heat"),
    ],
)
def test_what_else_went_on_is_a_reason_to_doubt(write_script: Write, facts: dict[str, Any], words: str) -> None:
    if "gpu" in facts:
        facts = {"gpu": {"driver": "1", "power_w": 700.0, **facts["gpu"]}}
    document = to_json(bench(write_script(BLOCKS, clock="virtual"), tokens=40, still=Still(**facts)))
    assert any(words in warning for warning in document["warnings"])
    assert document["trust"]["believe"] is False


@pytest.mark.parametrize(
    ("delays", "words"),
    [
        ([5, 5, 5, 5, 5, 9], "repetitions differ much"),
        ([9, 9, 5, 5, 5, 5], "the first repetition was slower than all others"),
        ([9, 5, 5, 5, 6, 6], "later repetitions were slower"),
    ],
)
def test_a_spread_and_a_trend_are_said(write_script: Write, delays: list[int], words: str) -> None:
    """Six turns of known speed; the first is the warm-up, so a slow second turn is a slow first repetition."""
    turns = [{"steps": [{"tokens": ["a"], "delay_ms": delay}], "loop": True} for delay in delays]
    report = bench(write_script(*turns, clock="virtual"), tokens=20)
    assert any(words in warning for warning in report.warnings), report.warnings


def test_a_steady_run_is_not_doubted(write_script: Write) -> None:
    turns = [{"steps": [{"tokens": ["a"], "delay_ms": delay}], "loop": True} for delay in (9, 5, 5.05, 5, 5.02, 5)]
    assert bench(write_script(*turns, clock="virtual"), tokens=20).warnings == ()


def test_sampling_is_in_the_report(write_script: Write) -> None:
    sampling = SamplingParams(0.6, 20, 0.95, 7)
    run = to_json(bench(write_script(BLOCKS, clock="virtual"), tokens=2, sampling=sampling))["run"]
    assert (run["temperature"], run["top_k"], run["top_p"], run["seed"]) == (0.6, 20, 0.95, 7)


@given(st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=60))
def test_summaries_are_in_order(values: list[float]) -> None:
    summary = summarise(values)
    assert summary is not None
    assert summary.min <= summary.median <= summary.p99 <= summary.max
    assert summary.min <= summary.mean <= summary.max
    assert (summary.sd is None) == (len(values) == 1)


def test_the_standard_deviation_survives_a_large_offset() -> None:
    """One pass over squares would lose it."""
    offset = 1e9
    values = [offset + x for x in (4.0, 7.0, 13.0, 16.0)]
    summary = summarise(values)
    assert summary is not None
    assert summary.sd == pytest.approx(math.sqrt(30))
    assert summary.mean == offset + 10


def test_p99_of_many_values_is_the_99th_percentile() -> None:
    values = [NormalDist(10, 2).inv_cdf((i + 0.5) / 10_000) for i in range(10_000)]
    summary = summarise(values)
    assert summary is not None
    assert summary.p99 == pytest.approx(NormalDist(10, 2).inv_cdf(0.99), rel=1e-3)


def test_no_values_give_no_summary() -> None:
    assert summarise([]) is None


def test_a_chat_that_is_timed_begins_as_every_chat_does(write_script: Write) -> None:
    """C073: the template's beginning, once, and the question as text."""
    path = write_script(BLOCKS, clock="virtual")
    engine, text_model = ScriptedEngine(read_script(path)), TextModel.load(EngineSpec(str(path), "scripted"))
    asked: list[tuple[int, ...]] = []

    class Watched(ScriptedEngine):
        def generate(self, request: TokenRequest) -> Any:
            asked.append(request.ids)
            return super().generate(request)

    run_bench(Watched(read_script(path)), text_model, BenchPlan(task="chat", tokens=2, repetitions=2), watch=Still())
    hello = text_model.encode(Request((Message("user", "hi"),)))
    start = hello[: hello.index(ord("h"))]
    assert engine.info.context_limit > len(start) > 0
    prompts = [ids for ids in asked if len(ids) > 1]
    assert len(prompts) == 3
    assert all(
        list(ids[: len(start)]) == start and list(ids).count(start[0]) == hello.count(start[0]) for ids in prompts
    )
