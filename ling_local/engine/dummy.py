"""Random weights in the published shapes, for measurements and memory tests; never an answer to anybody."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ling_local.engine.config import DraftConfig, ModelConfig
from ling_local.engine.drafts import draft_params
from ling_local.engine.dspark import DSpark
from ling_local.engine.layout import DRAFT_COPIES, TensorSpec, draft_layout, field_specs, model_layout
from ling_local.engine.weights import Weights, assemble

FLASH = ModelConfig(
    vocab_size=157184,
    hidden_size=2560,
    num_layers=42,
    num_heads=32,
    head_dim=128,
    layer_group_size=6,
    intermediate_size=6144,
    first_k_dense=2,
    num_experts=512,
    experts_per_token=8,
    n_group=8,
    topk_group=4,
    moe_intermediate_size=768,
    shared_intermediate_size=768,
    routed_scaling_factor=2.5,
    q_lora_rank=0,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=6e6,
    rms_norm_eps=1e-6,
    kda_lower_bound=-5.0,
    max_position_embeddings=262144,
    num_mtp_layers=0,
    expert_limits=(0.0,) * 35 + (4.0,) * 7,
    shared_limits=(0.0,) * 34 + (5.0,) * 6 + (7.0,) * 2,
    eos_token_ids=(),
    pad_token_id=None,
)


TINY = replace(
    FLASH,
    hidden_size=1536,
    num_layers=24,
    num_heads=16,
    layer_group_size=4,
    intermediate_size=4608,
    first_k_dense=1,
    num_experts=128,
    moe_intermediate_size=512,
    shared_intermediate_size=512,
    q_lora_rank=256,
    max_position_embeddings=131072,
    expert_limits=(),
    shared_limits=(),
)
MODELS = {"tiny": TINY, "flash": FLASH}


def shard_of(config: ModelConfig, ranks: int) -> ModelConfig:
    """The part of a model that one of `ranks` ranks computes, as a model of its own that exchanges nothing."""
    return replace(
        config,
        num_heads=config.num_heads // ranks,
        intermediate_size=config.intermediate_size // ranks,
        moe_intermediate_size=config.moe_intermediate_size // ranks,
        shared_intermediate_size=config.shared_intermediate_size // ranks,
        vocab_size=config.vocab_size // ranks,
    )


def draft_for(config: ModelConfig, layers: int = 3, heads: int = 16, block: int = 7, rank: int = 512) -> DraftConfig:
    """A DSpark draft of a usual size for a model."""
    taps = tuple(round((i + 1) * (config.num_layers - 1) / layers) for i in range(layers))
    return DraftConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        intermediate_size=4608,
        block_size=block,
        mask_token_id=config.vocab_size - 1,
        target_layers=taps,
        markov_rank=rank,
        markov_head="vanilla",
        confidence_head=True,
        confidence_with_markov=True,
        sample_from_anchor=True,
        rope_theta=config.rope_theta,
        rope_neox=True,
        rope_dim=128,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
    )


def dummy_weights(config: ModelConfig, dtype: torch.dtype, device: str, seed: int = 0) -> Weights:
    """A whole model of random weights on `device`, the same for the same seed and device."""
    return assemble(config, _fields(model_layout(config), dtype, device, seed))


def dummy_draft(config: DraftConfig, dtype: torch.dtype, device: str, seed: int = 1) -> DSpark:
    """A draft of random weights."""
    own = [spec for spec in draft_layout(config) if spec.name not in DRAFT_COPIES]
    temperatures = torch.ones(config.block_size, device=device)
    return DSpark(config, draft_params(config, _fields(own, dtype, device, seed), temperatures), config.block_size)


def _fields(specs: list[TensorSpec], dtype: torch.dtype, device: str, seed: int) -> dict[str, Tensor]:
    """Values by which a product keeps the size of its input: activations stay finite, routing and gates alive."""
    generator = torch.Generator(device).manual_seed(seed)
    fields = {}
    for field in field_specs(specs):
        value = torch.empty(field.shape, dtype=torch.float32 if field.fp32 else dtype, device=device)
        if "norm" in field.name:
            value.fill_(1.0)
        elif len(field.shape) == 1:
            value.normal_(0.0, 0.1, generator=generator)
        else:
            value.normal_(0.0, field.shape[-1] ** -0.5, generator=generator)
        fields[field.name] = value
    return fields
