"""Two GPUs as one: an exchange that works, the text of one GPU, drafts that change nothing, ranks that end together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from ling_local.engine.links import find_links, try_exchange
from ling_local.engine.memory import free_bytes
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import EngineSpec
from ling_local.engine.remote import RemoteEngine
from ling_local.errors import EngineDied, ExchangeTimeout
from ling_local.paths import demo_dir
from ling_local.types import FinishReason, SamplingParams, TokenRequest
from ranks import assert_same_up_to_a_near_tie, ids_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(0.8, 40, 0.95, 5)
PROMPTS = [tuple((13 * i + 7 * n) % 4000 for i in range(5 + 9 * n)) for n in range(4)]
A_LITTLE = 256 << 20  # bytes; a rank's context alone takes more
SPEC = EngineSpec(str(demo_dir()), device="cuda", dtype="bfloat16", context=4096, gpus=(0, 1))


@contextmanager
def started(spec: EngineSpec) -> Iterator[RemoteEngine]:
    engine = RemoteEngine(spec)
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[RemoteEngine]:
    """Two ranks for all tests that leave them running: it takes ten seconds to start them."""
    with started(SPEC) as engine:
        yield engine


def test_an_exchange_works_and_is_timed() -> None:
    trial = try_exchange((0, 1))
    assert trial.kind in ("peer memory", "NCCL"), trial.note
    assert 0 < trial.one_row_us < 200
    first = find_links()[0]
    assert (first.first, first.second) == (0, 1)


def test_drafts_change_no_token_and_the_text_is_one_gpus_up_to_near_ties(engine: RemoteEngine) -> None:
    assert engine.info.ranks == 2
    one = NativeEngine.load(demo_dir(), "cuda", "bfloat16", context=4096)
    for prompt in PROMPTS:
        plain = ids_of(engine, prompt, 250, False, GREEDY)
        assert ids_of(engine, prompt, 250, True, GREEDY) == plain
        assert_same_up_to_a_near_tie(plain, ids_of(one, prompt, 250, False, GREEDY), one, prompt, near=0.1)
    one.close()
    sampled = ids_of(engine, PROMPTS[2], 200, False, SAMPLED)
    assert ids_of(engine, PROMPTS[2], 200, True, SAMPLED) == sampled


def test_turns_and_cancels_keep_the_ranks_in_step(engine: RemoteEngine) -> None:
    generation = engine.generate(TokenRequest(PROMPTS[1], sampling=GREEDY, max_tokens=2000))
    steps = iter(generation)
    first = [token for _ in range(9) for token in next(steps).ids]
    generation.cancel()
    assert list(steps)[-1].finish is FinishReason.CANCELLED
    longer = (*PROMPTS[1], *first[:4], 7)
    again = ids_of(engine, longer, 60, True, GREEDY)
    assert ids_of(engine, longer, 60, False, GREEDY) == again


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_hangs_ends_all_within_five_seconds(rank: int, number: signal.Signals) -> None:
    before = free_bytes("cuda:1")
    with started(replace(SPEC, draft="off")) as engine:
        steps = iter(engine.generate(TokenRequest(PROMPTS[0], sampling=GREEDY, max_tokens=3900, draft=False)))
        next(steps)
        assert free_bytes("cuda:1") < before - A_LITTLE
        begun = time.monotonic()
        os.kill(engine.pids[rank], number)
        with pytest.raises((EngineDied, ExchangeTimeout), match=f"rank {rank}"):
            list(steps)
        assert time.monotonic() - begun < 5
    while free_bytes("cuda:1") < before - A_LITTLE:
        assert time.monotonic() - begun < 15, "the GPU's memory is still taken"
        time.sleep(0.1)
