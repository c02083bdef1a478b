"""Speculation on the command line: flags have effects, figures agree, the text stays, and the check finds a lie."""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_checkpoint, write_draft
from ling_local import paths
from ling_local.bench import TEXTS, bundled
from program import Program, Result

Write = Callable[..., Path]
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
TURN = [["a", "b", "c"], ["d", "e"], "f", ["g", "h", "i", "j"]]
LOOP = {"steps": TURN, "loop": True}
NUM_PROMPTS = sum(len(bundled(task)) for task in TEXTS)
LYING = Path(__file__).parents[1] / "lying.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with both drafters and the demo's tokenizer."""
    made = write_checkpoint(tmp_path_factory.mktemp("models") / "small", vocab_size=4096)
    write_draft(made / "dspark", made, block_size=2)
    for name in TEXT_FILES:
        shutil.copy(paths.demo_dir() / name, made)
    return made


@pytest.fixture
def native(ling: Program, folder: Path) -> Callable[..., Result]:
    def run(command: str, *args: str, **more: Any) -> Result:
        return ling(command, "-m", folder, *args, env={"OMP_NUM_THREADS": "1", **more.pop("env", {})}, **more)

    return run


@pytest.fixture
def scripted(ling: Program, write_script: Write) -> Callable[..., Result]:
    """Run a command on a script of one turn."""

    def run(command: str, *args: str, turn: Any = LOOP, **more: Any) -> Result:
        fields = {name: more.pop(name) for name in ("block", "context") if name in more}
        script = write_script(turn, clock="virtual", **fields)
        return ling(command, "--engine", "scripted", "-m", script, *args, **more)

    return run


def assert_figures_agree(figures: dict[str, Any], tokens: int) -> None:
    assert figures["steps"] + figures["accepted"] == tokens
    assert 1 + sum(figures["rate_by_position"]) == pytest.approx(figures["accept_length"])
    assert figures["accept_length"] == pytest.approx(tokens / figures["steps"])
    product = 1.0
    for marginal, conditional in zip(figures["rate_by_position"], figures["rate_given_previous"], strict=True):
        product *= conditional
        assert marginal == pytest.approx(product)


def test_each_drafter_and_block_gives_the_same_text(native) -> None:
    asked = ("-p", "def f(x):", "-n", "24", "--until", "eof", "-t", "1", "--seed", "4", "--json")
    ways = {
        ("off", 0): ("--speculation", "off"),
        ("dspark", 2): (),
        ("dspark", 1): ("--speculation", "dspark", "--block", "1"),
        ("mtp", 1): ("--speculation", "mtp"),
    }
    documents = {way: native("complete", *asked, *flags).json for way, flags in ways.items()}
    assert {(d["model"]["drafter"], d["model"]["block"]) for d in documents.values()} == set(ways)
    assert len({document["text"] for document in documents.values()}) == 1
    for (drafter, _), document in documents.items():
        assert (document["stats"]["drafted"] > 0) == (drafter != "off")
        assert_figures_agree(document["stats"], document["usage"]["completion_tokens"])


def test_chat_says_its_drafter_and_a_variable_chooses_it(native, scripted) -> None:
    env = {"LING_SPECULATION": "mtp", "LING_BLOCK": "5"}
    event = native("chat", "-p", "hello", "-n", "12", "--json", "--no-think", env=env).events[-1]
    assert (event["model"]["drafter"], event["model"]["block"]) == ("mtp", 5)
    assert_figures_agree(event["stats"], event["usage"]["completion_tokens"])
    flags = ("-p", "hello", "-n", "4", "--json", "--speculation", "off", "--block", "2")
    event = scripted("chat", *flags, block=3).events[-1]
    assert (event["model"]["drafter"], event["model"]["block"], event["stats"]["drafted"]) == ("off", 0, 0)


