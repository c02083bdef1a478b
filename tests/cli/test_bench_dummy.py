"""`ling bench` without a model worth the name: dummies, forced accept counts, a table of ops. All marked as such."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from ling_local.cli import bench_dummy, bench_tables
from ling_local.cli.opening import progress_text
from ling_local.engine.protocol import Progress
from ling_local.text.numbered import NumberedTokens
from program import Program

SMALL = ("--dummy", "tiny", "--layers", "1", "--shard", "8", "--ctx", "1024")
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def bench(ling: Program):
    return lambda *args: ling("bench", *args, env=ENV)


def test_a_dummy_runs_the_whole_line_and_every_report_says_so(bench) -> None:
    run = (*SMALL, "--speculation", "dspark", "--tokens", "12", "-r", "1", "--warmup", "0", "--prompt-tokens", "50")
    document = bench(*run, "--accept-pattern", "2,0", "--json").json
    assert document["model"]["id"] == "dummy-tiny"
    assert [mark.split(":")[0] for mark in document["marks"]] == ["DUMMY", "CUT", "SHARD", "FORCED"]
    assert document["run"]["prompt_tokens"] == 50
    assert document["samples"][0]["tokens"] == 12
    assert document["speculation"]["accepted"] > 0
    assert document["decode"]["gpu_step_ms"] is None
    assert document["model"]["state_bytes"] > 0
    for name, form in bench_tables.FORMATS.items():
        text = form([document], "", None)
        assert "DUMMY: random weights" in text, name
        assert "CUT: 1 of 24 layers" in text, name


def test_modes_of_a_dummy_stand_side_by_side(bench) -> None:
    text = bench(*SMALL, "--modes", "off,dspark", "--tokens", "8", "-r", "1", "--warmup", "0").text
    assert text.startswith("[DUMMY: ")
    assert "dspark/7" in text


def test_a_pattern_forces_the_demo_model_too(bench) -> None:
    run = ("--speculation", "dspark", "--tokens", "31", "-r", "1", "--warmup", "0", "--json")
    document = bench(*run, "--accept-pattern", "4,0,8").json
    # one plain step, then 5 + 1 + 9 tokens and again
    assert document["samples"][0]["steps"] == 7
    assert document["speculation"]["accepted"] == 24
    assert document["marks"] == ["FORCED: accept counts 4,0,8 by decree, not by the drafts"]


@pytest.mark.parametrize("modes", ["off,dspark", "dspark,off"])
def test_a_pattern_forces_the_drafts_of_any_mode(bench, modes: str) -> None:
    run = ("--modes", modes, "--tokens", "31", "-r", "1", "--warmup", "0", "--json")
    found = bench(*run, "--accept-pattern", "4,0,8").json["reports"]
    reports = dict(zip(modes.split(","), found, strict=True))
    assert reports["dspark"]["speculation"]["accepted"] == 24
    assert reports["dspark"]["marks"] == ["FORCED: accept counts 4,0,8 by decree, not by the drafts"]
    assert reports["off"]["samples"][0]["steps"] == 31
    assert reports["off"]["marks"] == []


def test_the_breakdown_names_each_op_with_its_floor(bench, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    text = bench(*SMALL, "--breakdown", "--prompt-tokens", "64", "--csv", "--save", saved).text
    document = json.loads(saved.read_text())
    assert document["command"].startswith("ling bench --dummy tiny --layers 1 --shard 8 ")
    rows = list(csv.DictReader(io.StringIO(text)))
    assert rows[-1]["op"] == "all"
    assert all("DUMMY" in row["marks"] for row in rows)
    page = bench_dummy.FORMATS["md"](document)
    assert "| op | calls | launches | MB | us |" in page
    for words in ("dummy-tiny, float32 on CPU", "machine: ", "at: 20", "again: ling bench --dummy tiny", "1 row: "):
        assert f"\n{words}" in page or f": {words}" in page, words
    plain, drafted = document["steps"]
    assert (plain["rows"], plain["drafts"], drafted["rows"], drafted["drafts"]) == (1, 0, 8, 7)
    names = {row["op"] for row in drafted["ops"]}
    assert {"mlp", "kda_commit", "draft_block", "markov_pick", "head 19648 x 1536"} <= names
    assert "draft_context" not in {row["op"] for row in plain["ops"]}
    for step in document["steps"]:
        for row in step["ops"]:
            assert row["microseconds"] > 0
            assert row["floor_us"] == pytest.approx(1e6 * row["bytes"] / document["copy_bandwidth"])
        assert step["total"]["bytes"] == pytest.approx(sum(row["bytes"] for row in step["ops"]))
    head = next(row for row in plain["ops"] if row["op"].startswith("head"))
    assert head["bytes"] == pytest.approx(4 * 19648 * 1536, rel=0.01)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--layers", "2"), "--layers is for --dummy"),
        (("--breakdown",), "--breakdown is for --dummy"),
        (("--dummy", "tiny", "--breakdown", "--modes", "off"), "Give --speculation NAME in place of --modes"),
        (("--dummy", "tiny", "--task", "chat"), "--task chat needs a model that can talk"),
        (("--dummy", "tiny", "-m", "x"), "both --dummy and --model"),
        (("--dummy", "tiny", "--shard", "3"), "a shard of 3 ranks is not possible"),
        (("--accept-pattern", "1,x"), "is not a list of counts"),
        (("--accept-pattern", "9", "--speculation", "dspark"), "dspark makes 8 drafts a step"),
        (("--dtype", "float32", "--device", "cuda"), "the GPU kernels compute in bfloat16, not float32"),
    ],
)
def test_flags_that_do_not_fit_are_refused(bench, args: tuple[str, ...], message: str) -> None:
    done = bench(*args, "--tokens", "4", "-r", "1")
    assert done.code == 2
    assert message in done.err


def test_a_model_that_cannot_fit_is_refused_before_it_is_made(bench) -> None:
    done = bench("--dummy", "flash")
    assert done.code == 1
    assert "dummy-flash: the weights need 46" in done.err
    assert "GiB are free" in done.err


def test_numbered_tokens_come_back_as_they_were() -> None:
    tokens = NumberedTokens(1000)
    ids = [0, 999, 17, 17, 3]
    assert tokens.encode(tokens.decode(ids)) == ids
    assert tokens.encode("some words") == tokens.encode("some  words\n")
    assert max(tokens.encode(" ".join(map(str, range(500))))) < 1000


@pytest.mark.parametrize(
    ("progress", "seconds", "text"),
    [
        (Progress("script", 1, 4), 1, "loading: script [#####...............] 25 %"),
        (Progress("w", 8 * 10**9, 16 * 10**9), 4, "loading: w [##########..........] 50 %, 8.0 of 16.0 GB, 2.0 GB/s"),
        (Progress("k (gemm)", 2, 8, "units"), 9, "loading: k (gemm) [#####...............] 25 %, 2 of 8 units"),
        (Progress("making random weights", 0, 0), 1, "loading: making random weights"),
    ],
)
def test_a_load_is_a_bar(progress: Progress, seconds: float, text: str) -> None:
    assert progress_text(progress, seconds) == text
