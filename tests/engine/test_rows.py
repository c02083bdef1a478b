"""A row's bits never depend on how many rows run beside it: the ground on which speculation stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import GOLDEN, write_checkpoint
from ling_kernels.ops import ROW_TILE
from ling_local.engine.model import forward
from ling_local.engine.native import NativeEngine
from ling_local.engine.state import SequenceState
from ling_local.engine.width import PIECE
from parity import assert_bits

LENGTH = 64
MODELS = {
    "flash shape": {"num_nextn_predict_layers": 0},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 96},
    "many experts": {"num_experts": 64, "n_group": 8, "topk_group": 4, "q_lora_rank": 32},
}


@pytest.fixture(scope="module", params=[*MODELS, "flashlike", "tinylike_realdims"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in MODELS:
        return write_checkpoint(tmp_path_factory.mktemp("model"), seed=3, **MODELS[request.param])
    return GOLDEN / request.param


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine(request: pytest.FixtureRequest, folder: Path) -> NativeEngine:
    return NativeEngine.load(folder, dtype=request.param)


def run_windows(engine: NativeEngine, ids: list[int], width: int) -> tuple[torch.Tensor, SequenceState]:
    """Logits of all ids by committed windows of `width` rows, and the state they leave."""
    state = engine.new_state(len(ids))
    with torch.inference_mode():
        logits = [engine._verify_all(state, at, ids[at : at + width]) for at in range(0, len(ids), width)]
    return torch.cat(logits), state


def random_ids(engine: NativeEngine, seed: int, length: int = LENGTH) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, engine.info.vocab_size, (length,), generator=generator).tolist()


def test_windows_of_every_width_give_the_bits_of_single_rows(engine: NativeEngine) -> None:
    ids = random_ids(engine, 1)
    alone, after = run_windows(engine, ids, 1)
    assert alone.isfinite().all()
    for width in range(2, ROW_TILE + 1):
        logits, state = run_windows(engine, ids, width)
        assert_bits(logits, alone, f"logits at width {width}")
        for name in ("recurrent", "conv"):
            assert_bits(getattr(state, name), getattr(after, name), f"{name} at width {width}")
        assert_bits(state.latent[:, :LENGTH], after.latent[:, :LENGTH], f"latent rows at width {width}")


def test_rows_past_the_window_and_the_extent_change_nothing(engine: NativeEngine) -> None:
    ids = random_ids(engine, 2, 20)
    state = engine.new_state(400)
    with torch.inference_mode():
        engine._prefill(state, 0, ids[:10], ids[1:11])
        kept = state.snapshot(ids[:10])
        results = []
        for rubbish, extent in ((0, 128), (5, 256), (7, 384)):
            state.restore(kept)
            state.extent = extent
            window = torch.full((ROW_TILE,), rubbish)
            window[:3] = torch.tensor(ids[10:13])
            hidden = forward(engine.ops, engine.weights, state, window, torch.arange(ROW_TILE) + 10, 3)
            results.append(hidden.last[:3])
    assert_bits(results[1], results[0], "hidden rows")
    assert_bits(results[2], results[0], "hidden rows")


def test_two_threads_give_the_bits_of_one(engine: NativeEngine) -> None:
    ids = random_ids(engine, 4, PIECE + 1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone, _ = run_windows(engine, ids, 1)
        torch.set_num_threads(2)
        both, _ = run_windows(engine, ids, len(ids))
    finally:
        torch.set_num_threads(threads)
    assert_bits(both, alone, "logits")
