"""`ling bench`, `doctor`, `models` and `config`: what they print, and where."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ling_local.cli.opening import model_spec
from ling_local.settings import KEPT, resolve
from program import Program, Result

Write = Callable[..., Path]
LOOP = {"steps": [{"tokens": ["word "], "delay_ms": 1}], "loop": True}
CHECKS = ("python", "torch", "gpu", "demo model", "disk", "cache", "state", "config", "optional engines", "terminal")


@pytest.fixture
def bench(ling: Program, write_script: Write) -> Callable[..., Result]:
    def run(*args: str, **more) -> Result:
        return ling(
            "bench", "--engine", "scripted", "-m", write_script(LOOP), "--tokens", "20", "-r", "2", *args, **more
        )

    return run


def test_bench_prints_a_table_and_its_progress_elsewhere(bench) -> None:
    done = bench()
    assert done.code == 0
    assert "TPOT ms" in done.text
    assert "tok/s" in done.text
    told = [line for line in done.err.splitlines() if "warning" not in line]  # how busy the machine is, is no matter
    assert told == ["ling: warm-up 1/1", "ling: run 1/2", "ling: run 2/2"]
    assert bench("--quiet", "-r", "1").err == ""  # the warning about one repetition too
    assert bench("--no-quiet", env={"LING_QUIET": "1"}).err != ""


@pytest.mark.parametrize("flag", [["--json"], ["--format", "json"]])
def test_bench_json_is_one_document_that_can_be_run_again(bench, flag: list[str]) -> None:
    document = bench(*flag, "--warmup", "0", "--task", "prose", "--seed", "3", "-t", "0.5").json
    run = document["run"]
    assert (run["tokens"], run["repetitions"], run["warmup"], run["task"]) == (20, 2, 0, "prose")
    assert (run["seed"], run["temperature"]) == (3, 0.5)
    assert [sample["tokens"] for sample in document["samples"]] == [20, 20]
    assert document["decode"]["tpot_ms"]["median"] >= 0.9


def test_bench_csv_has_a_row_a_repetition_and_md_is_a_table(bench) -> None:
    for flag in (["--csv"], ["--format", "csv"]):
        rows = list(csv.DictReader(io.StringIO(bench(*flag, "--repetitions", "3").text)))
        assert [row["repetition"] for row in rows] == ["1", "2", "3"]
        assert {row["tokens"] for row in rows} == {"20"}
    lines = bench("--md").text.splitlines()
    assert "| TPOT ms median |" in "\n".join(lines)
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1


def test_bench_prompt_length_and_thinking_are_chosen(bench) -> None:
    assert bench("--json", "--prompt-tokens", "100").json["run"]["prompt_tokens"] == 100
    assert bench("--json", "--task", "chat", "--no-think").json["run"]["thinking"] is False
    assert bench("--json", "--top-p", "0.5", "--top-k", "4").json["run"]["top_p"] == 0.5


def test_bench_that_could_not_make_its_tokens_says_so_and_fails(bench) -> None:
    done = bench("--ctx", "1000", "--prompt-tokens", "990", "--json")
    assert done.code == 1
    assert "tokens a repetition where 20 were asked for" in done.err
    assert done.json["run"]["exact"] is False


def test_bench_with_one_token_and_one_repetition_has_nulls(bench) -> None:
    document = bench("--json", "--tokens", "1", "-r", "1").json
    assert document["decode"]["tpot_ms"]["mean"] is None
    assert document["ttft_ms"]["sd"] is None


def test_doctor_ends_with_a_line_a_check_and_fails_on_a_fail(ling: Program) -> None:
    done = ling("doctor", "--json")
    rows = {row["name"]: row for row in done.json["checks"]}
    assert set(CHECKS) <= set(rows)
    assert done.code == (0 if done.json["ok"] else 1)
    assert rows["python"]["status"] == "pass"
    assert rows["torch"]["status"] == "pass"


def test_doctor_reports_a_broken_torch_and_a_wrong_config_and_goes_on(ling: Program, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch is damaged')\n")
    ling.config("temperature = 'hot'\n")
    done = ling("doctor", env={"PYTHONPATH": str(tmp_path)})
    assert done.code == 1
    lines = done.text.splitlines()
    assert any(line.startswith("fail torch") and "libtorch is damaged" in line for line in lines)
    assert any(line.startswith("fail config") and "config.toml:1" in line for line in lines)
    assert lines[-1].startswith("pass terminal")
    assert "Traceback" not in done.err


def test_doctor_looks_at_the_chosen_model(ling: Program) -> None:
    done = ling("doctor", "--model", "nosuch", "--json")
    rows = {row["name"]: row for row in done.json["checks"]}
    assert done.code == 1
    assert rows["model"]["status"] == "fail"
    assert "nosuch" in rows["model"]["detail"]


def test_models_lists_folders_and_says_what_is_missing(ling: Program, tmp_path: Path) -> None:
    folder = ling.home / ".local/share/ling/models/[bold] 張"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    done = ling("models", tmp_path)
    assert done.code == 1  # of the folder that was named
    assert f"{tmp_path} cannot be used: config.json is missing" in done.err
    assert ling("models").code == 0
    told = ling("models", "--json", tmp_path)
    assert told.code == 1
    assert told.json["models"][-1]["problem"] == "config.json is missing"  # in one document
    first, second, third = done.text.splitlines()
    assert first.startswith("ling-demo")
    assert second.startswith("[bold] 張")
    assert "incomplete: its weights (*.safetensors) are missing" in second
    assert "config.json is missing" in third
    rows = ling("models", "--json").json["models"]
    assert [row["name"] for row in rows] == ["ling-demo", "[bold] 張"]
    assert rows[1]["usable"] is False


def test_config_shows_each_value_and_its_source(ling: Program) -> None:
    ling.config("top_k = 5\nstop = ['A', 'B']\n")
    args = ("config", "--engine-not-needed")
    assert ling(*args).code == 2
    done = ling("config", env={"LING_TEMPERATURE": "0.5", "LING_ENGINE": "scripted", "LING_SYSTEM": "a\nb"})
    lines = {line.split()[0]: line.split() for line in done.text.splitlines()}
    assert set(lines) == set(KEPT)
    assert lines["temperature"][1:] == ["0.5", "LING_TEMPERATURE"]
    assert lines["top_k"][1:] == ["5", "config.toml:1"]
    assert lines["system"][1:] == ["a\\nb", "LING_SYSTEM"]
    assert lines["ctx"][1:] == ["0", "default"]
    document = ling("config", "--json", "--model", "x", env={"LING_ENGINE": "scripted"}).json
    assert document["settings"]["stop"] == {"value": ["A", "B"], "source": "config.toml:2", "variable": "LING_STOP"}
    assert document["settings"]["model"]["source"] == "flag --model"


def test_config_takes_the_flags_of_a_run_and_names_every_kind_of_source(ling: Program) -> None:
    ling.config("top_k = 5\nstop = ['A']\nseed = 1\n")
    env = {"LING_TOP_K": "6", "LING_SEED": "2", "HF_HUB_OFFLINE": "1"}
    rows = ling("config", "--json", "--seed", "3", "--no-think", "--device", "cpu", env=env).json["settings"]
    assert (rows["seed"]["value"], rows["seed"]["source"]) == (3, "flag --seed")
    assert (rows["think"]["value"], rows["think"]["source"]) == (False, "flag --think")
    assert (rows["top_k"]["value"], rows["top_k"]["source"]) == (6, "LING_TOP_K")
    assert (rows["stop"]["value"], rows["stop"]["source"]) == (["A"], "config.toml:2")
    assert (rows["offline"]["value"], rows["offline"]["source"]) == (True, "HF_HUB_OFFLINE")
    assert rows["top_p"]["source"] == "default"
    assert ling("config", "--json", "--online", env=env).json["settings"]["offline"]["value"] is False
    rows = ling("config", "--json", env={"LING_STDIN_WAIT": "inf", "LING_TEMPERATURE": "0.12345678"}).json["settings"]
    assert (rows["stdin_wait"]["value"], rows["temperature"]["value"]) == ("inf", 0.12345678)
    env["LING_OFFLINE"] = "0"
    assert ling("config", "--json", env=env).json["settings"]["offline"]["source"] == "LING_OFFLINE"


def test_a_stop_in_the_config_file_ends_a_run(ling: Program, write_script: Write) -> None:
    ling.config("stop = ['STOP']\n")
    done = ling("complete", "--engine", "scripted", "-m", write_script(["a", "STOP", "b"]), "-p", "x", "--until", "eof")
    assert done.text == "a"


def test_verbose_says_what_was_loaded_from_where(ling: Program, write_script: Write) -> None:
    script = write_script(["a"])
    args = ("complete", "--engine", "scripted", "-m", script, "-p", "x")
    assert ling(*args).err == ""
    for done in (ling(*args, "--verbose"), ling("-v", *args), ling(*args, env={"LING_VERBOSE": "1"})):
        assert done.text == "a"
        assert f"ling: model: {script}" in done.err
        assert "ling: loaded " in done.err
    assert ling(*args, "-v", "-q").err == ""


def test_models_all_lists_what_can_be_fetched_and_list_is_the_same_command(ling: Program) -> None:
    done = ling("list", "--all")
    assert done.out == ling("models", "--all").out
    lines = {line.split()[0]: line for line in done.text.splitlines() if line}
    assert "15.8 GB" in lines["inclusionAI/Ling-3.0-tiny"]
    assert "its weights are int4" in lines["inclusionAI/Ling-3.0-flash-int4"]
    rows = {row["name"]: row for row in ling("models", "--all", "--json").json["published"]}
    assert rows["dspark"]["drafter_of"] == "inclusionAI/Ling-3.0-flash"
    assert rows["flash"]["refused"] is None
    assert rows["fp8"]["size_bytes"] == 128_443_021_752
    assert "published" not in ling("models", "--json").json


def test_warnings_about_settings_come_once_on_stderr_and_stdout_stays_clean(ling: Program, write_script: Write) -> None:
    file = ling.config("temprature = 1\nseed = 5\n")
    script = write_script(["a"])
    env = {"LING_TEMPRATURE": "1"}
    done = ling("complete", "--engine", "scripted", "-m", script, "-p", "x", "--json", env=env)
    assert done.err.splitlines() == [
        "ling: warning: unknown variable LING_TEMPRATURE; did you mean LING_TEMPERATURE?",
        f"ling: warning: {file}:1: unknown key temprature; did you mean temperature?",
    ]
    assert done.json["sampling"]["seed"] == 5


@pytest.mark.parametrize("text", ["temperature = 'hot'\n", "top_p = 3\n", "a = = b\n"])
def test_a_wrong_config_is_exit_2_and_names_the_file(ling: Program, text: str) -> None:
    file = ling.config(text)
    done = ling("complete", "-p", "x", "--engine", "scripted", "-m", "s.json")
    assert (done.code, done.out) == (2, b"")
    assert str(file) in done.err


def test_a_config_with_bom_and_crlf_loses_no_key(ling: Program, write_script: Write) -> None:
    ling.config(b"\xef\xbb\xbfseed = 9\r\ntop_k = 3\r\n")
    done = ling("complete", "--engine", "scripted", "-m", write_script(["a"]), "-p", "x", "--json")
    assert (done.json["sampling"]["seed"], done.json["sampling"]["top_k"], done.err) == (9, 3, "")


def test_a_home_and_a_working_folder_of_strange_names_work(tmp_path: Path, write_script: Write) -> None:
    home = tmp_path / "a b 張 '%20"
    home.mkdir()
    ling = Program(home)
    script = home / "-script [x].json"
    script.write_bytes(write_script(["answer"]).read_bytes())
    run = ("complete", "--engine", "scripted", "-p", "x")
    assert ling(*run, "-m", script).out == b"answer"
    assert ling(*run, f"--model={script.name}", cwd=home).out == b"answer"
    assert ling(*run, "-m", script.name, cwd=home).out == b"answer"  # a leading dash is no option here
    assert ling(*run, "-m", f"~/{script.name}").out == b"answer"


def test_load_options_reach_the_engine_spec(tmp_path: Path) -> None:
    flags = {
        "engine": "scripted",
        "model": "s.json",
        "device": "cuda",
        "dtype": "bfloat16",
        "ctx": "64",
        "threads": "3",
    }
    spec, _ = model_spec(resolve(flags, {}, tmp_path / "none.toml"))
    assert (spec.engine, spec.model, spec.device, spec.dtype, spec.context, spec.threads) == (
        *("scripted", "s.json", "cuda", "bfloat16"),
        *(64, 3),
    )


def test_load_flags_are_checked_on_the_command_line(ling: Program, write_script: Write) -> None:
    script = write_script(["answer"])
    run = ("complete", "--engine", "scripted", "-m", script, "-p", "x")
    assert ling(*run, "--device", "gpu").code == 2
    assert ling(*run, "--dtype", "float16").code == 2
    assert ling(*run, "--threads", "-1").code == 2
    assert ling(*run, "--device", "cpu", "--dtype", "bfloat16", "--threads", "1").out == b"answer"
    assert json.loads(ling(*run, "--json", "--prompt", "abc").out)["usage"]["prompt_tokens"] == 3
