"""`ling doctor --check-model`: whole checkpoints pass, and each kind of damage is named with its repair."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from checkpoints import GOLDEN, config_json, write_checkpoint, write_draft
from ling_local import paths
from ling_local.doctor.checks import Check, Status
from ling_local.doctor.model import check_model
from ling_local.doctor.weights import _READ, read_bytes
from ling_local.engine.checkpoint import Entry, read_entries
from ling_local.engine.config import model_config
from ling_local.engine.layout import DTYPE_BYTES, model_layout
from program import Program, seen, watch

NAN, INF = 0x7FC0, 0xFF80
HEAD, NORM = "lm_head.weight", "model.norm.weight"
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A copy of the demo model, to be damaged."""
    return shutil.copytree(paths.demo_dir(), tmp_path / "my model")


def checks(folder: Path) -> dict[str, list[Check]]:
    found: dict[str, list[Check]] = {}
    for check in check_model(folder, lambda done, total: None):
        found.setdefault(check.name, []).append(check)
    return found


def write_words(folder: Path, name: str, words: Callable[[np.ndarray], None]) -> None:
    """Change a bf16 tensor where it lies."""
    entry = read_entries(folder)[name]
    place = np.memmap(entry.file, np.uint16, "r+", entry.offset, (entry.num_bytes // 2,))
    words(place)
    place.flush()


def edit(folder: Path, file: str, **changes: Any) -> None:
    data = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**data, **changes}))


