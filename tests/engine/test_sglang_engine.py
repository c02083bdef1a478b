"""Our SGLang engine in its worker process, on a stand-in for the package; and where the package or a GPU is missing."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ling_local.engine.protocol import EngineSpec, Progress
from ling_local.engine.remote import RemoteEngine
from ling_local.engine.sglang.engine import SGLangEngine
from ling_local.errors import EngineError, UsageError
from ling_local.types import FinishReason, TokenRequest
from sglang_stand_in import COMPILER, HOPPER, environment, importable, make_spec

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return make_spec(tmp_path)


@pytest.fixture
def remote_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Processes started from here find the stand-in and a GPU; returns the file of its notes."""
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    return tmp_path / "notes"


def test_info_is_sglangs_own_account(spec: EngineSpec) -> None:
    told: list[Progress] = []
    with importable():
        engine = SGLangEngine.load(spec, told.append, HOPPER)
    info = engine.info
    assert (info.engine, info.device, info.ranks) == ("sglang 0.5.23", "cuda", 1)
    assert (info.drafter, info.block, info.context_limit) == ("dspark", 8, 64)
    assert info.parameters > 0
    assert info.weight_bytes > 2 * info.parameters  # the draft's files are among them
    assert [progress.stage for progress in told] == ["starting SGLang 0.5.23"]
    engine.close()


def test_nextn_keeps_room_for_its_drafts(spec: EngineSpec) -> None:
    with importable():
        engine = SGLangEngine.load(replace(spec, draft="mtp", block=3), None, HOPPER)
    assert (engine.info.drafter, engine.info.block, engine.info.context_limit) == ("mtp", 3, 64 - 4)
    steps = list(engine.generate(TokenRequest((1,) * 59, max_tokens=9)))
    assert (len(steps), steps[-1].finish) == (1, FinishReason.LENGTH)
    engine.close()


def test_without_the_package_it_says_what_to_install(spec: EngineSpec) -> None:
    with pytest.raises(EngineError, match="not installed") as caught:
        SGLangEngine.load(spec, None, HOPPER)
    assert "pip install 'ling-local[sglang]'" in caught.value.hint


def test_without_a_gpu_it_says_so(spec: EngineSpec) -> None:
    with importable(), pytest.raises(EngineError, match="needs an NVIDIA GPU") as caught:
        SGLangEngine.load(spec, None, [])
    assert "driver" in caught.value.hint


def test_a_package_that_cannot_be_imported_is_an_error_in_words(
    spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.engine", None)
    with importable(), pytest.raises(EngineError, match="cannot be imported") as caught:
        SGLangEngine.load(spec, None, HOPPER)
    assert "pip install" in caught.value.hint


def test_flags_that_sglang_refuses_are_named(spec: EngineSpec) -> None:
    with importable():
        with pytest.raises(UsageError, match="refuses its flags: unrecognized arguments: --tp-sizze 4"):
            SGLangEngine.load(replace(spec, passed=("tp_sizze=4",)), None, HOPPER)
        with pytest.raises(UsageError, match="invalid choice"):
            SGLangEngine.load(replace(spec, passed=("attention_backend=best",)), None, HOPPER)
        with pytest.raises(EngineError, match="not for this model"):
            SGLangEngine.load(replace(spec, passed=("speculative_algorithm=NGRAM",)), None, HOPPER)


def test_ids_of_another_vocabulary_are_refused(spec: EngineSpec) -> None:
    with importable():
        engine = SGLangEngine.load(spec, None, HOPPER)
    for ids in ((10**6,), (-1,)):
        with pytest.raises(UsageError, match="token ids"):
            engine.generate(TokenRequest(ids))
    engine.close()


def test_variables_that_are_set_stay(spec: EngineSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OPT_FUSED_KDA_VERIFY", "0")
    monkeypatch.setenv("SGLANG_RAGGED_VERIFY_MODE", "")
    monkeypatch.delenv("SGLANG_RAGGED_VERIFY_MODE")
    with importable():
        SGLangEngine.load(spec, None, HOPPER).close()
    assert os.environ["SGLANG_OPT_FUSED_KDA_VERIFY"] == "0"
    assert os.environ["SGLANG_RAGGED_VERIFY_MODE"] == "static"


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
def test_in_its_process_it_streams_cancels_and_ends_with_its_children(spec: EngineSpec, remote_env: Path) -> None:
    engine = RemoteEngine(spec)
    try:
        whole = [token for step in engine.generate(TokenRequest(PROMPT, max_tokens=30)) for token in step.ids]
        assert whole == list(range(10, 40))
        notes = json.loads(remote_env.read_text())
        assert notes["SGLANG_OPT_FUSED_KDA_VERIFY"] == "1"
        assert notes["SGLANG_RAGGED_VERIFY_MODE"] == "static"
        generation = engine.generate(TokenRequest((1,), max_tokens=50))
        steps = iter(generation)
        got = [next(steps)]
        generation.cancel()
        got += steps
        assert got[-1].finish is FinishReason.CANCELLED
        assert sum(len(step.ids) for step in got) < 50
        assert engine.info.engine == "sglang 0.5.23"
    finally:
        engine.close()
    deadline = time.monotonic() + 10
    while _runs(notes["child"]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(notes["child"])


def _runs(pid: int) -> bool:
    """A process that is there and not only waits for its parent to ask how it ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