@pytest.mark.parametrize(
    ("command", "flags", "reason"),
    [
        ("complete", ("-p", "x", "--block", "3"), "trained on blocks of 2"),
        ("chat", ("-p", "x", "--speculation", "mtp", "--block", "9"), "at most 8"),
        ("bench", ("--modes", "off,mtp", "--block", "9"), "at most 8"),
    ],
)
def test_too_large_a_block_is_refused_with_the_engines_reason(native, command: str, flags: tuple, reason: str) -> None:
    done = native(command, *flags)
    assert (done.code, done.out) == (2, b"")
    assert reason in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("complete", "-p", "x", "--speculation", "dsprak"), "Did you mean 'dspark'?"),
        (("complete", "-p", "x", "--block", "0"), "--block: 0 is out of range: must be at least 1"),
        (("bench", "--modes", "off,dspakr"), "no such mode 'dspakr'. Did you mean 'dspark'?"),
        (("bench", "--modes", "off", "--speculation", "mtp"), "both --modes and --speculation"),
        (("bench", "--check", "--modes", "off"), "only off is asked for"),
        (("bench", "--check", "--block", "2", "--check-blocks", "all"), "both --block and --check-blocks"),
        (("bench", "--check-blocks", "all"), "--check-blocks is for --check"),
    ],
)
def test_flags_that_make_no_sense_are_exit_2(ling: Program, args: tuple[str, ...], words: str) -> None:
    done = ling(*args)
    assert (done.code, done.out) == (2, b"")
    assert words in done.err


def test_a_drafter_that_the_engine_lacks_is_refused_and_a_useless_block_is_said(scripted) -> None:
    done = scripted("complete", "-p", "x", "--speculation", "dspark", turn=TURN)
    assert (done.code, done.out) == (2, b"")
    assert "--speculation dspark: script has no drafter" in done.err
    done = scripted("complete", "-p", "x", "--speculation", "mtp", turn=TURN, block=3)
    assert (done.code, "script drafts with dspark" in done.err) == (2, True)
    done = scripted("chat", "-p", "x", "--no-think", "--block", "4", turn=TURN, block=3)
    assert (done.code, "Give 1 to 3." in done.err) == (2, True)
    done = scripted("complete", "-p", "x", "--block", "4", turn=TURN)
    assert (done.code, done.out) == (0, b"abcdefghij")
    assert done.err == "ling: warning: --block 4 has no effect: script has no drafter\n"


def test_the_stats_line_tells_what_drafts_brought(scripted) -> None:
    done = scripted("complete", "-p", "x", "-n", "10", "--stats", block=3)
    assert "accept 2.50 (4 steps, 12 drafted, 6 accepted: 75 50 25 %)" in done.err
    done = scripted("complete", "-p", "x", "-n", "10", "--stats", "--speculation", "off", block=3)
    assert "accept" not in done.err
    assert done.out == b"abcdefghij"


def test_config_shows_speculation(ling: Program) -> None:
    done = ling("config", env={"LING_SPECULATION": "mtp", "LING_ENGINE": "scripted"})
    lines = {line.split()[0]: line.split() for line in done.text.splitlines()}
    assert lines["speculation"] == ["speculation", "mtp", "LING_SPECULATION"]
    assert lines["block"][-1] == "default"


def test_the_help_topic_explains_figures_and_the_promise(ling: Program) -> None:
    assert "speculation" in ling("help").text
    page = " ".join(ling("help", "speculation").text.split())
    for words in ("accept length", "for every seed", "block + 1", "N + 1", "rate by position"):
        assert words in page


