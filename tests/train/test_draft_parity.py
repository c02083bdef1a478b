"""The training forms of sampler, taps and draft against the engine's: one definition, computed in bulk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from checkpoints import GOLDEN, write_checkpoint, write_draft
from ling_kernels.ops import Sampling
from ling_kernels.reference import ReferenceOps
from ling_local.engine.drafts import load_dspark
from ling_local.engine.model import forward
from ling_local.engine.native import NativeEngine
from ling_local.train.draft_export import read_draft
from ling_local.train.draft_losses import row_terms, row_terms_in_chunks
from ling_local.train.draft_net import W2, blocks, draft_hidden, make_draft_net
from ling_local.train.draft_prompts import Prompts
from ling_local.train.draft_sampler import Sampler
from ling_local.train.draft_target import Target, features, open_target, scores
from ling_local.types import SamplingParams, TokenRequest
from parity import assert_close

END = 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model"), seed=1, pad_token_id=END)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return open_target(folder)


def make_prompts(lists: list[list[int]], limit: int) -> Prompts:
    whole = [[END, *ids] for ids in lists]
    lengths = np.array([len(ids) for ids in whole], dtype=np.int32)
    tokens = np.concatenate([np.array(ids, dtype=np.int32) for ids in whole])
    return Prompts(tokens, lengths, np.full_like(lengths, limit), np.array(["code"] * len(lists)))


def engine_ids(folder: Path, ids: list[int], count: int, sampling: SamplingParams) -> list[int]:
    engine = NativeEngine.load(folder)
    results = engine.generate(
        TokenRequest(tuple(ids), sampling=sampling, max_tokens=count, stop_ids=frozenset({3, END}))
    )
    return [token for result in results for token in result.ids]


PROMPTS = [[5, 17, 99, 42, 8, 8, 120], [77], [31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21], [9, 10]]


def test_rows_continue_as_the_engine_does_greedy_and_sampled(folder: Path, target: Target) -> None:
    sampler = Sampler(target, make_prompts(PROMPTS, 40), rows=4, length=52)
    heat, seeds = torch.tensor([0.0, 0.0, 0.7, 1.0]), torch.tensor([0, 0, 11, 12])
    made = sampler.run(0, heat, seeds)
    for row, ids in enumerate(PROMPTS):
        sampling = SamplingParams(float(heat[row]), seed=int(seeds[row]))
        wanted = engine_ids(folder, ids, 40, sampling)
        assert made.tokens[row, : len(ids)].tolist() == ids
        got = made.tokens[row, len(ids) : len(ids) + len(wanted)].tolist()
        assert got == wanted
        assert made.answered[row, : len(ids) + len(wanted)].tolist() == [False] * len(ids) + [True] * len(wanted)
    again = sampler.run(0, heat, seeds)
    assert torch.equal(again.tokens, made.tokens)


def test_low_rank_queries_and_production_head_sizes_continue_as_the_engine_does() -> None:
    folder = GOLDEN / "tinylike_realdims"
    target = open_target(folder)
    golden = np.load(folder / "golden.npz")
    prompts = {n: golden[f"prompt_{n}"].astype(np.int32) for n in (7, 65)}
    tokens = np.concatenate(list(prompts.values()))
    skip = 0 if target.end_id is None else 1
    if skip:
        tokens = np.concatenate([np.concatenate(([target.end_id], ids)) for ids in prompts.values()]).astype(np.int32)
    lengths = np.array([n + skip for n in prompts], dtype=np.int32)
    table = Prompts(tokens, lengths, np.array([32, 32], dtype=np.int32), np.array(["code"] * 2))
    made = Sampler(target, table, rows=2, length=97).run(0, torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    stops = set(target.stop_ids)
    for row, n in enumerate(prompts):
        wanted = golden[f"greedy_tokens_{n}"].tolist()
        ends = [i for i, token in enumerate(wanted) if token in stops]
        wanted = wanted[: ends[0] + 1] if ends else wanted
        assert made.tokens[row, n : n + len(wanted)].tolist() == wanted


def test_a_row_goes_on_with_its_next_prompt_when_an_answer_ends(target: Target) -> None:
    lists, length, limit = [[5, 6], [7, 8, 9], [10, 11], [12]], 400, 40
    sampler = Sampler(target, make_prompts(lists, limit), rows=2, length=length)
    made = sampler.run(0, torch.full((2,), 8.0), torch.tensor([1, 2]))
    ends = set()
    for row in range(2):
        tokens, answered = made.tokens[row].tolist(), made.answered[row].tolist()
        at, number = 0, row
        while at < length:
            # between two documents stands one end id: the row's, or the one that the target ended with
            fed = lists[number] if at == 0 or tokens[at - 1] == END else [END, *lists[number]]
            fed = fed[: length - at]
            assert tokens[at : at + len(fed)] == fed
            assert not any(answered[at : at + len(fed)])
            at += len(fed)
            stops = [i for i in range(at, length) if tokens[i] in target.stop_ids][:1]
            stop = min([*[i + 1 for i in stops], at + limit, length])
            assert all(answered[at:stop])
            ends.add(tokens[stop - 1] if tokens[stop - 1] in target.stop_ids else "limit")
            at, number = stop, (number + 2) % 4
    assert ends == {"limit", *target.stop_ids}


def test_taps_and_final_rows_are_the_engines(folder: Path, target: Target) -> None:
    ids = [(i * 37 + 11) % 128 for i in range(70)]
    engine = NativeEngine.load(folder)
    state = engine.new_state(80)
    with torch.inference_mode():
        state.reserve(len(ids))
        wanted = forward(
            engine.ops, engine.weights, state, torch.tensor(ids), torch.arange(len(ids)), None, (-1, 0, 2, 3)
        )
    taps, final = features(target, torch.tensor([ids, ids[::-1]]), (-1, 0, 2, 3))
    assert_close(taps[0], torch.cat(wanted.taps, -1), "fp32 forms")
    assert_close(final[0], wanted.last, "fp32 forms")
    assert (taps[1] - taps[0]).abs().max() > 0.1


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1},
        {"rope_is_neox_style": False, "rope_scaling": {"rope_dim": 8}},
        {"sample_from_anchor": False, "confidence_head_with_markov": False, "block_size": 5},
    ],
)
def test_a_block_in_training_form_is_the_engines(folder: Path, target: Target, tmp_path: Path, head: str, changes):
    write_draft(tmp_path, folder, markov_head_type=head, **changes)
    drafter = load_dspark(tmp_path, NativeEngine.load(folder).weights.config, torch.float32, "cpu")
    config, params = read_draft(tmp_path, target.config)
    ids = torch.tensor([[(i * 29 + 3) % 128 for i in range(50)]])
    anchors = [1, 17, 41]
    taps, _ = features(target, ids, config.target_layers)
    draft = make_draft_net(config, 50, "cpu", torch.float32)
    hidden = draft_hidden(draft, params, target.embedding, taps, ids, torch.tensor([anchors]))
    for number, anchor in enumerate(anchors):
        wanted_hidden, wanted = _engine_block(drafter, target, taps[0], ids[0], anchor)
        assert_close(hidden[0, number], wanted_hidden, "fp32 forms")
        previous = torch.cat([ids[0, anchor : anchor + 1], wanted.drafts[:-1]])
        tail = blocks(draft, params, hidden[0, number], previous)
        logits = scores(tail.hidden, target.head) + tail.markov @ params[W2].t()
        assert logits.argmax(-1).tolist() == wanted.drafts.tolist()
        assert_close(torch.sigmoid(tail.confidence), wanted.confidence, "fp32 forms")


def _engine_block(drafter, target: Target, taps: torch.Tensor, ids: torch.Tensor, anchor: int):
    """Final rows and greedy picks by the reference ops. Context rows at and after the anchor hold rubbish."""
    ops, config, params = ReferenceOps(), drafter.config, drafter.params
    cache = torch.full((config.num_layers, 2, 64, config.num_kv_heads, config.head_dim), 7.0)
    rope = make_draft_net(config, 64, "cpu", torch.float32).rope
    ops.draft_context(taps[:anchor], params, cache, rope, torch.arange(anchor), anchor)
    first = 0 if config.sample_from_anchor else 1
    tokens = torch.cat([ids[anchor : anchor + 1], torch.full((config.block_size - 1 + first,), config.mask_token_id)])
    x = ops.embed(tokens, target.embedding)
    hidden = ops.draft_block(x, params, cache, rope, torch.tensor(anchor), 64)[first:]
    one = torch.ones(())
    greedy = Sampling(True, one, torch.zeros((), dtype=torch.int64), one, torch.zeros((), dtype=torch.int64), 128)
    places = anchor + torch.arange(config.block_size)
    return hidden, ops.markov_pick(ops.head(hidden, target.head), hidden, ids[anchor], params, places, greedy)


def test_one_row_without_markov_bias_is_a_plain_next_token_head(folder: Path, target: Target, tmp_path: Path) -> None:
    write_draft(tmp_path, folder, block_size=1, num_hidden_layers=1)
    config, params = read_draft(tmp_path, target.config)
    params[W2] = torch.zeros_like(params[W2])
    ids = torch.tensor([[(i * 29 + 3) % 128 for i in range(20)]])
    at = torch.arange(20)[None]
    taps, final = features(target, ids, config.target_layers)
    draft = make_draft_net(config, 20, "cpu", torch.float32)
    hidden = draft_hidden(draft, params, target.embedding, taps, ids, at)
    tail = blocks(draft, params, hidden, ids[..., None])
    terms = row_terms(
        tail.hidden.flatten(0, 2),
        tail.markov.flatten(0, 2),
        params[W2],
        target.head,
        final[0],
        ids[0],
        torch.ones(20),
    )
    logits = scores(_causal_layer(params, config, target, taps[0], ids[0]), target.head)
    want = torch.nn.functional.cross_entropy(logits, ids[0], reduction="none")
    assert_close(terms.ce, want, "fp32 forms")
    overlap = torch.minimum(logits.softmax(-1), scores(final[0], target.head).softmax(-1)).sum(-1)
    assert_close(terms.alpha, overlap, "fp32 forms")


def _causal_layer(params, config, target: Target, taps: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """An ordinary transformer layer, one token at a time: queries from tokens, keys from earlier taps and itself."""
    from ling_kernels.reference.mla import rope_table

    def norm(x, weight):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rotated(x, angles):
        cos, sin = angles.chunk(2, -1)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    layer = {name.removeprefix("layers.0."): value for name, value in params.items()}
    heads = (config.num_heads, config.head_dim)
    table = rope_table(len(ids), config.head_dim, config.rope_theta)
    context = norm(taps @ params["fc.weight"].t(), params["hidden_norm.weight"])
    rows = []
    for t, token in enumerate(ids.tolist()):
        x = target.embedding[token]
        own = norm(x, layer["input_layernorm.weight"])
        q = norm((layer["self_attn.q_proj.weight"] @ own).view(heads), layer["self_attn.q_norm.weight"])
        seen = torch.cat([context[:t], own[None]])
        keys = (seen @ layer["self_attn.k_proj.weight"].t()).view(-1, *heads)
        keys = torch.stack([rotated(norm(k, layer["self_attn.k_norm.weight"]), table[i]) for i, k in enumerate(keys)])
        values = (seen @ layer["self_attn.v_proj.weight"].t()).view(-1, *heads)
        chance = torch.einsum("hd,thd->ht", rotated(q, table[t]), keys).div(config.head_dim**0.5).softmax(-1)
        x = x + layer["self_attn.o_proj.weight"] @ torch.einsum("ht,thd->hd", chance, values).flatten()
        y = norm(x, layer["post_attention_layernorm.weight"])
        inner = torch.nn.functional.silu(layer["mlp.gate_proj.weight"] @ y) * (layer["mlp.up_proj.weight"] @ y)
        rows.append(norm(x + layer["mlp.down_proj.weight"] @ inner, params["norm.weight"]))
    return torch.stack(rows)


def test_rows_in_chunks_give_the_same_terms_and_gradients() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(11, 8, requires_grad=True), torch.randn(11, 4, requires_grad=True)]
    w2, head, wanted = torch.randn(30, 4, requires_grad=True), torch.randn(30, 8), torch.randn(11, 8)
    rest = (w2, head, wanted, torch.arange(11), torch.full((11,), 0.7))
    found = []
    for elements in (2**20, 30 * 3):
        terms = row_terms_in_chunks(*inputs, *rest, elements=elements)
        for leaf in (*inputs, w2):
            leaf.grad = None
        (terms.ce.sum() - 3 * terms.alpha.sum()).backward()
        found.append((terms.ce, terms.alpha, terms.hit, *(leaf.grad.clone() for leaf in (*inputs, w2))))
    for whole, parts in zip(*found, strict=True):
        assert torch.allclose(whole, parts, atol=1e-6)


def test_config_of_an_untied_mask_is_needed(folder: Path, target: Target) -> None:
    from ling_local.errors import EngineError
    from ling_local.train.draft_target import mask_token_id

    with pytest.raises(EngineError, match="mask"):
        mask_token_id(folder, target.config)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 9, "content": "<|mask|>"}]}))
    assert mask_token_id(folder, target.config) == 9
    (folder / "tokenizer.json").unlink()
