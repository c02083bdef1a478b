"""NativeEngine through its door: prefixes and snapshots, cancel, limits, errors, sampling."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from ling_kernels.ops import ROW_TILE, KernelError
from ling_local.engine.native import CHUNK, NativeEngine
from ling_local.errors import ContextTooLong, EngineBusy, EngineError, LingError, NonFinite, OutOfMemory, UsageError
from ling_local.types import FinishReason, SamplingParams, StepResult, TokenRequest
from parity import assert_bits, assert_close

PROMPT = (5, 17, 99, 3, 42, 8, 8, 120, 77, 31)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture
def engine(folder: Path) -> NativeEngine:
    return NativeEngine.load(folder)


def run(engine: NativeEngine, ids: Sequence[int], max_tokens: int = 12, **kw) -> list[StepResult]:
    return list(engine.generate(TokenRequest(tuple(ids), max_tokens=max_tokens, **kw)))


def tokens(results: list[StepResult]) -> tuple[int, ...]:
    return tuple(token for result in results for token in result.ids)


def greedy(folder: Path, ids: Sequence[int], max_tokens: int = 12, **kw) -> tuple[int, ...]:
    return tokens(run(NativeEngine.load(folder), ids, max_tokens, **kw))


def state_of(engine: NativeEngine) -> dict[str, torch.Tensor]:
    state, held = engine._state, len(engine._ids)
    return {"recurrent": state.recurrent, "conv": state.conv, "latent": state.latent[:, :held]}


def test_prefill_and_steps_leave_the_same_state(engine: NativeEngine) -> None:
    ids = list(range(60))
    stepped, chunked = engine.new_state(60), engine.new_state(60)
    with torch.inference_mode():
        engine._prefill(chunked, 0, ids, [*ids[1:], 0])
        for at, token in enumerate(ids):
            engine._verify_all(stepped, at, [token])
    for name in ("recurrent", "conv", "latent"):
        assert_close(getattr(chunked, name), getattr(stepped, name), "fp32 forms")


def test_a_longer_request_computes_only_what_is_new(folder: Path, engine: NativeEngine) -> None:
    first = run(engine, PROMPT, 6)
    longer = (*PROMPT, *tokens(first), 11, 12, 13, 14)
    second = run(engine, longer)
    # the last token of the answer was never run: it is the first new one
    assert second[0].cached == len(PROMPT) + 6 - 1
    assert second[0].prefilled == 4
    assert first[0].cached == 0
    assert first[0].prefilled == len(PROMPT) - 1
    assert all((r.cached, r.prefilled) == (0, 0) for r in second[1:])
    # the same passes on a fresh engine leave the same bits
    fresh = NativeEngine.load(folder)
    with torch.inference_mode():
        fresh._prefill(fresh._state, 0, PROMPT[:-1], PROMPT[1:])
        for at, token in enumerate(longer[len(PROMPT) - 1 : -5]):
            fresh._verify_all(fresh._state, len(PROMPT) - 1 + at, [token])
        fresh._prefill(fresh._state, len(longer) - 5, longer[-5:-1], longer[-4:])
        known = longer[-1:] + tokens(second)
        for at, token in enumerate(known[:-1]):
            fresh._verify_all(fresh._state, len(longer) - 1 + at, [token])
    fresh._ids = engine._ids
    for name, got in state_of(engine).items():
        assert_bits(got, state_of(fresh)[name], name)


def test_the_same_request_again_prefills_nothing(folder: Path, engine: NativeEngine) -> None:
    first = run(engine, PROMPT)
    again = run(engine, PROMPT)
    assert tokens(again) == tokens(first)
    assert (again[0].cached, again[0].prefilled) == (len(PROMPT) - 1, 0)


def test_a_shared_part_restores_the_newest_snapshot(folder: Path, engine: NativeEngine) -> None:
    turn1 = run(engine, PROMPT, 4)
    turn2_ids = (*PROMPT, *tokens(turn1), 50, 51, 52)
    run(engine, turn2_ids, 4)
    other = (*PROMPT, *tokens(turn1), 60, 61)
    result = run(engine, other)
    assert result[0].cached == len(PROMPT) + 4 - 1
    assert tokens(result) == greedy(folder, other)
    unrelated = (1, 2, 3)
    assert run(engine, unrelated)[0].cached == 0


def test_a_snapshot_with_overwritten_latent_rows_is_never_used(folder: Path, engine: NativeEngine) -> None:
    long = PROMPT + PROMPT[::-1]
    run(engine, long)
    run(engine, (*PROMPT[:3], 100, 101, 102, 103, 104))
    assert tokens(run(engine, long)) == greedy(folder, long)


def test_long_prompts_are_prefilled_in_chunks(folder: Path) -> None:
    ids = [(i * 7) % 128 for i in range(CHUNK + 20)]
    engine = NativeEngine.load(folder)
    result = run(engine, ids, 3)
    assert result[0].prefilled == len(ids) - 1
    assert_close(engine.score(ids, chunk=CHUNK), engine.score(ids, window=1), "fp32 forms")


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel_ends_within_a_step_and_the_next_request_is_right(
    folder: Path, engine: NativeEngine, after: int
) -> None:
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=50))
    seen: list[StepResult] = []
    if after == 0:
        generation.cancel()
    for result in generation:
        seen.append(result)
        if len(seen) == after:
            generation.cancel()
    assert seen[-1].finish is FinishReason.CANCELLED
    assert len(seen) <= after + 1
    assert tokens(seen) == greedy(folder, PROMPT, 50)[: len(tokens(seen))]
    kept = (*PROMPT, *tokens(seen), 9)
    assert tokens(run(engine, kept)) == greedy(folder, kept)


def test_cancel_during_a_long_prefill_stops_between_chunks(folder: Path) -> None:
    engine = NativeEngine.load(folder)
    generation = engine.generate(TokenRequest(tuple([1] * 500), max_tokens=5))
    prefill, calls = engine._prefill, []

    def counted(*args):
        calls.append(1)
        generation.cancel()
        return prefill(*args)

    engine._prefill = counted
    assert [r.finish for r in generation] == [FinishReason.CANCELLED]
    assert len(calls) == 1


def test_one_generation_at_a_time_and_an_abandoned_one_frees_the_engine(engine: NativeEngine) -> None:
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=9))
    results = iter(generation)
    next(results)
    with pytest.raises(EngineBusy):
        engine.generate(TokenRequest(PROMPT))
    generation.close()
    for _ in engine.generate(TokenRequest(PROMPT, max_tokens=9)):
        break
    gc.collect()
    never_started = engine.generate(TokenRequest(PROMPT))
    del never_started
    gc.collect()
    assert len(tokens(run(engine, PROMPT, 9))) == 9


@pytest.mark.parametrize("how", ["close", "break", "cancel"])
def test_steps_granted_ahead_of_an_abandoned_answer_stay_in_the_state(folder: Path, how: str) -> None:
    engine = NativeEngine.load(folder)
    engine.run_ahead = 3
    generation = engine.generate(TokenRequest(PROMPT, max_tokens=50))
    made: list[int] = []
    for result in generation:
        made += result.ids
        if len(made) == 2 and how == "cancel":
            generation.cancel()
        elif len(made) == 2:
            break
    generation.close()
    assert len(made) == (4 if how == "cancel" else 2)
    assert len(engine._ids) == int(engine._state.length) == len(PROMPT) - 1 + 4
    longer = (*PROMPT, *made, 9)
    assert tokens(run(engine, longer)) == greedy(folder, longer)


@pytest.mark.parametrize("run_ahead", [1, 3])
@pytest.mark.parametrize("place", [0, 1, 4, 11])
def test_a_stop_id_ends_there_and_leaves_the_state_of_plain_decoding(folder: Path, run_ahead: int, place: int) -> None:
    plain = greedy(folder, PROMPT)
    stop = plain[place]
    first = plain.index(stop)
    engine = NativeEngine.load(folder)
    engine.run_ahead = run_ahead
    results = run(engine, PROMPT, stop_ids=frozenset({stop, 127}))
    assert tokens(results) == plain[: first + 1]
    assert results[-1].finish is FinishReason.EOS
    assert all(r.finish is None for r in results[:-1])
    clean = NativeEngine.load(folder)
    run(clean, PROMPT, first + 1)
    for name, got in state_of(engine).items():
        assert_bits(got, state_of(clean)[name], name)


@pytest.mark.parametrize("run_ahead", [1, 2, 3])
def test_the_length_limit_is_exact(folder: Path, run_ahead: int) -> None:
    engine = NativeEngine.load(folder)
    engine.run_ahead = run_ahead
    results = run(engine, PROMPT, 7)
    assert len(tokens(results)) == 7
    assert results[-1].finish is FinishReason.LENGTH
    assert int(engine._state.length) == len(PROMPT) + 6


def test_generation_ends_where_the_context_is_full(folder: Path) -> None:
    engine = NativeEngine.load(folder, context=16)
    results = run(engine, PROMPT, 100)
    assert len(tokens(results)) == 16 - len(PROMPT)
    assert results[-1].finish is FinishReason.LENGTH
    assert tokens(results) == greedy(folder, PROMPT, 6)


def test_bad_requests_are_refused_before_work(folder: Path) -> None:
    engine = NativeEngine.load(folder, context=16)
    with pytest.raises(ContextTooLong, match=r"prompt has 16 tokens.*holds 16"):
        engine.generate(TokenRequest(tuple(range(16))))
    for request in (TokenRequest(()), TokenRequest((128,)), TokenRequest((-1,)), TokenRequest((1,), max_tokens=0)):
        with pytest.raises(UsageError):
            engine.generate(request)
    with pytest.raises(UsageError, match="stop ids"):
        engine.generate(TokenRequest((1,), stop_ids=frozenset(range(17))))
    assert len(tokens(run(engine, (1,), 3))) == 3


@pytest.mark.parametrize("run_ahead", [1, 3])
def test_nan_stops_with_the_step_named_and_the_next_request_is_clean(folder: Path, run_ahead: int) -> None:
    engine = NativeEngine.load(folder)
    engine.run_ahead = run_ahead
    plain = tokens(run(engine, PROMPT))
    poison = next(token for token in plain if token not in PROMPT)
    step = plain.index(poison)
    kept = engine.weights.embedding[poison].clone()
    engine.weights.embedding[poison] = torch.nan
    made: list[StepResult] = []
    with pytest.raises(NonFinite, match=rf"step {step + 1}, position {len(PROMPT) + step}"):
        made.extend(engine.generate(TokenRequest(PROMPT, max_tokens=12)))
    assert tokens(made) == plain[: step + 1]
    engine.weights.embedding[poison] = kept
    longer = (*PROMPT, *plain[: step + 1], 9)
    result = run(engine, longer)
    assert result[0].cached == 0
    assert tokens(result) == greedy(folder, longer)
    engine.weights.embedding[poison] = torch.nan
    with pytest.raises(NonFinite, match="step 0"):
        run(engine, (poison, *PROMPT))


def test_close_is_final_and_may_be_repeated(engine: NativeEngine) -> None:
    results = iter(engine.generate(TokenRequest(PROMPT)))
    next(results)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(TokenRequest(PROMPT))


SAMPLED = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=7)


def test_a_seed_reproduces_and_another_differs(folder: Path, engine: NativeEngine) -> None:
    once = tokens(run(engine, PROMPT, 30, sampling=SAMPLED))
    assert tokens(run(engine, PROMPT, 30, sampling=SAMPLED)) == once
    assert greedy(folder, PROMPT, 30, sampling=SAMPLED) == once
    other = SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=8)
    assert tokens(run(engine, PROMPT, 30, sampling=other)) != once
    assert tokens(run(engine, PROMPT, 30)) == greedy(folder, PROMPT, 30)


def test_the_first_answer_after_a_load_is_that_of_later_ones(folder: Path, engine: NativeEngine) -> None:
    """C107, and C105 in one process: whatever the state holds, a seed gives the same ids."""
    first = tokens(run(engine, PROMPT, 30, sampling=SAMPLED))
    run(engine, PROMPT[3:], 8)
    assert tokens(run(engine, PROMPT, 30, sampling=SAMPLED)) == first
    longer = (*PROMPT, *first[:7])
    assert run(engine, longer, 1, sampling=SAMPLED)[0].cached > 0
    assert tokens(run(engine, longer, 12, sampling=SAMPLED)) == greedy(folder, longer, 12, sampling=SAMPLED)


def test_top_k_of_one_is_greedy(engine: NativeEngine) -> None:
    params = SamplingParams(temperature=2.0, top_k=1, seed=3)
    assert tokens(run(engine, PROMPT, sampling=params)) == tokens(run(engine, PROMPT))


def test_a_top_k_beyond_the_vocabulary_filters_nothing(engine: NativeEngine) -> None:
    beyond, off = (SamplingParams(temperature=1.5, top_k=k, seed=3) for k in (10**20, 0))
    assert tokens(run(engine, PROMPT, sampling=beyond)) == tokens(run(engine, PROMPT, sampling=off))


def test_bfloat16_runs_and_is_close(folder: Path, engine: NativeEngine) -> None:
    low = NativeEngine.load(folder, dtype="bfloat16")
    assert len(tokens(run(low, PROMPT, 20))) == 20
    exact, rough = engine.score(PROMPT), low.score(PROMPT)
    assert ((rough - exact).norm() / exact.norm()).item() < 0.1


@pytest.mark.parametrize("width", [2, 9, ROW_TILE])
def test_any_committed_prefix_of_a_window_is_what_single_rows_leave(engine: NativeEngine, width: int) -> None:
    ids = [(i * 31) % 128 for i in range(10 + width)]
    with torch.inference_mode():
        base = engine.new_state(64)
        engine._prefill(base, 0, ids[:10], ids[1:11])
        start = base.snapshot([])
        plain = [start]
        for row in range(width):
            engine._verify_all(base, 10 + row, [ids[10 + row]])
            plain.append(base.snapshot([]))
        for count in range(width + 1):
            base.restore(start)
            commit, counted = engine.ops.kda_commit, torch.tensor(count)
            engine.ops.kda_commit = lambda *args, n=counted, c=commit: c(*args[:-1], n)
            engine._verify_all(base, 10, ids[10:])
            engine.ops.kda_commit = commit
            assert_bits(base.recurrent, plain[count].recurrent, f"recurrent after {count} of {width}")
            assert_bits(base.conv, plain[count].conv, f"conv after {count} of {width}")


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (MemoryError(), OutOfMemory),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), OutOfMemory),
        (KernelError("kernel route was not launched: out of memory"), OutOfMemory),
        (KernelError("kernel route was not launched: invalid argument"), EngineError),
    ],
)
def test_an_error_inside_a_pass_leaves_nothing_half_done(
    folder: Path, engine: NativeEngine, error: BaseException, seen: type
) -> None:
    run(engine, PROMPT, 3)
    longer = (*PROMPT, 9, 9, 9, 9)
    plain = engine.ops.route
    calls: list[int] = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise error
        return plain(*args, **kwargs)

    engine.ops.route = failing
    with pytest.raises(seen) as caught:
        run(engine, longer)
    if isinstance(caught.value, LingError):
        assert caught.value.hint
    engine.ops.route = plain
    result = run(engine, longer)
    assert result[0].cached == 0
    assert tokens(result) == greedy(folder, longer)


def test_nothing_is_collected_during_a_generation(folder: Path, engine: NativeEngine) -> None:
    assert gc.isenabled()
    for end in ("finish", "close", "abandon"):
        steps = iter(engine.generate(TokenRequest(PROMPT, max_tokens=4)))
        next(steps)
        assert not gc.isenabled()
        if end == "finish":
            list(steps)
        elif end == "close":
            steps.close()
        del steps
        assert gc.isenabled(), end
