"""What is needed and what is free, before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import write_checkpoint
from ling_local.engine import memory
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import Dummy, Progress
from ling_local.engine.source import DummySource, FolderSource
from ling_local.engine.state import rows_by_position
from ling_local.errors import OutOfMemory

GIB = 2**30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", seed=8)


def test_a_context_is_cut_to_what_fits_unless_it_was_asked_for(folder: Path) -> None:
    weights = NativeEngine.load(folder).weights
    room = memory.WORKING_BYTES + memory.state_bytes(weights, None, 50_000)
    assert memory.fitting_context(weights, None, 40_000, room, asked=True) == 40_000
    fits = memory.fitting_context(weights, None, 90_000, room, asked=False)
    assert 49_000 < fits <= 50_200
    assert memory.state_bytes(weights, None, fits) <= room - memory.WORKING_BYTES
    with pytest.raises(OutOfMemory, match="context of 90000 tokens") as caught:
        memory.fitting_context(weights, None, 90_000, room, asked=True)
    assert f"--ctx {fits} or less" in caught.value.hint
    with pytest.raises(OutOfMemory, match="are free beside the weights"):
        memory.fitting_context(weights, None, 90_000, memory.WORKING_BYTES, asked=False)


def test_the_size_of_a_state_is_known_before_it_is_made(folder: Path) -> None:
    engine = NativeEngine.load(folder, draft="mtp", context=300)
    held = sum(value.nbytes for value in vars(engine._state).values() if isinstance(value, Tensor))
    assert memory.state_bytes(engine.weights, engine.drafter, 300) == held == engine.info.state_bytes


def test_a_long_context_takes_memory_only_as_it_is_written() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    rows = rows_by_position((2, 2**16, 576), torch.bfloat16, "cpu")
    assert resident() - before < rows.nbytes / 4
    assert rows.data_ptr() % 64 == 0
    assert not rows[:, ::1024].any()


def test_a_cleared_state_has_nothing_left_of_a_longer_sequence_before(folder: Path) -> None:
    state = NativeEngine.load(folder, draft="mtp", context=400)._state
    state.reserve(390)
    state.latent[:, 389] = state.mtp_latent[389] = torch.nan
    state.reserve(10)
    state.clear()
    assert not state.latent.any()
    assert not state.mtp_latent.any()


def test_a_ghost_weighs_what_the_weights_do(folder: Path) -> None:
    source = FolderSource(folder)
    ghost = source.ghost(torch.float32)
    assert ghost.embedding.is_meta
    assert memory.bytes_of(ghost) == memory.bytes_of(source.weights(torch.float32, "cpu", None))
    assert memory.bytes_of(ghost) == NativeEngine.load(folder).info.weight_bytes


def plan(free_gib: float, wanted: int = 131072, asked: bool = False) -> memory.MemoryPlan:
    source = DummySource(Dummy("tiny"), "auto")
    ghost = source.ghost(torch.bfloat16)
    draft = source.drafter(ghost, "auto", 0)
    return memory.plan_gpu(source.name, ghost, draft, wanted, int(free_gib * GIB), asked)


def test_a_plan_names_all_parts_and_what_is_free() -> None:
    told: list[Progress] = []
    roomy = plan(139)
    roomy.tell(told.append)
    assert [p.say for p in told] == ["note"]
    text = told[0].stage
    assert "139.0 GiB free" in text
    assert f"{roomy.context:,} tokens of context" in text
    assert roomy.context == 131072
    assert 13.5 * GIB < roomy.weights < 15.5 * GIB
    assert 0.3 * GIB < roomy.draft < 1 * GIB
    assert roomy.needed == roomy.weights + roomy.draft + roomy.state + memory.WORKING_BYTES


def test_a_cut_context_is_a_warning() -> None:
    told: list[Progress] = []
    tight = plan(18.2)
    tight.tell(told.append)
    assert [p.say for p in told] == ["note", "warning"]
    assert tight.context < 131072
    assert tight.needed <= 18.2 * GIB
    assert f"{tight.context:,} tokens of the model's 131,072" in told[1].stage


def test_what_cannot_fit_says_both_numbers_before_a_byte_is_read() -> None:
    with pytest.raises(OutOfMemory, match=r"dummy-tiny: the weights need 1\d\.\d GiB .* 8\.0 GiB are free"):
        plan(8)
    with pytest.raises(OutOfMemory, match="a context of 131072 tokens needs") as caught:
        plan(18.2, asked=True)
    assert "give --ctx" in caught.value.hint


def test_a_small_model_needs_no_words(folder: Path) -> None:
    told: list[Progress] = []
    NativeEngine.load(folder, progress=told.append)
    assert not [p for p in told if p.say]
