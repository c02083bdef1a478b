"""The whole engine on a GPU: logits by window, captured or not, overlapped or not, and text as the CPU has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ling_local.engine.gpu import GpuOptions
from ling_local.engine.native import NativeEngine
from ling_local.paths import demo_dir
from ling_local.types import FinishReason, SamplingParams, StepResult, TokenRequest
from parity import assert_bits

pytestmark = pytest.mark.gpu

IDS = tuple((37 * i + 11) % 4000 for i in range(64))
PROMPTS = [tuple((13 * i + 7 * n) % 4000 for i in range(5 + 9 * n)) for n in range(8)]
GREEDY = SamplingParams(temperature=0.0)


def load(gpu: GpuOptions | None = None, draft: str = "off", folder: Path | None = None) -> NativeEngine:
    return NativeEngine.load(folder or demo_dir(), "cuda", "bfloat16", draft, context=4096, gpu=gpu)


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    engine = load(draft="mtp")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def alone(engine: NativeEngine) -> Tensor:
    """Logits of 64 positions, one row at a time."""
    return engine.score(IDS, window=1)


@pytest.mark.parametrize("width", range(2, 17))
def test_windows_give_the_bits_of_single_rows(engine: NativeEngine, alone: Tensor, width: int) -> None:
    assert_bits(engine.score(IDS, window=width), alone, f"logits at width {width}")


def test_logits_are_the_references(engine: NativeEngine, alone: Tensor) -> None:
    want = NativeEngine.load(demo_dir()).score(IDS, window=1)
    for what, got in {"decoded": alone, "prefilled": engine.score(IDS)}.items():
        assert got.isfinite().all(), what
        error = (got.cpu() - want).norm(dim=-1) / want.norm(dim=-1)
        # bf16 through all layers against fp32; a row may differ more where two experts nearly tie
        assert error.quantile(0.8) < 5e-2, f"{what}: {error}"


def test_without_overlap_the_bits_are_the_same(alone: Tensor) -> None:
    plain = load(GpuOptions(pdl=False))
    assert_bits(plain.score(IDS, window=1), alone, "logits")
    assert_bits(plain.score(IDS, window=9), alone, "logits at width 9")
    plain.close()


def run(engine: NativeEngine, prompt: tuple[int, ...], num: int, drafts: bool, params: SamplingParams = GREEDY) -> list:
    return list(engine.generate(TokenRequest(prompt, sampling=params, max_tokens=num, draft=drafts)))


def ids_of(results: list[StepResult]) -> list[int]:
    return [token for result in results for token in result.ids]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(0.8, 40, 0.95, 5)], ids=["greedy", "sampled"])
def test_a_graph_run_ahead_and_an_eager_step_give_the_same_text(engine: NativeEngine, params: SamplingParams) -> None:
    eager = load(GpuOptions(capture=False, run_ahead=1), "mtp")
    for prompt in PROMPTS[:3]:
        for drafts in (False, True):
            want = ids_of(run(eager, prompt, 100, drafts, params))
            assert ids_of(run(engine, prompt, 100, drafts, params)) == want
    for name in ("recurrent", "conv"):
        assert_bits(getattr(engine._state, name), getattr(eager._state, name), name)
    eager.close()


def test_drafts_change_no_token(engine: NativeEngine) -> None:
    for prompt in PROMPTS:
        plain = run(engine, prompt, 250, drafts=False)
        drafted = run(engine, prompt, 250, drafts=True)
        assert ids_of(drafted) == ids_of(plain)
        assert any(result.drafted for result in drafted)
        assert plain[-1].finish in (FinishReason.LENGTH, FinishReason.EOS)


def test_an_answer_goes_on_where_the_last_one_ended(engine: NativeEngine) -> None:
    first = ids_of(run(engine, PROMPTS[1], 20, drafts=True))
    longer = (*PROMPTS[1], *first, 5, 6)
    again = run(engine, longer, 20, drafts=True)
    assert again[0].cached > len(PROMPTS[1])
    engine._forget()
    assert ids_of(run(engine, longer, 20, drafts=True)) == ids_of(again)


def test_text_is_the_cpus_up_to_near_ties(engine: NativeEngine) -> None:
    """Where the greedy texts part, the CPU's two best logits must be close: bf16 cannot tell them apart."""
    reference = NativeEngine.load(demo_dir())
    for prompt in PROMPTS[:4]:
        got, want = ids_of(run(engine, prompt, 60, drafts=False)), ids_of(run(reference, prompt, 60, drafts=False))
        same = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), None)
        if same is None:
            continue
        logits = reference.score((*prompt, *want[:same]), window=1)[-1]
        best = logits.topk(2).values
        margin = best[0] - best[1]
        assert margin < 0.1 * logits.std(), f"parted after {same} tokens with a margin of {margin}"


def test_a_step_copies_nothing_to_the_host_but_the_ring(engine: NativeEngine) -> None:
    generation = iter(engine.generate(TokenRequest(PROMPTS[2], sampling=GREEDY, max_tokens=40, draft=False)))
    for _ in range(8):  # graphs are there
        next(generation)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            next(generation)
        torch.cuda.synchronize()
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name]
    assert 0 < len(copies) <= 14
    generation.close()