def test_bench_measures_without_and_with_the_drafter_there_is(scripted) -> None:
    done = scripted("bench", "--tokens", "10", "-r", "2", "--json", block=3)
    assert done.code == 0
    assert [report["model"]["drafter"] for report in done.json["reports"]] == ["off", "dspark"]
    off, dspark = (report["speculation"] for report in done.json["reports"])
    assert (off["accept_length"], dspark["accept_length"]) == (1, 2.5)
    assert_figures_agree(off, 20)
    assert_figures_agree(dspark, 20)
    assert "ling: dspark, run 2/2" in done.err.splitlines()


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        (("--speculation", "dspark"), {}),
        (("--modes", "dspark"), {}),
        (("--modes", "auto,dspark"), {}),
        ((), {"LING_SPECULATION": "dspark"}),
    ],
)
def test_one_mode_is_one_report(scripted, flags: tuple[str, ...], env: dict[str, str]) -> None:
    document = scripted("bench", "--tokens", "10", "-r", "2", "--json", *flags, block=3, env=env).json
    assert document["model"]["drafter"] == "dspark"
    assert document["speculation"]["drafted"] == 24
    text = scripted("bench", "--tokens", "10", "-r", "2", *flags, block=3, env=env).text
    rows = {line[:22].strip(): line[22:].split() for line in text.splitlines()}
    assert ["dspark/3"] in [line.split() for line in text.splitlines()]
    assert (rows["accept length"], rows["steps"], rows["drafted"], rows["accepted"]) == (
        ["2.50"],
        ["8"],
        ["24"],
        ["12"],
    )
    assert [rows[f"position {number} %"] for number in (1, 2, 3)] == [["75.0"], ["50.0"], ["25.0"]]
    assert "; modes" not in text


def test_bench_puts_modes_side_by_side(native) -> None:
    flags = ("--modes", "off,mtp,dspark", "--tokens", "12", "-r", "1", "--warmup", "0", "--prompt-tokens", "20")
    done = native("bench", *flags, "--full-width")  # else steps without drafts, where they are faster at the moment
    assert done.code == 0
    lines = done.text.splitlines()
    assert next(line.split() for line in lines if "mtp/1" in line and ":" not in line) == ["off", "mtp/1", "dspark/2"]
    rows = {line[:22].strip(): line[22:].split() for line in lines}
    assert rows["drafted"][0] == "0"
    assert all(int(count) > 0 for count in rows["drafted"][1:])
    assert [int(a) + int(b) for a, b in zip(rows["steps"], rows["accepted"], strict=True)] == [12, 12, 12]


def test_bench_compares_modes_in_every_format(scripted) -> None:
    flags = ("--modes", "off,dspark", "--tokens", "10", "-r", "2", "--quiet")
    table = scripted("bench", *flags, block=3).text
    rows = {line[:22].strip(): line[22:].split() for line in table.splitlines()}
    assert (rows["accept length"], rows["position 1 %"]) == (["1.00", "2.50"], ["-", "75.0"])
    lines = scripted("bench", *flags, "--md", block=3).text.splitlines()
    assert "| accept length | 1.00 | 2.50 |" in lines
    records = list(csv.DictReader(io.StringIO(scripted("bench", *flags, "--csv", block=3).text)))
    assert [(r["drafter"], r["block"], r["accepted"]) for r in records] == [
        *[("off", "0", "0")] * 2,
        *[("dspark", "3", "6")] * 2,
    ]


def test_auto_without_a_drafter_is_said_and_measured_plain(scripted) -> None:
    done = scripted("bench", "--modes", "off,auto", "--tokens", "4", "-r", "2", "--json")
    assert done.json["model"]["drafter"] == "off"
    assert "has no drafter: auto is off" in done.err
    done = scripted("bench", "--check")
    assert (done.code, done.out, "has no drafter to check" in done.err) == (2, b"", True)


def test_check_passes_on_a_real_model_with_both_drafters(native) -> None:
    done = native("bench", "--check", "--modes", "mtp,dspark", "--tokens", "10", "--prompt-tokens", "12", "--json")
    assert done.code == 0
    document = done.json
    assert document["same"] is True
    assert len(document["rows"]) == 2 * 2 * NUM_PROMPTS
    assert {(row["drafter"], row["block"]) for row in document["rows"]} == {("mtp", 1), ("dspark", 2)}
    assert {row["sampling"] for row in document["rows"]} == {"greedy", "sampled"}
    for row in document["rows"]:
        assert (row["tokens"], row["same"], row["first_difference"]) == (10, True, None)
        assert row["seconds"] > 0
        assert row["seconds_off"] > 0
        assert_figures_agree(row["speculation"], 10)
    for drafter in ("mtp", "dspark"):
        assert sum(row["speculation"]["drafted"] for row in document["rows"] if row["drafter"] == drafter) > 0
    assert done.err.splitlines()[0] == f"ling: check off: {2 * NUM_PROMPTS} runs of 10 tokens"


