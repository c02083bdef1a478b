"""Which folder a model's name stands for, and what is said where there is none."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from ling_local import hub, paths
from ling_local.errors import ModelError

TINY = "inclusionAI/Ling-3.0-tiny"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def checkpoint(folder: Path, shards: int = 1) -> Path:
    """A folder whose files fit together: config.json and tiny safetensors files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    weight_map = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        header = json.dumps({f"w{number}": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
        weight_map[f"w{number}"] = name
    if shards > 1:
        (folder / hub.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def cached(root: Path, repo: str = TINY, revision: str = "abc") -> Path:
    """A checkpoint as Hugging Face tools keep it."""
    entry = root / f"models--{repo.replace('/', '--')}"
    folder = checkpoint(entry / "snapshots" / revision, shards=2)
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(revision)
    return folder


@pytest.mark.parametrize("name", ["plain", "a b 張", "it's", "50%20", "-dash", "under.score", "[/x] :smile:"])
def test_any_folder_works(tmp_path: Path, name: str) -> None:
    folder = checkpoint(tmp_path / name)
    assert hub.find_model(str(folder)) == folder
    assert hub.find_model(f"{folder}/") == folder


def test_a_link_to_a_folder_and_a_read_only_folder_work(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "real")
    (tmp_path / "link").symlink_to(folder)
    folder.chmod(0o555)
    assert hub.find_model(str(tmp_path / "link")).samefile(folder)


def test_a_tilde_and_a_relative_path_work(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint(home / "mine")
    assert hub.find_model("~/mine") == folder
    monkeypatch.chdir(home)
    assert hub.find_model("mine").samefile(folder)


def test_a_folder_in_the_models_folder_is_found_by_its_name(home: Path) -> None:
    folder = checkpoint(home / ".local/share/ling/models/My-Ling")
    assert hub.find_model("my-ling") == folder
    assert [model.name for model in hub.list_models()] == ["ling-demo", "My-Ling"]


@pytest.mark.parametrize("name", [TINY, "ling-3.0-tiny", "Ling-3.0-Tiny", "ling-tiny"])
def test_a_published_name_is_found_in_the_hugging_face_cache(home: Path, name: str) -> None:
    folder = cached(home / ".cache/huggingface/hub")
    assert hub.find_model(name) == folder


@pytest.mark.parametrize(("variable", "tail"), [("HF_HOME", "hub"), ("HF_HUB_CACHE", ""), ("XDG_CACHE_HOME", None)])
def test_the_cache_variables_are_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, tail: str | None
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "elsewhere"))
    folder = cached(tmp_path / "elsewhere" / ("huggingface/hub" if tail is None else tail))
    assert hub.find_model(TINY) == folder


def test_the_main_revision_is_taken_not_the_newest(home: Path) -> None:
    folder = cached(home / ".cache/huggingface/hub")
    checkpoint(folder.parent / "zzz-newer", shards=2)
    assert hub.find_model(TINY) == folder


def test_an_unknown_name_says_what_is_here_and_how_to_get_more(home: Path) -> None:
    folder = checkpoint(home / ".local/share/ling/models/house")
    with pytest.raises(ModelError) as caught:
        hub.find_model("ling-tiny")
    assert caught.value.message == "model 'ling-tiny' is not on this machine."
    lines = caught.value.hint.splitlines()
    assert lines[0].startswith("here:  ")
    assert folder.name in lines[0]
    assert lines[1].startswith(f"get:   ling pull {TINY}    (about 15.8 GB, ")
    assert lines[1].endswith(" GB free)")
    assert caught.value.exit_code == 1


def test_a_misspelt_name_gets_the_nearest(home: Path) -> None:
    checkpoint(home / ".local/share/ling/models/house")
    with pytest.raises(ModelError, match="'hose' is not on this machine") as caught:
        hub.find_model("hose")
    assert caught.value.hint.splitlines()[0] == "near:  house"


def test_an_incomplete_download_names_the_missing_file_and_the_repair(home: Path) -> None:
    folder = cached(home / ".cache/huggingface/hub")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors is missing") as caught:
        hub.find_model(TINY)
    assert caught.value.hint.startswith(f"get: ling pull {TINY}")
    listed = hub.list_models()[-1]
    assert (listed.name, listed.problem) == (TINY, "model-00002-of-00002.safetensors is missing")


def test_a_broken_link_in_the_cache_is_a_missing_file(home: Path) -> None:
    folder = cached(home / ".cache/huggingface/hub")
    shard = folder / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../../blobs/never-came")
    assert hub.list_models()[-1].problem == "model-00001-of-00002.safetensors is missing"


def test_a_short_file_is_listed_as_unusable(home: Path) -> None:
    folder = cached(home / ".cache/huggingface/hub")
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert shard.name in hub.list_models()[-1].problem


@pytest.mark.parametrize(
    ("remove", "problem"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", "its weights (*.safetensors) are missing"),
    ],
)
def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path, remove: str, problem: str) -> None:
    folder = checkpoint(tmp_path / "model")
    (folder / remove).unlink()
    with pytest.raises(ModelError) as caught:
        hub.find_model(str(folder))
    assert problem in caught.value.message


def test_shards_without_their_index_and_a_damaged_index_are_refused(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", shards=2)
    (folder / hub.INDEX).write_text("{")
    assert hub.missing_file(folder) == f"{hub.INDEX} is damaged"
    (folder / hub.INDEX).unlink()
    assert hub.missing_file(folder) == f"{hub.INDEX} is missing"


def test_a_folder_of_others_is_listed_with_the_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached(home / ".cache/huggingface/hub")

    def refuse(file: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert hub.list_models()[-1].problem == "config.json cannot be read: Permission denied"
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        hub.find_model(TINY)


def test_a_folder_that_is_not_there_is_said(tmp_path: Path) -> None:
    assert hub.list_models((tmp_path / "nothing",))[-1].problem == "there is no such folder"


def test_a_file_is_no_model(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"x")
    with pytest.raises(ModelError, match="is a file, not a checkpoint folder"):
        hub.find_model(str(file))


@pytest.mark.parametrize("name", ["", "~nobody-of-that-name/x", "x" * 5000, "a\0b", "[/INST] \x1b[2J"])
def test_strange_names_are_simply_not_here(name: str) -> None:
    with pytest.raises(ModelError):
        hub.find_model(name)


def test_an_empty_name_is_not_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint(tmp_path / "model"))
    with pytest.raises(ModelError, match="name of the model is empty"):
        hub.find_model("")


def test_no_name_and_the_demos_name_mean_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "demo")
    monkeypatch.setattr(paths, "demo_dir", lambda: folder)
    assert hub.find_model(None) == folder
    assert hub.find_model("ling-demo") == folder
    assert hub.list_models()[0].source == "built in"
