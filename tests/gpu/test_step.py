"""The whole engine on a GPU: logits by window, captured or not, overlapped or not, and text as the CPU has it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ling_local.engine.gpu import GpuOptions
from ling_local.engine.model import forward
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import Dummy
from ling_local.errors import OutOfMemory
from ling_local.paths import demo_dir
from ling_local.types import SamplingParams, StepResult, TokenRequest
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


def test_routers_in_fp32_give_a_row_its_bits_at_any_width() -> None:
    engine = load(GpuOptions(gate_fp32=True))
    assert engine.ops.gate_fp32
    assert_bits(engine.score(IDS, window=9), engine.score(IDS, window=1), "logits")
    engine.close()


def run(engine: NativeEngine, prompt: tuple[int, ...], num: int, drafts: bool, params: SamplingParams = GREEDY) -> list:
    request = TokenRequest(prompt, sampling=params, max_tokens=num, draft=drafts, full_width=drafts)
    return list(engine.generate(request))


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


@pytest.mark.parametrize("draft", ["dspark", "mtp"])
def test_drafts_change_no_token_of_two_thousand(draft: str) -> None:
    engine = load(draft=draft)
    for prompt in PROMPTS:
        plain = run(engine, prompt, 2000, drafts=False)
        drafted = run(engine, prompt, 2000, drafts=True)
        assert ids_of(drafted) == ids_of(plain)
        assert len(ids_of(plain)) == 2000
        assert sum(result.accepted for result in drafted) > 20
        assert {result.drafted for result in drafted[1:]} == {engine.info.block}
    engine.close()


@pytest.mark.parametrize(
    ("draft", "block", "pattern"),
    [
        ("dspark", 0, (0,)),
        ("dspark", 0, (8,)),
        ("dspark", 0, (3, 0, 8, 1, 5)),
        ("mtp", 3, (3, 0, 2, 1)),
        ("mtp", 1, (1,)),
    ],
)
def test_forced_accepts_leave_the_ids_and_states_of_plain_decoding(
    draft: str, block: int, pattern: tuple[int, ...]
) -> None:
    engine = NativeEngine.load(demo_dir(), "cuda", "bfloat16", draft, block=block, context=4096, accept=pattern)
    for prompt in PROMPTS[::3]:
        engine._forget()
        want = ids_of(run(engine, prompt, 300, drafts=False))
        states = states_of(engine)
        engine._forget()
        got = run(engine, prompt, 300, drafts=True)
        assert ids_of(got) == want
        counts = [result.accepted for result in got[1:-1]]
        assert counts == list(islice(cycle(pattern), len(counts)))
        for name, value in states_of(engine).items():
            assert_bits(value, states[name], name)
    engine.close()


def states_of(engine: NativeEngine) -> dict[str, Tensor]:
    """All that a sequence leaves, without the rows past its end."""
    state = engine._state
    length = int(state.length)
    parts = {name: getattr(state, name) for name in ("recurrent", "conv", "length", "anchor", "mtp_hidden")}
    parts["latent"] = state.latent[:, :length]
    if state.mtp_latent is not None:
        parts["mtp_latent"] = state.mtp_latent[:length]
    if state.draft_context is not None:
        parts["draft_context"] = state.draft_context[:, :, :length]
    return {name: value.clone() for name, value in parts.items() if value is not None}


@torch.inference_mode()
def captured_score(engine: NativeEngine, width: int) -> Tensor:
    """Logits of IDS by one graph of a window, replayed."""
    state, ids = engine.new_state(len(IDS)), torch.tensor(IDS, device="cuda")
    state.reserve(len(IDS))
    count = torch.full_like(state.length, width)

    def window() -> Tensor:
        tile = state.window(width)
        hidden = forward(engine.ops, engine.weights, state, tile.ids, tile.positions, width)
        engine.ops.kda_commit(hidden.staged, state.conv, state.recurrent, count)
        return engine.ops.head(hidden.last, engine.weights.lm_head, width)

    window()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = window()
    state.rewind()
    scored = []
    for start in range(0, len(IDS), width):
        state.anchor.copy_(ids[start])
        state.drafts[: width - 1].copy_(ids[start + 1 : start + width])
        state.stand_at(start)
        graph.replay()
        scored.append(logits[:width].clone())
    return torch.cat(scored)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
def test_a_graph_gives_the_bits_of_single_eager_rows(engine: NativeEngine, alone: Tensor, width: int) -> None:
    assert_bits(captured_score(engine, width), alone, f"captured logits at width {width}")


def test_norms_in_kernels_of_their_own_give_the_same_bits(engine: NativeEngine, alone: Tensor) -> None:
    other = load()
    other.ops.norm_in_next = False
    assert_bits(other.score(IDS, window=1), alone, "logits")
    assert_bits(captured_score(other, 1), alone, "captured logits")
    for prompt in PROMPTS[:3]:
        assert ids_of(run(other, prompt, 100, drafts=False)) == ids_of(run(engine, prompt, 100, drafts=False))
    other.close()


def test_weights_are_staged_to_the_device_to_the_bit(engine: NativeEngine) -> None:
    want = NativeEngine.load(demo_dir(), "cpu", "bfloat16", "mtp").weights
    for path, got in tensors_of(engine.weights).items():
        assert torch.equal(got.cpu(), tensors_of(want)[path]), path


def tensors_of(holder: object, path: str = "") -> dict[str, Tensor]:
    if isinstance(holder, Tensor):
        return {path: holder}
    if isinstance(holder, tuple):
        items = [(str(i), item) for i, item in enumerate(holder)]
    else:
        items = [(name, getattr(holder, name)) for name in getattr(holder, "__dataclass_fields__", ())]
    return {name: t for key, item in items for name, t in tensors_of(item, f"{path}.{key}").items()}


def test_memory_that_runs_out_is_a_sentence() -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-4)
    try:
        with pytest.raises(OutOfMemory, match="not enough memory to load the model: GPU cuda has") as caught:
            load(draft="dspark")
        assert "--device cpu" in caught.value.hint
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    with pytest.raises(OutOfMemory, match=r"dummy-flash: the weights need \d+\.\d GiB on the GPU"):
        NativeEngine.load("dummy", "cuda", "bfloat16", dummy=Dummy("flash"))


def test_a_step_is_timed_by_the_gpu(engine: NativeEngine) -> None:
    results = run(engine, PROMPTS[3], 100, drafts=False)
    seen = results[-1].time_s - results[20].time_s
    on_gpu = sum(result.gpu_s for result in results[21:])
    assert 0.3 * seen < on_gpu < 1.15 * seen
    assert gc.isenabled()


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


@pytest.mark.parametrize("drafts", [False, True])
def test_a_step_copies_nothing_to_the_host_but_the_ring(engine: NativeEngine, drafts: bool) -> None:
    request = TokenRequest(PROMPTS[2], sampling=GREEDY, max_tokens=80, draft=drafts, full_width=drafts)
    generation = engine.generate(request)
    steps = iter(generation)
    for _ in range(8):  # graphs are there
        next(steps)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(10):
            next(steps)
        torch.cuda.synchronize()
    copies = [e for e in profile.events() if "Memcpy DtoH" in e.name]
    assert 0 < len(copies) <= 14
    generation.close()
