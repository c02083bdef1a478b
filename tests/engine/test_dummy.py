"""Random weights in the published shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ling_kernels
from checkpoints import config_json
from ling_local.engine import dummy, shapes
from ling_local.engine.config import ModelConfig, model_config
from ling_local.engine.layout import model_layout, parameter_count
from ling_local.engine.model import forward
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import Dummy, Progress
from ling_local.engine.state import SequenceState
from ling_local.errors import OutOfMemory, UsageError
from ling_local.types import TokenRequest
from published import FLASH, TINY

SMALL = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_heads": 2,
    "vocab_size": 200,
    "num_experts": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
}


@pytest.mark.parametrize(("known", "keys"), [(dummy.FLASH, FLASH), (dummy.TINY, TINY)])
def test_the_shapes_are_the_published_ones(known: ModelConfig, keys: dict) -> None:
    published = replace(model_config(config_json(**keys)), num_mtp_layers=0)
    assert parameter_count(model_layout(known)) == parameter_count(model_layout(published))
    for name in ("layer_group_size", "n_group", "topk_group", "experts_per_token", "rope_theta", "expert_limits"):
        assert getattr(known, name) == getattr(published, name), name


def test_a_rank_has_its_part() -> None:
    shard = dummy.shard_of(dummy.FLASH, 4)
    assert (shard.num_heads, shard.moe_intermediate_size, shard.hidden_size) == (8, 192, 2560)
    assert parameter_count(model_layout(shard)) < 0.27 * parameter_count(model_layout(dummy.FLASH))


def test_a_small_dummy_with_its_draft_stays_finite() -> None:
    small = replace(
        dummy.TINY, num_layers=4, hidden_size=64, num_heads=2, vocab_size=200, num_experts=16, intermediate_size=64
    )
    seen: list[Progress] = []
    weights = dummy.dummy_weights(small, torch.float32, "cpu", progress=seen.append)
    assert [p.done for p in seen] == sorted({p.done for p in seen} | {seen[-1].total})
    assert 20 < len(seen) < 103
    again = dummy.dummy_weights(small, torch.float32, "cpu")
    assert torch.equal(weights.lm_head, again.lm_head)
    drafter = dummy.dummy_draft(dummy.draft_for(small, layers=1, heads=2, block=3, rank=8), torch.float32, "cpu")
    ops, state = ling_kernels.load("cpu"), SequenceState(small, 100, torch.float32, "cpu", 200)
    drafter.attach(state, weights)
    ids, positions = torch.arange(40), torch.arange(40)
    with torch.inference_mode():
        hidden = forward(ops, weights, state, ids, positions, None, drafter.taps)
        drafter.absorb(ops, weights, state, hidden, ids, positions, None)
        state.stand_at(40)
        proposal = drafter.propose(ops, weights, state, 3)
    assert hidden.last.isfinite().all()
    assert proposal.confidence.isfinite().all()
    assert proposal.drafts.shape == (3,)


def test_settled_routing_sends_every_token_to_the_same_experts() -> None:
    small = replace(dummy.TINY, **SMALL)
    ops, h = ling_kernels.load("cpu"), torch.randn(16, small.hidden_size)
    for settled, alike in ((False, False), (True, True)):
        weights = dummy.dummy_weights(small, torch.float32, "cpu", settled=settled)
        chosen = ops.route(h, weights.layers[-1].mlp, 16).experts[:16].sort(dim=1).values
        assert bool((chosen == chosen[0]).all()) is alike


@pytest.mark.parametrize("model", ["tiny", "flash"])
def test_a_dummys_experts_are_equally_popular(model: str) -> None:
    """Or windows would read fewer of them than the floors count on: nine rows 45 of 128, and 54 of 512."""
    config = dummy.MODELS[model]
    narrow = replace(config, **(SMALL | {"num_experts": config.num_experts}))
    params = dummy.dummy_weights(narrow, torch.float32, "cpu").layers[-1].mlp
    rows = torch.randn(9 * 40, narrow.hidden_size)
    chosen = ling_kernels.load("cpu").route(rows, params, None).experts.reshape(40, -1)
    found = sum(len(window.unique()) for window in chosen) / len(chosen)
    expected = config.num_experts * (1 - (1 - 8 / config.num_experts) ** 9)
    assert found == pytest.approx(expected, rel=0.04)


def test_a_dummy_engine_runs_the_same_line_and_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(dummy.TINY, **SMALL)
    monkeypatch.setitem(shapes.MODELS, "tiny", small)
    monkeypatch.setitem(shapes.DRAFTS, "tiny", (3, 2, 3, 8, 64))
    engine = NativeEngine.load("ignored", draft="auto", context=256, dummy=Dummy("tiny", layers=4), accept=(2, 0))
    assert engine.info.model == "dummy-tiny"
    assert (engine.info.drafter, engine.info.block, engine.info.context_limit) == ("dspark", 3, 256)
    words = " ".join(engine.info.marks)
    assert "DUMMY" in words
    assert "CUT: 4 of 8 layers" in words
    assert "FORCED: accept counts 2,0" in words
    request = TokenRequest((3, 1, 4), max_tokens=20, full_width=True)
    plain = [i for step in engine.generate(replace(request, draft=False)) for i in step.ids]
    engine._forget()
    steps = list(engine.generate(request))
    assert [i for step in steps for i in step.ids] == plain
    assert {step.accepted for step in steps[1:-1]} == {0, 2}


def test_a_dummy_with_its_own_next_token_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.MODELS, "tiny", replace(dummy.TINY, **SMALL))
    engine = NativeEngine.load("ignored", draft="mtp", block=2, context=64, dummy=Dummy("tiny", shard=2))
    assert (engine.info.drafter, engine.info.block) == ("mtp", 2)
    assert engine.info.vocab_size == 100
    assert "SHARD" in engine.info.marks[1]
    assert len(list(engine.generate(TokenRequest((3, 1, 4), max_tokens=5)))) > 0


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (Dummy("huge"), "no published shape 'huge'"),
        (Dummy("tiny", layers=25), "tiny has 24 layers"),
        (Dummy("flash", shard=3), "shard of 3 ranks"),
    ],
)
def test_a_dummy_that_cannot_be_is_refused(spec: Dummy, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        NativeEngine.load("ignored", dummy=spec)


def test_what_a_whole_dummy_needs_is_said_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ling_local.engine.source.dummy_weights", lambda *_: pytest.fail("weights were made"))
    with pytest.raises(OutOfMemory, match=r"dummy-flash: the weights need 2\d\d\.\d GiB of memory, .* are free"):
        NativeEngine.load("ignored", dtype="bfloat16", dummy=Dummy("flash"))


@pytest.mark.parametrize("layers", range(1, 8))
def test_a_draft_taps_layers_that_exist_and_differ(layers: int) -> None:
    config = shapes.dummy_draft_config(Dummy("flash", layers=layers))
    assert len(set(config.target_layers)) == config.num_layers == min(layers, 5)
    assert max(config.target_layers) == layers - 1
