"""The GPU's exchange between ranks, run on a CPU: each rank's kernels in a process of its own, over shared memory."""

from __future__ import annotations

import os
from ast import literal_eval
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

import pytest

import emulated_ranks
from checkpoints import write_checkpoint, write_draft
from emulator import ORDERS, load_units
from ling_kernels.cuda.compile import units
from ling_local.engine.native import NativeEngine
from ling_local.types import SamplingParams, TokenRequest

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def folder(built: Path) -> Path:
    """Where the ranks find their kernels."""
    load_units(units(), built)
    return built


def run_ranks(
    check: str, folder: Path, size: int = 2, gathered: bool = False, orders: Sequence[str] = ORDERS[:1]
) -> None:
    """Run a check on every rank, in forks of this process, which has imported all; what fails says why on stderr."""
    fd = os.memfd_create("emulated-ranks", 0)
    started = [(check, rank, size, fd, folder, gathered, orders) for rank in range(size)]
    ranks = [get_context("fork").Process(target=emulated_ranks.run, args=args) for args in started]
    for rank in ranks:
        rank.start()
    os.close(fd)
    try:
        running = list(ranks)
        while running and not any(rank.exitcode for rank in ranks):
            wait([rank.sentinel for rank in running])
            running = [rank for rank in running if rank.exitcode is None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert [rank.exitcode for rank in ranks] == [0] * size


def test_sums_choices_and_picks_are_the_references_in_every_order_of_threads(folder: Path) -> None:
    run_ranks("ops", folder, orders=ORDERS)


def test_four_ranks(folder: Path) -> None:
    run_ranks("ops", folder, size=4)


def test_the_fallback_gives_the_same(folder: Path) -> None:
    run_ranks("ops", folder, gathered=True)


def test_a_silent_rank_is_named_and_waited_for_once(folder: Path) -> None:
    run_ranks("silence", folder)


def test_an_engine_of_two_ranks_finds_the_tokens_of_one(folder: Path) -> None:
    shape = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "rotary_dim": 64,
        "v_head_dim": 128,
        "expert_swiglu_limit_list": [0, 4],
        "share_expert_swiglu_limit_list": [0, 5],
        "num_nextn_predict_layers": 0,
    }
    model = write_checkpoint(folder / "model", seed=5, **shape)
    changes = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 2, "target_layer_ids": [0, 1]}
    write_draft(model / "dspark", model, block_size=4, **changes)
    run_ranks("engine", folder)
    first, second = ((folder / f"ids{rank}").read_text() for rank in (0, 1))
    assert first == second
    got = literal_eval(first)[0]
    alone = NativeEngine.load(model, dtype="bfloat16", context=64, threads=1)
    request = TokenRequest((3, 10, 17, 24, 31), sampling=SamplingParams(temperature=0.0), max_tokens=4, draft=False)
    want = [token for result in alone.generate(request) for token in result.ids]
    parted = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    if parted is not None:  # bf16 sums in another order: only a near tie may fall otherwise
        best = alone.score((*request.ids, *want[:parted]), window=1)[-1].topk(2).values
        assert best[0] - best[1] < 3e-2 * alone.score(request.ids, window=1)[-1].std()
