"""What speculation puts out, as a whole: the target's joint distribution, taps, and no trace of other requests."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from checkpoints import GOLDEN, TWO_LAYERS, write_checkpoint, write_draft
from ling_local.engine.model import forward
from ling_local.engine.native import NativeEngine
from ling_local.engine.width import PLAIN_FIRST
from ling_local.types import SamplingParams, TokenRequest
from parity import assert_close


def drafting(folder: Path, draft: str = "dspark") -> NativeEngine:
    engine = NativeEngine.load(folder, draft=draft)
    for _ in range(PLAIN_FIRST + 1):
        for times in engine.step_times.values():
            times.note(1, False, 1e3)
    return engine


def make(engine: NativeEngine, ids: tuple[int, ...], max_tokens: int, **kw) -> tuple[int, ...]:
    results = list(engine.generate(TokenRequest(ids, max_tokens=max_tokens, **kw)))
    return tuple(token for result in results for token in result.ids)


def test_three_sampled_tokens_follow_the_targets_joint_distribution(tmp_path: Path) -> None:
    vocab, draws, prompt = 5, 800, (1, 3)
    model = write_checkpoint(tmp_path / "m", vocab_size=vocab, eos_token_id=0, **TWO_LAYERS)
    write_draft(model / "dspark", model, num_hidden_layers=1, target_layer_ids=[0], block_size=2)
    engine = drafting(model)
    seen: Counter[tuple[int, ...]] = Counter()
    lengths: Counter[int] = Counter()
    for seed in range(draws):
        sampling = SamplingParams(temperature=1.2, top_k=4, seed=seed)
        results = list(engine.generate(TokenRequest(prompt, sampling=sampling, max_tokens=3, full_width=True)))
        seen[tuple(token for result in results for token in result.ids)] += 1
        lengths[len(results[1].ids)] += 1
    assert min(lengths[1], lengths[2]) > draws / 20  # drafts were refused, and drafts were right
    expected = {}
    for first, second in itertools.product(range(vocab), repeat=2):
        logits = engine.score([*prompt, first, second])[1:] / 1.2
        kept = logits.masked_fill(logits < logits.topk(4).values[:, -1:], -torch.inf)
        p = kept.double().softmax(-1)
        for third in range(vocab):
            expected[first, second, third] = float(p[0, first] * p[1, second] * p[2, third]) * draws
    assert sum(expected.values()) > 0.999 * draws
    assert not any(count for cell, count in seen.items() if expected[cell] == 0)
    large = {cell: e for cell, e in expected.items() if e >= 5}
    rest = sum(expected.values()) - sum(large.values())
    chi_squared = sum((seen[cell] - e) ** 2 / e for cell, e in large.items())
    if rest > 1:
        chi_squared += (draws - sum(seen[cell] for cell in large) - rest) ** 2 / rest
    freedom = len(large)
    # 99.9 % quantile by Wilson and Hilferty
    assert chi_squared < freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_taps_are_the_residual_stream_after_each_layer() -> None:
    engine = NativeEngine.load(GOLDEN / "flashlike")
    golden = np.load(GOLDEN / "flashlike" / "golden.npz")
    ids = torch.tensor(golden["prompt_7"])
    state = engine.new_state(7)
    tapped = (-1, 0, 2, 4)
    with torch.inference_mode():
        taps = forward(engine.ops, engine.weights, state, ids, torch.arange(7), None, tapped).taps
    assert len(taps) == 4
    for layer, tap in zip(tapped, taps, strict=True):
        assert_close(tap, golden["hidden_in_7"][layer + 1], "golden hidden states")


def test_a_greedy_answer_is_the_same_after_sampled_requests(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", seed=2)
    write_draft(model / "dspark", model)
    engine, ids = drafting(model), (4, 8, 15, 16, 23, 42)
    first = make(engine, ids, 30)
    for seed in range(3):
        make(engine, (*ids, seed), 20, sampling=SamplingParams(temperature=1.0, seed=seed))
        make(engine, (9, 9, 9), 7, sampling=SamplingParams(temperature=2.0, top_p=0.5, seed=seed))
    assert make(engine, ids, 30) == first
    assert make(NativeEngine.load(model), ids, 30) == first


def test_draft_memory_after_steps_is_what_a_prefill_would_leave(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "m", seed=2)
    write_draft(model / "dspark", model)
    for draft, name in (("dspark", "draft_context"), ("mtp", "mtp_latent")):
        engine, fresh = drafting(model, draft), drafting(model, draft)
        ids = (4, 8, 15, 16, 23, 42)
        made = make(engine, ids, 15)
        known = [*ids, *made]
        with torch.inference_mode():
            fresh._prefill(fresh._state, 0, known[:-1], known[1:])
        held = len(known) - 1
        got, want = getattr(engine._state, name), getattr(fresh._state, name)
        rows = (slice(None), slice(None), slice(held)) if draft == "dspark" else slice(held)
        assert_close(got[rows], want[rows], "fp32 forms")