def test_check_tries_every_block_size(native) -> None:
    flags = ("--check-blocks", "all", "--modes", "off,dspark", "--task", "chat", "--prompt-tokens", "8")
    done = native("bench", "--check", "--tokens", "8", *flags, "--csv")
    assert done.code == 0
    rows = list(csv.DictReader(io.StringIO(done.text)))
    assert list(dict.fromkeys((row["drafter"], row["block"]) for row in rows)) == [("dspark", "1"), ("dspark", "2")]
    assert {row["same"] for row in rows} == {"True"}


def test_full_width_verifies_every_draft_whatever_it_costs(native) -> None:
    flags = ("--task", "chat", "--prompt-tokens", "8", "--speculation", "dspark", "--full-width", "--json")
    document = native("bench", "--tokens", "24", "-r", "1", "--warmup", "0", *flags).json
    assert document["run"]["full_width"] is True
    figures = document["speculation"]
    assert 2 * (figures["steps"] - 3) <= figures["drafted"] <= 2 * figures["steps"]
    document = native("bench", "--check", "--tokens", "24", *flags).json
    assert (document["same"], document["warnings"]) == (True, [])
    for row in document["rows"]:
        assert row["speculation"]["drafted"] >= 2 * (row["speculation"]["steps"] - 3)


def lying(ling: Program, script: Path, *args: str, position: int = 7) -> Result:
    command = [sys.executable, LYING, str(position), "bench", "--check", "--engine", "scripted", "-m", script, *args]
    done = subprocess.run(command, capture_output=True, env=ling.environment(), timeout=60)
    return Result(done.returncode, done.stdout, done.stderr.decode())


def test_check_fails_and_names_the_place_where_ids_differ(ling: Program, write_script: Write) -> None:
    script = write_script(LOOP, block=3, clock="virtual")
    done = lying(ling, script, "--tokens", "20", "--seed", "3", "-t", "0.6")
    assert done.code == 1
    named = [line for line in done.err.splitlines() if "position" in line]
    assert len(named) == NUM_PROMPTS
    right = ord("abcdefghij"[7])
    assert named[0] == (
        f"ling: prompt code (sampled), dspark with block 3: position 7 is id {right + 1} with drafts, "
        f"id {right} without"
    )
    assert f"{NUM_PROMPTS} of {2 * NUM_PROMPTS} runs differ" in done.text
    assert done.text.count("differs") == NUM_PROMPTS
    assert "temperature 0.6" in done.text
    assert "seconds, prefill included" in done.text


@pytest.mark.parametrize("flag", ["--json", "--csv", "--md"])
def test_a_failed_check_is_exit_1_in_every_format(ling: Program, write_script: Write, flag: str) -> None:
    script = write_script(LOOP, block=3, clock="virtual")
    done = lying(ling, script, "--task", "prose", "--tokens", "8", flag, position=0)
    assert done.code == 1
    assert lying(ling, script, "--task", "prose", "--tokens", "8", flag, position=8).code == 0
    if flag == "--json":
        assert done.json["same"] is False
        difference = next(row["first_difference"] for row in done.json["rows"] if not row["same"])
        assert difference == {"position": 0, "with_drafts": ord("b"), "without": ord("a")}
    elif flag == "--csv":
        rows = list(csv.DictReader(io.StringIO(done.text)))
        assert {row["difference_position"] for row in rows if row["same"] == "False"} == {"0"}
    else:
        assert "differs |" in done.text
