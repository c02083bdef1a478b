"""`ling bench`: what a stranger learns from its output, the files it writes and reads, its progress line."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ling_local.bench import BenchProgress, compare
from ling_local.cli.bench import bar, fit_together
from ling_local.cli.bench_files import REPEATED, command_line
from ling_local.cli.bench_tables import FORMATS, warnings
from ling_local.engine.protocol import EngineInfo
from ling_local.settings import TABLE, resolve
from program import Program, Result, command, seen, watch

Write = Callable[..., Path]
TURN = {"steps": [{"tokens": ["a", "b", "c"], "delay_ms": 4}, {"tokens": ["d"], "delay_ms": 2}], "loop": True}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def bench(ling: Program, write_script: Write) -> Callable[..., Result]:
    """`ling bench` on a script with drafts of three."""

    def run(*args: str | Path, **more: Any) -> Result:
        script = write_script(TURN, clock="virtual", block=3, context=4000)
        return ling("bench", "--engine", "scripted", "-m", script, "--tokens", "12", "-r", "2", *args, **more)

    return run


@pytest.mark.parametrize("flag", ["--format=table", "--md"])
def test_the_page_says_what_was_measured_on_what_and_whether_to_believe_it(bench, flag: str) -> None:
    page = bench(flag).text
    for words in (
        r"^ling 0\.1\.0\S*: script, script on script",
        r"^machine: .+, \d+ CPUs, [\d.]+ GiB; \S+; Python 3\.",
        r"^again: ling bench .*--tokens 12 --repetitions 2",
        r"^run: task code, [\d,]+ prompt tokens, exactly 12 tokens x 2, warm-up 1, greedy, seed 0; modes interleaved",
        r"^dspark/3: \d\.\d\d times as fast as off",
        r"^a 5,000-token answer here: off [\d.]+ s, dspark/3 [\d.]+ s \(from 12 tokens: TTFT \+ 4,999 x TPOT\)",
        r"^  elsewhere: plain 16\.6 s, NEXTN 7\.7 s, DSpark 3\.9 s \(SGLang, four Blackwell GPUs, Ling-3\.0-flash",
        r"^believe it\? ",
    ):
        assert re.search(words, page, re.MULTILINE), words


def test_sampling_thinking_and_full_width_are_in_the_run_line(bench) -> None:
    page = bench("-t", "0.6", "--top-k", "20", "--task", "chat", "--no-think", "--full-width", "--speculation", "off")
    line = next(line for line in page.text.splitlines() if line.startswith("run: "))
    assert "sampled at temperature 0.6, top-k 20, top-p 1, seed 0" in line
    assert line.endswith("not thinking, every draft verified")


def test_warnings_stand_in_the_page_and_on_stderr_of_a_pipe(bench) -> None:
    done = bench("--warmup", "0", "--md")
    assert "  - no warm-up: the first figures hold one-time costs" in done.text
    assert "believe it? With care" in done.text
    assert "ling: warning: no warm-up" in done.err
    rows = bench("--warmup", "0", "--csv").text.splitlines()
    assert "no warm-up" in rows[1]


def test_the_command_that_a_report_names_makes_it_again(bench, ling: Program) -> None:
    document = bench("--task", "prose", "-t", "0.5", "--json", "--speculation", "dspark").json
    words = shlex.split(document["command"])
    assert words[:2] == ["ling", "bench"]
    again = ling(*words[1:], "--json").json
    assert again["run"] == document["run"]
    assert again["command"] == document["command"]


def test_a_variable_becomes_a_flag_of_that_command() -> None:
    environ = {"LING_BLOCK": "2", "LING_THINK": "no", "LING_QUIET": "1"}
    line = command_line(resolve({"task": "chat", "full_width": True, "save": "x.json"}, environ))
    assert line == "ling bench --task chat --block 2 --full-width --no-think"
    environ = {"LING_ENGINE": "scripted"}
    assert command_line(resolve({}, environ)) == "ling bench --engine scripted"
    flags = {"engines": "native,sglang", "sglang_arg": ["tp_size=2", "a=b c"], "gpus": "0,1"}
    line = command_line(resolve({"temperature": "0.123456789", "top_p": "1.0"}, {}))
    assert line == "ling bench --temperature 0.123456789 --top-p 1"
    line = command_line(resolve(flags, environ))
    assert line == "ling bench --gpus 0,1 --engine native,sglang --sglang-arg tp_size=2 --sglang-arg 'a=b c'"


def test_engines_are_told_apart_in_comparisons_and_warnings(bench) -> None:
    native = bench("--json", "--modes", "off,dspark").json["reports"]
    for report in native:
        report["model"]["engine"], report["warnings"] = "native", []
    sglang = [{**report, "model": {**report["model"], "engine": "sglang 0.5.23"}} for report in native]
    found = compare([*native, *sglang], native, "x.json")
    assert [mode["mode"] for mode in found["modes"]] == ["native off", "native dspark/3"]
    assert found["only_in_one"] == ["sglang dspark/3", "sglang off"]
    alone = compare(sglang, native, "x.json")
    assert [mode["mode"] for mode in alone["modes"]] == ["off", "dspark/3"]
    assert alone["differs"] == ["engine: native then, sglang 0.5.23 now"]
    assert warnings([*native, {**sglang[0], "warnings": ["hot"]}]) == ["sglang off: hot"]
    assert warnings([native[0], {**native[1], "warnings": ["hot"]}]) == ["dspark: hot"]


def test_a_saved_report_is_what_json_prints_and_can_be_compared_with(bench, tmp_path: Path) -> None:
    file = tmp_path / "before 張.json"
    printed = bench("--save", file, "--json").json
    assert json.loads(file.read_text("utf-8")) == printed
    assert [child.name for child in tmp_path.iterdir() if child.name.endswith(".part")] == []
    page = bench("--compare", file, "--modes", "dspark", "--tokens", "24").text
    assert f"compared with {file}:" in page
    assert "  - not the same: tokens: 12 then, 24 now" in page
    assert "  - only in one of the two: off" in page
    row = next(line for line in page.splitlines() if line.startswith("dspark/3 accept length"))
    assert row.split()[-3:] == ["2.000", "2.000", "1.000"]
    document = bench("--compare", file, "--json").json
    assert [mode["mode"] for mode in document["compared"]["modes"]] == ["off", "dspark/3"]
    for mode in document["compared"]["modes"]:
        for figure in mode["figures"]:
            assert figure["ratio"] == pytest.approx(figure["now"] / figure["then"])
    assert "| dspark/3 tok/s |" in bench("--compare", file, "--md").text
    done = bench("--compare", file, "--csv")
    assert "compared with" in done.err
    assert "compared" not in done.text


def test_a_file_that_cannot_be_used_is_said_before_anything_is_measured(bench, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"schema": 1}')
    hollow = tmp_path / "hollow.json"
    hollow.write_text('{"schema": 1, "samples": [{}], "decode": {}, "model": {}, "machine": {}, "run": {}}')
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\x00")
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    cases = [
        (("--compare", tmp_path / "none.json"), "cannot be read"),
        (("--compare", other), "is not a report of ling bench. Write one with --save FILE."),
        (("--compare", hollow), "is not a report of ling bench"),
        (("--compare", binary), "is not a report of ling bench"),
        (("--compare", tmp_path), "cannot be read"),
        (("--save", tmp_path / "no" / "x.json"), "there is no folder"),
        (("--plot", tmp_path), "is a folder"),
        (("--save", tmp_path / "x", "--plot", tmp_path / "." / "x"), "--save and --plot name the same file"),
    ]
    if os.getuid():  # root may write everywhere
        cases.append((("--save", locked / "x.json"), "may not be written"))
    for args, words in cases:
        done = bench(*args)
        assert (done.code, done.out) == (2, b""), args
        assert words in done.err, args
        assert "warm-up" not in done.err


def test_a_link_and_a_device_stay_what_they_are(bench, tmp_path: Path) -> None:
    file, link = tmp_path / "real.json", tmp_path / "link.json"
    file.write_text("old")
    link.symlink_to(file)
    assert bench("--save", link, "--plot", "/dev/null").code == 0
    assert link.is_symlink()
    assert json.loads(file.read_text("utf-8"))["schema"] == 1
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("more", [(), ("--check", "--task", "prose")])
def test_a_file_that_cannot_be_written_keeps_no_report_from_stdout(bench, more: tuple[str, ...]) -> None:
    """/dev/full is a disk without room."""
    done = bench("--save", "/dev/full", *more)
    assert (done.code, done.err.splitlines()[-1]) == (
        1,
        "ling: /dev/full cannot be written: No space left on device",
    )
    assert "accept length" in done.text
    document = bench("--save", "/dev/full", "--json", *more).json
    assert document["error"]["kind"] == "LingError"
    assert document["reports" if not more else "rows"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_shows_and_saves_its_whole_repetitions(
    ling: Program, write_script: Write, tmp_path: Path, number: int, code: int
) -> None:
    """One warm-up, two repetitions, and a third that never comes to its end."""
    script = write_script(TURN, TURN, TURN, [{"hang": True}], clock="virtual", context=4000)
    args = ("bench", "--engine", "scripted", "-m", script, "--tokens", "12", "--speculation", "off", "-r", "4")
    process = ling.start(*args, "--save", tmp_path / "x.json", command=command())
    while b"run 3/4" not in process.stderr.readline():
        pass
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert out.startswith(b"[STOPPED after 2 of 4 repetitions: interrupted]\n")
    assert b"exactly 12 tokens x 2," in out
    saved = json.loads((tmp_path / "x.json").read_text("utf-8"))
    assert [sample["tokens"] for sample in saved["samples"]] == [12, 12]
    assert saved["marks"] == ["STOPPED after 2 of 4 repetitions: interrupted"]


def test_a_run_that_fails_shows_what_it_had(ling: Program, write_script: Write) -> None:
    script = write_script(TURN, TURN, [{"exit": 3}], clock="virtual", context=4000)
    run = ("bench", "--engine", "scripted", "-m", script, "--tokens", "12", "--speculation", "off", "-r", "4")
    done = ling(*run)
    assert done.code == 1
    assert done.text.startswith("[STOPPED after 1 of 4 repetitions: the engine ")
    assert done.err.splitlines()[-1].startswith("ling: the engine ")
    document = ling(*run, "--json").json
    assert document["error"]["kind"] == "EngineDied"
    assert len(document["samples"]) == 1


def test_nothing_is_shown_of_a_run_that_ends_before_its_first_repetition(ling: Program, write_script: Write) -> None:
    script = write_script(TURN, [{"exit": 3}], clock="virtual", context=4000)
    done = ling("bench", "--engine", "scripted", "-m", script, "--tokens", "12", "--speculation", "off")
    assert (done.code, done.out) == (1, b"")


def test_prompts_of_different_lengths_are_said(ling: Program, bench) -> None:
    document = bench("--json", "--speculation", "off").json
    for sample, length in zip(document["samples"], (509, 1508), strict=True):
        sample["prompt_tokens"] = length
    assert ", 509 to 1,508 prompt tokens, " in FORMATS["table"]([document], "", None)


def test_the_plot_has_a_line_a_repetition_and_a_bar_a_count(bench, tmp_path: Path) -> None:
    file = tmp_path / "speed.svg"
    assert bench("--plot", file, "-r", "3").code == 0
    picture = ElementTree.parse(file).getroot()
    assert picture.tag == f"{SVG}svg"
    lines = picture.findall(f"{SVG}polyline")
    assert len(lines) == 2 * 3
    assert sum("stroke-opacity" not in line.attrib for line in lines) == 2
    bars = [bar.findtext(f"{SVG}title") for bar in picture.findall(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    assert bars == ["0: 100.0 %", "0: 50.0 %", "1: 0.0 %", "2: 50.0 %"]
    texts = " ".join(text.text or "" for text in picture.findall(f"{SVG}text"))
    for words in ("off", "dspark/3", "tokens over time", "share of steps", "script, task code: 12 tokens"):
        assert words in texts


def test_the_task_random_is_asked_for_in_requests(bench) -> None:
    document = bench("--task", "random", "--ctx", "500", "--speculation", "off", "--json", "--quiet")
    assert document.json["marks"][0].startswith("NOT THE RECORD'S LENGTHS: 488 tokens in, 12 out")
    assert document.json["run"]["exact"] is True
    page = bench("--task", "random", "--prompt-tokens", "40", "--speculation", "off").text
    assert page.startswith("[NOT THE RECORD'S LENGTHS: 40 tokens in, 12 out]")


def test_requests_are_counted(ling: Program, write_script: Write) -> None:
    script = write_script(TURN, clock="virtual", block=3, context=4000)
    run = ("bench", "--engine", "scripted", "-m", script, "--tokens", "4", "--speculation", "off", "--json")
    assert len(ling(*run, "--task", "random", "--requests", "3").json["samples"]) == 3
    document = ling(*run[:5], "--task", "random", "--requests", "1", "--json", "--speculation", "off").json
    assert (document["run"]["prompt_tokens"], document["run"]["tokens"]) == (2976, 1024)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--requests", "3"), "--requests is for --task random"),
        (("--task", "random", "--requests", "3"), "both --requests and --repetitions"),
        (("--check", "--task", "random"), "--check has prompts of its own"),
        (("--check", "--accept-pattern", "1"), "--accept-pattern decides it"),
        (("--check", "--plot", "x.svg"), "--plot has nothing to show of --check"),
        (("--task", "random", "--prompt-tokens", "8192"), "the prompt is 8192 tokens long; the context holds 4000"),
    ],
)
def test_flags_that_do_not_fit_are_refused(bench, tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    done = bench(*args, cwd=tmp_path)
    assert (done.code, done.out) == (2, b"")
    assert words in done.err


def test_a_check_can_be_saved(bench, tmp_path: Path) -> None:
    file = tmp_path / "check.json"
    assert bench("--check", "--task", "prose", "--save", file).code == 0
    saved = json.loads(file.read_text("utf-8"))
    assert saved["same"] is True
    assert saved["command"].startswith("ling bench ")


def test_on_a_terminal_a_bar_runs_and_the_page_alone_stays(ling: Program, write_script: Write) -> None:
    turn = {"steps": [{"tokens": ["a"], "delay_ms": 5}], "loop": True}
    args = ("--engine", "scripted", "-m", write_script(turn), "--tokens", "20", "-r", "2", "--warmup", "0")
    shown, code = seen(watch(ling, "bench", *args))
    assert code == 0
    text = shown.decode()
    assert re.search(r"\r\[#+\.+\] +\d+ %  run \d/2: \d+/20 tokens", text)
    assert "ling: warning: no warm-up" not in text
    assert "  - no warm-up" in text


def test_the_bar_tells_the_share_and_the_rest() -> None:
    progress = BenchProgress("run", 2, 5, 30, 100, "off", share=0.25)
    assert bar("off, run 2/5", progress, 10) == "[#####...............]  25 %  off, run 2/5: 30/100 tokens, 30 s left"
    assert "left" not in bar("run 1/5", BenchProgress("run", 1, 5, 0, 100), 10)


@pytest.mark.parametrize(
    ("device", "num", "free_gib", "memory_gib", "together"),
    [
        ("cuda", 3, 139, 128, True),
        ("cuda", 3, 40, 128, False),
        ("cpu", 3, 0, 128, True),
        ("cpu", 3, 0, 80, False),
        ("cpu", 3, 0, None, True),
    ],
)
def test_modes_take_turns_where_their_engines_fit_together(
    device: str, num: int, free_gib: int, memory_gib: int | None, together: bool
) -> None:
    gib = 1 << 30
    info = EngineInfo(
        "ling-tiny",
        "bfloat16",
        device,
        131072,
        157184,
        weight_bytes=15 * gib,
        state_bytes=gib,
        free_bytes=free_gib * gib,
    )
    assert fit_together(info, num, memory_gib and memory_gib * gib) is together


@pytest.mark.parametrize("more", [{"ranks": 2}, {"engine": "sglang 0.5.23"}])
def test_one_at_a_time_where_what_is_free_is_not_known(more: dict[str, Any]) -> None:
    info = EngineInfo("ling-tiny", "bfloat16", "cuda:0", 4096, 1000, weight_bytes=1, free_bytes=1 << 40)
    assert fit_together(info, 2, None)
    assert not fit_together(replace(info, **more), 2, None)


def test_no_flag_that_decides_about_figures_is_missing_from_that_command(ling: Program) -> None:
    """A flag of `ling bench` says how a report is shown, or that there is none, or is repeated in the command."""
    shown = {"json", "csv", "md", "format", "save", "compare", "plot", "color", "quiet", "verbose", "debug", "offline"}
    shown |= {"explain"}
    page = ling("bench", "--help").text.partition("Examples:")[0]
    flags = set(re.findall(r"(?<=[ ,])--([a-z][a-z-]+)", page)) - {"help"}
    given = {row.name for row in TABLE.values() if row.flag.removeprefix("--") in flags}
    assert given - shown == set(REPEATED.split())
