"""`--engine sglang` as a person sees it: without the package, on a stand-in for it, and beside the native engine."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from ling_local.cli.bench_tables import FORMATS
from program import Program
from sglang_stand_in import COMPILER, environment, make_model

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", PAGE, re.S)
LINES = [line for block in BLOCKS for line in block.splitlines() if line.startswith("ling ")]
README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
README_LINES = [line for line in README if line.startswith("ling ") and "--engine sglang" in line]
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler: there is no driver to stand in")


@pytest.fixture
def model(ling: Program, tmp_path: Path) -> Path:
    """A model with a tokenizer, under a published name, so that examples find it."""
    made = make_model(tmp_path, vocab_size=4096)
    demo = ROOT / "ling_local" / "data" / "demo"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(demo / name, made / name)
    config = json.loads((made / "config.json").read_text())
    for name in ("Ling-3.0-tiny", "Ling-3.0-flash"):
        place = ling.home / ".local/share/ling/models" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, place)
    assert config["architectures"] == ["BailingMoeV3ForCausalLM"]
    return made


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    return environment(tmp_path)


def test_without_the_package_it_says_what_to_install(ling: Program, model: Path) -> None:
    done = ling("complete", "--engine", "sglang", "-m", model, "-p", "x")
    assert (done.code, done.out) == (1, b"")
    assert done.err.startswith("ling: SGLang is not installed. Install it with pip install 'ling-local[sglang]'")


def test_without_a_model_it_asks_for_one(ling: Program) -> None:
    done = ling("complete", "--engine", "sglang", "-p", "x")
    assert done.code == 2
    assert "needs a model" in done.err


@pytest.mark.parametrize("command", [["complete", "-p", "x"], ["chat", "-p", "x"], ["serve"], ["bench"]])
def test_explain_shows_the_flags_and_starts_nothing(ling: Program, model: Path, command: list[str]) -> None:
    done = ling(*command, "--engine", "sglang", "-m", model, "--explain", "--sglang-arg", "tp_size=2")
    assert (done.code, done.err) == (0, "")
    words = shlex.split(done.text.replace("\\\n", ""), comments=True)
    assert words[words.index("--tp-size") + 1] == "2"
    assert "SGLANG_OPT_FUSED_KDA_VERIFY=1" in words
    assert "--speculative-draft-model-path" in words
    assert "# SGLang is not installed" in done.text
    assert "# no NVIDIA GPU answers here" in done.text


def test_explain_and_flags_of_sglang_are_for_sglang(ling: Program, model: Path) -> None:
    for flags in (["--explain"], ["--sglang-arg", "tp_size=2"]):
        done = ling("complete", "-m", model, "-p", "x", *flags)
        assert done.code == 2
        assert f"{flags[0]} is for --engine sglang" in done.err


@needs_compiler
def test_explain_follows_the_gpus(ling: Program, model: Path, tmp_path: Path) -> None:
    more = environment(tmp_path, gpus=4, major=10)
    done = ling("complete", "-p", "x", "--engine", "sglang", "-m", model, "--gpus", "0,1,2,3", "--explain", env=more)
    assert "--attention-backend trtllm_mla" in done.text
    assert "--flashinfer-allreduce-fusion-backend auto" in done.text
    assert "# 4 x Stand-in GPU (compute capability 10.0)" in done.text
    assert "# sglang 0.5.23 is installed" in done.text
    alone = ling("bench", "--modes", "off,mtp", "--engine", "sglang", "-m", model, "--explain", env=more).text
    assert alone.count("sglang.launch_server") == 2
    assert "NEXTN" in alone
    assert "DSPARK" not in alone


@needs_compiler
def test_complete_streams_what_sglang_makes(ling: Program, model: Path, env: dict[str, str]) -> None:
    args = ("complete", "-p", "x", "--engine", "sglang", "-m", model, "-n", "20", "--until", "eof")
    document = ling(*args, "--json", env=env).json
    assert document["finish"] == "length"
    assert document["usage"]["completion_tokens"] == 20
    assert (document["model"]["device"], document["model"]["drafter"], document["model"]["block"]) == (
        "cuda",
        "dspark",
        8,
    )
    plain = ling(*args, "--speculation", "off", "--stats", env=env)
    assert plain.text == document["text"]
    assert plain.err.startswith("ling: starting SGLang 0.5.23\n20 tok")


@needs_compiler
def test_flags_that_sglang_refuses_end_with_its_words(ling: Program, model: Path, env: dict[str, str]) -> None:
    done = ling("complete", "-p", "x", "--engine", "sglang", "-m", model, "--sglang-arg", "tp-sizze=2", env=env)
    assert done.code == 2
    assert "unrecognized arguments: --tp-sizze 2" in done.err


@needs_compiler
def test_bench_measures_sglang_like_the_native_engine(ling: Program, model: Path, env: dict[str, str]) -> None:
    args = ("bench", "-m", model, "--tokens", "12", "-r", "2", "--task", "prose", "--prompt-tokens", "8")
    document = ling(*args, "--engine", "sglang", "--modes", "off,dspark", "--json", env=env).json
    assert document["order"] == "one after the other"
    assert [report["model"]["engine"] for report in document["reports"]] == ["sglang 0.5.23"] * 2
    assert [report["run"]["exact"] for report in document["reports"]] == [True, True]
    assert document["reports"][1]["speculation"]["accept_length"] > 1
    assert ", sglang 0.5.23 on cuda" in ling(*args, "--engine", "sglang", "--modes", "off", env=env).text
    native = ling(*args, "--modes", "off", "--json").json
    both = [native, *document["reports"]]
    for report in both:
        report["decode"]["tpot_ms"]["mean"] = {"native": 2.0}.get(report["model"]["engine"], 4.0)
    text = FORMATS["table"](both, document["order"], None)
    lines = text.splitlines()
    assert ", native and sglang 0.5.23 on c" in text
    assert "a 5,000-token answer here: native off" in text
    assert "sglang off: 0.50 times as fast as native off" in lines
    assert "sglang dspark/8: 1.00 times as fast as sglang off" in lines
    assert ["native off", "sglang off", "sglang dspark/8"] in [re.split(r"\s{2,}", line.strip()) for line in lines]


@needs_compiler
def test_bench_of_native_and_sglang_is_one_run(ling: Program, model: Path, env: dict[str, str]) -> None:
    """Both together need a GPU. On a CPU, asked for by hand, the native engine is measured and SGLang refused."""
    args = ("bench", "-m", model, "--tokens", "12", "-r", "2", "--engine", "native,sglang", "--modes", "off")
    done = ling(*args, "--device", "cpu", env=env, timeout=120)
    assert done.code == 2
    assert "run 2/2" in done.err
    assert "SGLang runs these models on GPUs only" in done.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--engine", "native,vllm"], "'vllm' is not one of"),
        (["--engine", "native,sglang", "--check"], "--check is for one engine"),
        (["--engine", "native,sglang", "--dummy", "tiny"], "--dummy is for one engine"),
    ],
)
def test_engines_that_cannot_be_compared(ling: Program, model: Path, flags: list[str], words: str) -> None:
    done = ling("bench", "-m", model, *flags)
    assert done.code == 2
    assert words in done.err


def test_the_page_has_what_is_run_here() -> None:
    assert len(LINES) >= 6
    assert all("sglang" in line for line in LINES)
    assert README_LINES


@needs_compiler
@pytest.mark.parametrize("line", [*LINES, *README_LINES])
def test_an_example_of_the_page_runs(ling: Program, model: Path, tmp_path: Path, line: str) -> None:
    """Commands that would start an engine are asked to explain themselves: the same flags are read and checked."""
    words = shlex.split(line, comments=True)[1:]
    words += [] if "--explain" in words else ["--explain"]
    done = ling(*words, env=environment(tmp_path, gpus=8, major=10))
    assert (done.code, done.err) == (0, "")
    assert "sglang.launch_server" in done.text


def test_the_page_shows_the_recipe_as_explain_prints_it(ling: Program, model: Path, tmp_path: Path) -> None:
    """The listing in the page is the output of the first example on four Blackwell GPUs, but for the folder."""
    if COMPILER is None:
        pytest.skip("no C compiler: there is no driver to stand in")
    listing = re.search(r"```text\n(.*?)```", PAGE, re.S)
    assert listing is not None
    words = shlex.split(LINES[0], comments=True)[1:]
    done = ling(*words, env=environment(tmp_path, gpus=4, major=10))
    folder = str(ling.home / ".local/share/ling/models")
    assert done.text.replace(folder, "~/.local/share/ling/models").replace("Stand-in GPU", "NVIDIA B200") == listing[1]


def test_engines_in_csv(ling: Program, write_script) -> None:
    script = write_script({"steps": [{"tokens": ["word "]}], "loop": True})
    done = ling("bench", "--engine", "scripted", "-m", script, "--tokens", "5", "-r", "1", "--csv")
    assert {row["engine"] for row in csv.DictReader(io.StringIO(done.text))} == {"scripted"}