def test_the_demo_passes_and_nothing_is_loaded(ling: Program, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('nobody may load torch here')\n")
    done = ling("doctor", "--check-model", "ling-demo", "--json", env={"PYTHONPATH": extended(tmp_path)})
    assert (done.code, done.json["ok"], done.json["model"]) == (0, True, "ling-demo")
    rows = {row["name"]: row for row in done.json["checks"]}
    assert list(rows) == ["config", "files", "draft", "weights", "tokenizer", "ends", "template"]
    assert {row["status"] for row in rows.values()} == {"pass"}
    assert rows["files"]["detail"].startswith("412 tensors (398 bf16, 14 f32) in 2 files, 9.7 M parameters")
    assert rows["weights"]["detail"].startswith("441 tensors, no NaN or Inf, no matrix of zeros")
    assert "'<|role_end|>'" in rows["ends"]["detail"]


def extended(folder: Path) -> str:
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_a_checkpoint_of_another_implementation_has_sound_weights_and_lacks_its_tokenizer() -> None:
    found = checks(GOLDEN / "flashlike")
    assert {name: rows[0].status for name, rows in found.items()} == {
        "config": Status.PASS,
        "files": Status.PASS,
        "weights": Status.PASS,
        "tokenizer": Status.FAIL,
    }
    assert "tokenizer.json is missing" in found["tokenizer"][0].detail


def cut(folder: Path) -> None:
    file = folder / FIRST
    file.write_bytes(file.read_bytes()[:-1])


def drop(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def one_bad(word: int) -> Callable[[Path], None]:
    return lambda folder: write_words(folder, HEAD, lambda words: words.__setitem__(words.size - 7, word))


def fill(name: str, word: int) -> Callable[[Path], None]:
    return lambda folder: write_words(folder, name, lambda words: words.fill(word))


def scale(folder: Path) -> None:  # as if the scales of an fp8 checkpoint had been lost
    write_words(folder, HEAD, lambda words: words.__setitem__(slice(None), (words & 0x807F) | 0x4380))


def all_norms_one(folder: Path) -> None:
    for each in (folder, folder / "dspark"):
        for name in read_entries(each):
            if name.endswith("norm.weight"):
                write_words(each, name, lambda words: words.fill(0x3F80))


def tokenizer_of_more_rows(folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    data["added_tokens"].append({**data["added_tokens"][0], "id": 4096, "content": "<|extra|>"})
    (folder / "tokenizer.json").write_text(json.dumps(data))


def other_end_in_the_template(folder: Path) -> None:
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace("<|role_end|>", "<|mask|>"))


DAMAGE: dict[str, tuple[Callable[[Path], object], str, Status, str]] = {
    "a shard cut": (cut, "files", Status.FAIL, f"{FIRST}: .* bytes long, its header says"),
    "a shard gone": (drop(FIRST), "files", Status.FAIL, f"{FIRST}: this file is missing"),
    "no index": (drop("model.safetensors.index.json"), "files", Status.FAIL, "2 weight files but no model.safe"),
    "no config": (drop("config.json"), "config", Status.FAIL, "config.json: the folder has no config.json"),
    "another width": (lambda f: edit(f, "config.json", hidden_size=128), "files", Status.FAIL, "has shape"),
    "another vocabulary": (lambda f: edit(f, "config.json", vocab_size=5000), "files", Status.FAIL, "has shape"),
    "a NaN": (one_bad(NAN), "weights", Status.FAIL, r"NaN or Inf in lm_head\.weight \(1 of 1,048,576\)"),
    "an Inf": (one_bad(INF), "weights", Status.FAIL, r"NaN or Inf in lm_head\.weight \(1 of 1,048,576\)"),
    "a norm of NaN": (fill(NORM, NAN), "weights", Status.FAIL, r"NaN or Inf in model\.norm\.weight \(256 of 256\)"),
    "zeros": (fill(HEAD, 0), "weights", Status.WARN, "nothing but zeros in lm_head.weight"),
    "negative zeros": (fill(HEAD, 0x8000), "weights", Status.WARN, "nothing but zeros in lm_head.weight"),
    "one value": (fill(HEAD, 0x3C00), "weights", Status.WARN, "one value throughout in lm_head.weight"),
    "no scales": (scale, "weights", Status.WARN, r"lm_head\.weight \(up to 5\d\d\)"),
    "untrained": (all_norms_one, "weights", Status.WARN, "norms hold nothing but ones, as before training"),
    "a draft of another model": (
        lambda f: edit(f / "dspark", "config.json", hidden_size=128),
        "draft",
        Status.FAIL,
        "the draft is for a model with",
    ),
    "no weights of the draft": (drop("dspark/model.safetensors"), "draft", Status.FAIL, "no weights"),
    "no tokenizer": (drop("tokenizer.json"), "tokenizer", Status.FAIL, "tokenizer.json is missing"),
    "a larger tokenizer": (tokenizer_of_more_rows, "tokenizer", Status.FAIL, "ids up to 4,096; the model has 4,096"),
    "an end outside": (
        lambda f: edit(f, "generation_config.json", eos_token_id=[1, 5000]),
        "ends",
        Status.FAIL,
        "eos_token_id 5000 is no token",
    ),
    "an end that text spells": (
        lambda f: edit(f, "generation_config.json", eos_token_id=[1, 300]),
        "ends",
        Status.WARN,
        "300 .* ends an answer, and text can spell it",
    ),
    "no template": (drop("chat_template.jinja"), "template", Status.FAIL, "has no chat template"),
    "a broken template": (
        lambda f: (f / "chat_template.jinja").write_text("{% for %}"),
        "template",
        Status.FAIL,
        "not a valid chat template",
    ),
    "another end in the template": (other_end_in_the_template, "template", Status.WARN, "it ends a turn with none"),
    "an unknown special token": (
        lambda f: edit(f, "tokenizer_config.json", eos_token="</s>"),
        "template",
        Status.FAIL,
        "eos_token </s>: no token of this tokenizer",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_with_a_repair(demo: Path, damage: str) -> None:
    break_it, name, status, words = DAMAGE[damage]
    break_it(demo)
    found = checks(demo)
    rows = [row for row in found[name] if row.status is status]
    assert len(rows) == 1
    assert rows[0].fix
    assert re.search(words, rows[0].detail)
    unsound = {row.name for rows in found.values() for row in rows if row.status is not Status.PASS}
    assert unsound == {name}, "one kind of damage is one line"


def test_a_draft_without_copies_of_the_models_tensors_passes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    write_draft(folder / "dspark", folder, alias=True, prefix="model.")
    assert checks(folder)["draft"][0].status is Status.PASS


def test_a_tensor_larger_than_one_read_is_looked_at_to_its_last_value(tmp_path: Path) -> None:
    file, count = tmp_path / "w", _READ // 2 + 3
    words = np.full(count, 0x3F80, np.uint16)
    words.tofile(file)
    entry = Entry(file, "BF16", (1, count), 0, 2 * count)
    told: list[tuple[int, int]] = []
    (read,) = read_bytes({"w": entry}, lambda *progress: told.append(progress))
    assert (read.values[0].bad, read.values[0].largest, read.values[0].first) == (0, 1.0, 1.0)
    assert told
    assert {total for _, total in told} == {2 * count}
    words[-1] = NAN
    words[0] = 0x4000
    words.tofile(file)
    (read,) = read_bytes({"w": entry}, lambda *progress: None)
    assert (read.values[0].bad, read.values[0].largest, read.values[0].first) == (1, 2.0, None)


def in_the_cache(home: Path) -> tuple[Path, str]:
    """The demo as a snapshot of the Hugging Face cache, its files named by their hashes; (snapshot, repository)."""
    place = home / ".cache/huggingface/hub/models--someone--my-ling"
    snapshot = place / "snapshots" / ("a" * 40)
    (place / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in paths.demo_dir().iterdir():
        if file.is_file():
            data = file.read_bytes()
            blob = place / "blobs" / hashlib.sha256(data).hexdigest()
            blob.write_bytes(data)
            (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot, "someone/my-ling"


def test_files_of_the_cache_are_compared_with_their_hashes_without_a_network(ling: Program) -> None:
    snapshot, repo = in_the_cache(ling.home)
    whole = ling("doctor", "--check-model", repo, "--offline")
    assert whole.code == 0
    assert "pass hashes            2 files have the hash" in whole.text
    blob = (snapshot / FIRST).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1  # one bit, with a sound header and sound values
    blob.write_bytes(data)
    done = ling("doctor", "--check-model", repo, "--offline")
    assert done.code == 1
    assert f"fail hashes            not the bytes that were published: {FIRST}" in done.text
    assert f"ling pull {repo} --verify" in done.text


def test_a_name_that_is_not_here_and_one_that_is_incomplete(ling: Program) -> None:
    done = ling("doctor", "--check-model", "nosuch", "--json")
    assert (done.code, [row["status"] for row in done.json["checks"]]) == (1, ["fail"])
    assert "not on this machine" in done.json["checks"][0]["detail"]
    snapshot, repo = in_the_cache(ling.home)
    (snapshot / FIRST).unlink()
    found = {row["name"]: row for row in ling("doctor", "--check-model", repo, "--json").json["checks"]}
    assert "this file is missing" in found["files"]["detail"]
    assert found["tokenizer"]["status"] == "pass"


def test_answers_tell_a_model_from_noise(ling: Program, demo: Path) -> None:
    done = ling("doctor", "--check-model", "ling-demo", "--answers", "--json", timeout=240)
    rows = {row["name"]: row for row in done.json["checks"]}
    assert done.code == 0
    assert "3 of 3 known continuations" in rows["answers"]["detail"]
    assert "guessed right" in rows["guesses"]["detail"]
    # rows in another order: nothing about the files shows it
    write_words(demo, HEAD, lambda words: words.__setitem__(slice(None), np.roll(words, 256 * 100)))
    done = ling("doctor", "--check-model", demo, "--answers", timeout=240)
    assert done.code == 1
    assert "pass weights" in done.text
    assert "fail guesses           0 of" in done.text or "fail guesses           1 of" in done.text
    assert "fail answers           0 of 3 known continuations; 'import numpy as np' came as" in done.text


def test_a_damaged_model_is_not_asked(ling: Program, demo: Path) -> None:
    cut(demo)
    done = ling("doctor", "--check-model", demo, "--answers")
    assert done.code == 1
    assert "warn answers           not asked" in done.text


def test_answers_alone_are_used_wrongly(ling: Program) -> None:
    done = ling("doctor", "--answers")
    assert (done.code, done.err) == (2, "ling: --answers needs a model. Name it: --check-model NAME.\n")


def test_a_bar_runs_on_a_terminal(ling: Program, demo: Path) -> None:
    text, code = seen(watch(ling, "doctor", "--check-model", demo))
    assert code == 0
    assert re.search("\rreading [█░]{24} +\\d+ %  [\\d.]+ of 0.02 GB", text.decode())


def test_ctrl_c_ends_it_within_a_moment(ling: Program, tmp_path: Path) -> None:
    data = config_json(vocab_size=2**25)  # an embedding of 4 GB, and a head
    (tmp_path / "config.json").write_text(json.dumps(data))
    header, end = {}, 0
    for spec in model_layout(model_config(data)):
        size = spec.numel * DTYPE_BYTES[spec.dtype]
        header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)  # sparse: it takes time to read, and no room
    running = ling.start("doctor", "--check-model", tmp_path, "-v")
    assert running.stderr is not None
    for line in running.stderr:
        if b"files: after" in line:
            break
    os.kill(running.pid, signal.SIGINT)
    started = time.monotonic()
    out, err = running.communicate(timeout=30)
    assert running.returncode == 130
    assert time.monotonic() - started < 5
    assert b"weights" not in out
    assert b"Traceback" not in err
