"""The whole way with torch behind it: a small random checkpoint that lies in a folder of an awkward name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkpoints import write_checkpoint
from ling_local import paths
from program import Program

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo's tokenizer."""
    made = write_checkpoint(tmp_path_factory.mktemp("models") / "a b 張 '%20 [x]", vocab_size=4096)
    for name in TEXT_FILES:
        shutil.copy(paths.demo_dir() / name, made)
    return made


@pytest.fixture
def run(ling: Program, folder: Path):
    def start(*args: str | Path, model: Path | str = folder, **more):
        return ling(
            "complete", "-m", model, "-p", "def f(x):", "-n", "8", "--json", *args, env={"OMP_NUM_THREADS": "1"}, **more
        )

    return start


def test_a_checkpoint_in_a_folder_of_any_name_continues_a_text(run, folder: Path, tmp_path: Path) -> None:
    done = run("--until", "eof", "-t", "0")
    assert (done.code, done.err) == (0, "")
    assert done.json["model"]["folder"] == str(folder)
    assert done.json["model"]["dtype"] == "float32"
    assert done.json["usage"]["completion_tokens"] > 0
    (tmp_path / "link").symlink_to(folder)
    assert run("--until", "eof", "-t", "0", model=f"{tmp_path}/link/").json["text"] == done.json["text"]


def test_the_same_seed_gives_the_same_text_in_another_process(run) -> None:
    texts = [run("-t", "1", "--seed", seed, "--until", "eof").json["text"] for seed in ("7", "7", "8")]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_dtype_reaches_the_engine(run) -> None:
    assert run("--dtype", "bfloat16").json["model"]["dtype"] == "bfloat16"


def test_a_damaged_checkpoint_is_refused_with_file_and_repair(run, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shard = copy / "model-00001-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    done = run(model=copy)
    assert done.code == 1
    assert shard.name in done.err
    assert f"{len(data):,}" in done.err
    assert done.json["error"]["kind"] == "ModelError"
    assert "Traceback" not in done.err
    shard.unlink()
    done = run(model=copy)
    assert done.code == 1
    assert f"{shard.name} is missing" in done.err


def test_too_long_a_prompt_is_refused_before_work(run) -> None:
    done = run("--ctx", "4")
    assert done.code == 2
    assert "the context holds 4" in done.err


@pytest.mark.parametrize("text", ["0,x", "0,0", "-1", ""])
def test_gpu_numbers_that_are_none(ling: Program, text: str) -> None:
    done = ling("complete", "--gpus", text, stdin=b"x")
    assert done.code == 2
    assert "--gpus" in done.err
