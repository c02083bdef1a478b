"""Two GPUs as one: an exchange that works, the text of one GPU, drafts that change nothing, ranks that end together."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from ling_local.engine.links import find_links, try_exchange
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import EngineSpec
from ling_local.engine.remote import RemoteEngine
from ling_local.errors import EngineDied, ExchangeTimeout
from ling_local.paths import demo_dir
from ling_local.types import FinishReason, SamplingParams, TokenRequest

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(0.8, 40, 0.95, 5)
PROMPTS = [tuple((13 * i + 7 * n) % 4000 for i in range(5 + 9 * n)) for n in range(4)]
SPEC = EngineSpec(str(demo_dir()), device="cuda", dtype="bfloat16", context=4096, gpus=(0, 1))


@pytest.fixture
def start() -> Iterator[Callable[..., RemoteEngine]]:
    opened: list[RemoteEngine] = []

    def open_one(spec: EngineSpec = SPEC) -> RemoteEngine:
        opened.append(RemoteEngine(spec))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def ids_of(
    engine: RemoteEngine | NativeEngine, prompt: tuple[int, ...], num: int, drafts: bool, params: SamplingParams
):
    request = TokenRequest(prompt, sampling=params, max_tokens=num, draft=drafts)
    return [token for result in engine.generate(request) for token in result.ids]


def test_an_exchange_works_and_is_timed() -> None:
    trial = try_exchange((0, 1))
    assert trial.kind in ("peer memory", "NCCL"), trial.note
    assert 0 < trial.one_row_us < 200
    first = find_links()[0]
    assert (first.first, first.second) == (0, 1)


def test_drafts_change_no_token_and_the_text_is_one_gpus_up_to_near_ties(start: Callable[..., RemoteEngine]) -> None:
    engine = start()
    assert engine.info.ranks == 2
    one = NativeEngine.load(demo_dir(), "cuda", "bfloat16", context=4096)
    for prompt in PROMPTS:
        plain = ids_of(engine, prompt, 250, False, GREEDY)
        assert ids_of(engine, prompt, 250, True, GREEDY) == plain
        want = ids_of(one, prompt, 250, False, GREEDY)
        parted = next((i for i, (a, b) in enumerate(zip(plain, want, strict=False)) if a != b), None)
        if parted is not None:
            logits = one.score((*prompt, *want[:parted]), window=1)[-1]
            best = logits.topk(2).values
            margin = ((best[0] - best[1]) / logits.std()).item()
            print(f"prompt of {len(prompt)}: parted after {parted} tokens, margin {margin:.1e} standard deviations")
            assert margin < 0.1
    one.close()
    sampled = ids_of(engine, PROMPTS[2], 200, False, SAMPLED)
    assert ids_of(engine, PROMPTS[2], 200, True, SAMPLED) == sampled


def test_turns_and_cancels_keep_the_ranks_in_step(start: Callable[..., RemoteEngine]) -> None:
    engine = start()
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
def test_a_rank_that_ends_or_hangs_ends_all_within_five_seconds(
    start: Callable[..., RemoteEngine], rank: int, number: signal.Signals
) -> None:
    engine = start()
    steps = iter(engine.generate(TokenRequest(PROMPTS[0], sampling=GREEDY, max_tokens=3900, draft=False)))
    next(steps)
    begun = time.monotonic()
    os.kill(engine.pids[rank], number)
    with pytest.raises((EngineDied, ExchangeTimeout), match=f"rank {rank}"):
        list(steps)
    assert time.monotonic() - begun < 5
    engine.close()
    deadline = time.monotonic() + 10
    while torch.cuda.mem_get_info(1)[0] < 0.9 * torch.cuda.mem_get_info(1)[1] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert torch.cuda.mem_get_info(1)[0] > 0.9 * torch.cuda.mem_get_info(1)[1]
