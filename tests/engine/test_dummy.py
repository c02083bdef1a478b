"""Random weights in the published shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import ling_kernels
from checkpoints import config_json
from ling_local.engine import dummy
from ling_local.engine.config import ModelConfig, model_config
from ling_local.engine.layout import model_layout, parameter_count
from ling_local.engine.model import forward
from ling_local.engine.state import SequenceState
from published import FLASH, TINY


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
    weights = dummy.dummy_weights(small, torch.float32, "cpu")
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
