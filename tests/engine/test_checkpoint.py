"""Damaged checkpoints are refused before a byte is mapped, with the file, the reason and the repair."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import write_checkpoint
from ling_local.engine.config import load_model_config
from ling_local.engine.layout import memory_bytes, model_layout
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import Progress
from ling_local.errors import ModelError, OutOfMemory, UsageError

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def edit(folder: Path, name: str, change: Callable[[dict], None]) -> None:
    """Change the tensors of one shard; the index keeps what it said."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, metadata={"format": "pt"})


def cut(folder: Path, name: str, num_bytes: int) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-num_bytes])


def header_length(folder: Path, name: str, value: int) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(struct.pack("<Q", value) + data[8:])


def reindex(folder: Path, change: Callable[[dict], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def rename(tensors: dict, old: str, new: str) -> None:
    tensors[new] = tensors.pop(old)


NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def rename_everywhere(folder: Path, old: str, new: str) -> None:
    file = json.loads((folder / INDEX).read_text())["weight_map"][old]
    edit(folder, file, lambda t: rename(t, old, new))
    reindex(folder, lambda m: rename(m, old, new))


def retype(folder: Path, name: str, dtype: torch.dtype) -> None:
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    edit(folder, file, lambda t: t.update({name: t[name].to(dtype)}))


def reshape(folder: Path, name: str) -> None:
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    edit(folder, file, lambda t: t.update({name: t[name][:-1].clone()}))


def add_unlisted(folder: Path) -> None:
    edit(folder, SECOND, lambda t: t.update({"extra.weight": torch.zeros(2)}))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte short": (lambda f: cut(f, SECOND, 1), f"{SECOND}.*bytes long, its header says"),
    "a page short": (lambda f: cut(f, FIRST, 4096), f"{FIRST}.*bytes long, its header says"),
    "half": (lambda f: cut(f, FIRST, (f / FIRST).stat().st_size // 2), FIRST),
    "empty file": (lambda f: (f / FIRST).write_bytes(b""), f"{FIRST}.*too short"),
    "bytes too many": (lambda f: (f / FIRST).open("ab").write(b"x"), f"{FIRST}.*its header says"),
    "header length too large": (lambda f: header_length(f, FIRST, 2**40), f"{FIRST}.*too short"),
    "header length too small": (lambda f: header_length(f, FIRST, 10), f"{FIRST}.*header"),
    "shard missing": (lambda f: (f / SECOND).unlink(), f"{SECOND}: this file is missing"),
    "index missing": (lambda f: (f / INDEX).unlink(), f"2 weight files but no {INDEX}"),
    "index names an absent shard": (
        lambda f: reindex(f, lambda m: m.update({NORM: "model-00003-of-00003.safetensors"})),
        "model-00003-of-00003.safetensors: this file is missing",
    ),
    "index names the wrong shard": (
        lambda f: reindex(f, lambda m: m.update({NORM: FIRST if m[NORM] == SECOND else SECOND})),
        f"{NORM} is listed",
    ),
    "index leads out of the folder": (lambda f: reindex(f, lambda m: m.update({NORM: "../x"})), "weight_map"),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), f"{INDEX}: cannot be read"),
    "tensor missing": (
        lambda f: (
            edit(f, json.loads((f / INDEX).read_text())["weight_map"][HEAD], lambda t: t.pop(HEAD)),
            reindex(f, lambda m: m.pop(HEAD)),
        ),
        f"{HEAD} is in none",
    ),
    "tensor misnamed": (
        lambda f: rename_everywhere(f, NORM, "model.norms.weight"),
        r"unknown tensor model\.norms\.weight \(close to model\.norm\.weight\)",
    ),
    "tensor not in the index": (add_unlisted, "extra.weight is not listed"),
    "wrong type": (lambda f: retype(f, HEAD, torch.float16), f"{HEAD} has type F16, expected BF16"),
    "wrong integer type": (lambda f: retype(f, NORM, torch.int16), f"{NORM} has type I16"),
    "wrong shape": (lambda f: reshape(f, HEAD), f"{HEAD} has shape .127, 64."),
    "no weights": (lambda f: [p.unlink() for p in (f / FIRST, f / SECOND, f / INDEX)], "no weights"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_nothing_is_loaded(folder: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_it, reason = DAMAGE[damage]
    break_it(folder)
    monkeypatch.setattr("ling_local.engine.weights.read_tensor", lambda _: pytest.fail("a tensor was read"))
    with pytest.raises(ModelError, match=f"(?s){reason}") as caught:
        NativeEngine.load(folder)
    assert str(folder) in caught.value.message
    assert "ling pull" in caught.value.hint
    assert caught.value.exit_code == 1


def test_a_tensor_in_two_files_is_refused(folder: Path) -> None:
    both = load_file(folder / FIRST)
    name = next(iter(both))
    edit(folder, SECOND, lambda t: t.update({name: both[name]}))
    with pytest.raises(ModelError, match=r"is in .* too"):
        NativeEngine.load(folder)


def test_harmless_variants_load(folder: Path, whole: Path) -> None:
    expected = NativeEngine.load(whole).score([1, 2, 3])
    name = "model.layers.0.attention.A_log"
    file = json.loads((folder / INDEX).read_text())["weight_map"][name]
    edit(folder, file, lambda t: t.update({name: t[name].view(1, 1, -1, 1)}))
    edit(folder, file, lambda t: t.update({"model.layers.1.attention.rotary_emb.inv_freq": torch.zeros(8)}))
    assert NativeEngine.load(folder).score([1, 2, 3]).equal(expected)


def test_one_file_without_an_index_loads(folder: Path, whole: Path) -> None:
    save_file(load_file(folder / FIRST) | load_file(folder / SECOND), folder / "model.safetensors")
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    assert NativeEngine.load(folder).score([1, 2, 3]).equal(NativeEngine.load(whole).score([1, 2, 3]))


@pytest.mark.parametrize("name", ["a b 張 %20 'q'", "-dash"])
def test_odd_folder_names_load(whole: Path, tmp_path: Path, name: str) -> None:
    odd = shutil.copytree(whole, tmp_path / name)
    link = tmp_path / "link"
    link.symlink_to(odd)
    for file in odd.iterdir():
        file.chmod(0o444)
    odd.chmod(0o555)
    expected = NativeEngine.load(whole).score([5, 6])
    for path in (odd, link, f"{odd}/"):
        assert NativeEngine.load(path).score([5, 6]).equal(expected)


def test_progress_reaches_the_end(whole: Path) -> None:
    seen: list[Progress] = []
    NativeEngine.load(whole, progress=seen.append)
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total > 0


def test_too_little_memory_is_said_before_loading(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ling_local.engine.weights.memory_bytes", lambda *_: 2**60)
    monkeypatch.setattr("ling_local.engine.weights.read_tensor", lambda _: pytest.fail("a tensor was read"))
    with pytest.raises(OutOfMemory, match=r"need 1073741824\.0 GiB of memory, .* GiB are free"):
        NativeEngine.load(whole)


def test_arguments_are_checked(whole: Path) -> None:
    with pytest.raises(UsageError, match="float8"):
        NativeEngine.load(whole, dtype="float8")
    with pytest.raises(UsageError, match="limit is 512"):
        NativeEngine.load(whole, context=1000)
    with pytest.raises(UsageError, match="abacus"):
        NativeEngine.load(whole, device="abacus")


def test_peak_memory_is_the_weights_and_one_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "big", vocab_size=32768, hidden_size=512, shards=3)
    needed = memory_bytes(model_layout(load_model_config(folder)), 4)
    largest = 32768 * 512 * 2  # the bf16 embedding as it is read
    assert needed > 2.5 * largest, "the test needs weights that outweigh one tensor"
    code = (
        "import sys, torch\n"
        "from ling_local.engine import native, weights\n"
        "from ling_local.engine.config import load_model_config\n"
        "from pathlib import Path\n"
        "def peak():\n"
        "    return next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM'))\n"
        "folder = Path(sys.argv[1])\n"
        "config = load_model_config(folder)\n"
        "before = peak()\n"
        "loaded = weights.load_weights(folder, config, torch.float32, 'cpu')\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    grown = int(done.stdout) * 1024
    assert needed * 0.9 < grown < needed + largest + 16 * 2**20
