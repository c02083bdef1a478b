"""Several ranks compute what one does: parts of the weights, sums in rank order, the same ids."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints import config_json, write_checkpoint, write_draft
from ling_local.engine import dummy
from ling_local.engine.checkpoint import check_files
from ling_local.engine.config import draft_config, load_model_config, model_config
from ling_local.engine.generation import CHUNK
from ling_local.engine.layout import model_layout
from ling_local.engine.memory import MemoryPlan
from ling_local.engine.native import NativeEngine, _agree
from ling_local.engine.shard import SIZES, Shard, check_size, largest_size, rank_config
from ling_local.engine.weights import fill_fields, read_tensor
from ling_local.errors import UsageError
from ling_local.paths import demo_dir
from ling_local.types import FinishReason, SamplingParams, TokenRequest
from parity import assert_bits
from published import DRAFT, FLASH, TINY
from ranks import assert_same_up_to_a_near_tie, boards, ids_of, ranks_of

PROMPT = tuple((37 * i + 11) % 4000 for i in range(30))
GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(0.8, 30, 0.9, 3)
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize("size", [2, 4])
def test_parts_are_the_whole_cut_where_the_table_says(tmp_path: Path, size: int) -> None:
    folder = write_checkpoint(tmp_path / "m", **WIDE)
    config = load_model_config(folder)
    specs = model_layout(config, size)
    entries = check_files(folder, specs)
    for rank in range(size):
        shard = Shard(rank, size)
        part = fill_fields(specs, entries, torch.float32, "cpu", shard=shard)
        for spec in specs:
            whole = read_tensor(entries[spec.name], spec).float()[shard.slices(spec)]
            held = part[spec.field] if spec.expert is None else part[spec.field][spec.expert]
            rows = held[spec.row : spec.row + spec.local_shape(size)[0]]
            assert_bits(rows.flatten(), whole.flatten(), spec.name)


def test_a_rank_reads_its_part_only(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", **WIDE)
    config = load_model_config(folder)
    said = []
    specs = model_layout(config, 4)
    fill_fields(specs, check_files(folder, specs), torch.float32, "cpu", said.append, Shard(1, 4))
    whole = sum(entry.num_bytes for entry in check_files(folder, specs).values())
    assert said[-1].done == said[-1].total
    assert said[-1].total < 0.65 * whole  # whole rows are read where each rank needs a part of every row


@pytest.mark.parametrize("changes", [FLASH, TINY])
@pytest.mark.parametrize("size", SIZES)
def test_the_published_models_are_shared_by_every_number_of_ranks(changes: dict, size: int) -> None:
    config = model_config(config_json(**changes))
    check_size(config, size)
    assert largest_size(config, size) == size
    local = rank_config(config, size)
    assert local.num_heads * size == config.num_heads
    assert local.vocab_size == config.vocab_size


def test_what_cannot_be_shared_is_said() -> None:
    config = model_config(config_json())
    check_size(config, 2)
    with pytest.raises(UsageError, match="4 GPUs do not share 2 attention heads"):
        check_size(config, 4)
    with pytest.raises(UsageError, match="1, 2, 4 or 8"):
        check_size(config, 3)
    flash = model_config(config_json(**FLASH))
    draft = draft_config({**DRAFT, "num_key_value_heads": 2}, flash)
    with pytest.raises(UsageError, match="key heads of the draft"):
        check_size(flash, 4, draft)
    assert largest_size(flash, 8, draft) == 2


def test_a_dummy_is_the_same_model_at_any_number_of_ranks() -> None:
    small = replace(dummy.TINY, num_layers=4, hidden_size=64, num_heads=2, vocab_size=256, num_experts=16)
    whole = dummy.dummy_weights(small, torch.float32, "cpu")
    parts = [dummy.dummy_weights(small, torch.float32, "cpu", shard=Shard(rank, 2)) for rank in range(2)]
    assert_bits(torch.cat([part.lm_head for part in parts]), whole.lm_head, "head")
    assert_bits(
        torch.cat([part.layers[2].mlp.down for part in parts], dim=-1), whole.layers[2].mlp.down, "experts' output"
    )
    rows = whole.layers[1].attention.in_proj.split([256] * 5 + [2])
    mine = parts[1].layers[1].attention.in_proj.split([128] * 5 + [1])
    for name, all_rows, own in zip("qkvfgb", rows, mine, strict=True):
        assert_bits(own, all_rows[own.shape[0] :], name)


def test_all_ranks_hold_what_the_fullest_gpu_can_and_know_all_gpus() -> None:
    plans = [MemoryPlan(1, 1, 1, 1, free=90, context=4096, wanted=9999), MemoryPlan(1, 1, 1, 1, 80, 2048, 9999)]
    with ThreadPoolExecutor(2) as pool:
        agreed = list(pool.map(_agree, boards(2), plans, [("GPU-a",), ("GPU-b",)]))
    assert agreed == [(plans[1], ("GPU-a", "GPU-b"))] * 2


@pytest.fixture(scope="module")
def alone() -> NativeEngine:
    return NativeEngine.load(demo_dir(), draft="dspark", threads=1)


@pytest.fixture(scope="module")
def pair() -> Iterator[list[NativeEngine]]:
    with ranks_of(demo_dir(), draft="dspark") as engines:
        yield engines


def test_two_ranks_say_what_one_does(alone: NativeEngine, pair: list[NativeEngine]) -> None:
    assert [engine.info.ranks for engine in pair] == [2, 2]
    lead = pair[0]
    plain = ids_of(lead, PROMPT, 30, False, GREEDY)
    assert_same_up_to_a_near_tie(plain, ids_of(alone, PROMPT, 30, True, GREEDY), alone, PROMPT)
    assert ids_of(lead, PROMPT, 30, True, GREEDY) == plain
    sampled = ids_of(lead, PROMPT, 20, True, SAMPLED)
    assert ids_of(lead, PROMPT, 20, False, SAMPLED) == sampled
    lead.score((1,))  # the other rank has done what was said before
    states = [engine._state for engine in pair]
    for name in ("length", "anchor", "latent", "ring", "drafts"):
        assert_bits(getattr(states[1], name), getattr(states[0], name), f"{name} of rank 1")


def test_two_ranks_over_a_long_text_with_drafts(alone: NativeEngine, pair: list[NativeEngine]) -> None:
    got = ids_of(pair[0], PROMPT, 2000, True, GREEDY)
    assert_same_up_to_a_near_tie(got, ids_of(alone, PROMPT, 2000, True, GREEDY), alone, PROMPT)


def test_two_ranks_after_two_chunks_of_a_prompt(alone: NativeEngine, pair: list[NativeEngine]) -> None:
    """And an answer that passes a piece of the attention."""
    prompt = tuple((37 * i * i + 11) % 4000 for i in range(2 * CHUNK - 20))
    got = ids_of(pair[0], prompt, 40, True, GREEDY)
    assert_same_up_to_a_near_tie(got, ids_of(alone, prompt, 40, True, GREEDY), alone, prompt)


@pytest.mark.parametrize(("size", "draft"), [(2, "mtp"), (4, "dspark")])
def test_other_drafters_and_more_ranks(tmp_path: Path, size: int, draft: str) -> None:
    folder = write_checkpoint(tmp_path / "m", **WIDE)
    write_draft(folder / "dspark", folder, num_attention_heads=4, num_key_value_heads=4, markov_head_type="rnn")
    alone = NativeEngine.load(folder, draft=draft, threads=1)
    prompt = tuple(range(5, 25))
    with ranks_of(folder, size, draft=draft) as engines:
        for params in (GREEDY, SAMPLED):
            got = ids_of(engines[0], prompt, 8, True, params)
            assert ids_of(engines[0], prompt, 8, False, params) == got
            if params is GREEDY:
                assert_same_up_to_a_near_tie(got, ids_of(alone, prompt, 8, False, params), alone, prompt)


def test_a_row_has_its_bits_to_itself_at_two_ranks(alone: NativeEngine, pair: list[NativeEngine]) -> None:
    ids = PROMPT[:18]
    single = pair[0].score(ids, window=1)
    for width in (4, 9, 16):
        assert_bits(pair[0].score(ids, window=width), single, f"logits at width {width}")
    error = (single - alone.score(ids, window=1)).abs().max()
    assert error < 1e-3 * single.std()


def test_turns_cancels_and_snapshots_keep_all_ranks_in_step(alone: NativeEngine, pair: list[NativeEngine]) -> None:
    lead = pair[0]
    lead._forget()
    generation = lead.generate(TokenRequest(PROMPT, sampling=GREEDY, max_tokens=200))
    steps = iter(generation)
    first = [token for _ in range(6) for token in next(steps).ids]
    generation.cancel()
    assert [result.finish for result in steps][-1] is FinishReason.CANCELLED
    longer = (*PROMPT, *first[:3], 5, 6)
    results = list(lead.generate(TokenRequest(longer, sampling=GREEDY, max_tokens=20)))
    assert results[0].cached == len(PROMPT) - 1  # a snapshot was restored, on both ranks
    got = [token for result in results for token in result.ids]
    lead._forget()
    assert ids_of(lead, longer, 20, True, GREEDY) == got
    assert_same_up_to_a_near_tie(got, ids_of(alone, longer, 20, True, GREEDY), alone, longer)
    lead.score((1,))
    assert [len(engine._snapshots) for engine in pair] == [len(lead._snapshots)] * 2
