"""Random weights in the published shapes, for measurements and memory tests; never an answer to anybody."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ling_local.engine.config import DraftConfig, ModelConfig
from ling_local.engine.drafts import draft_params
from ling_local.engine.dspark import DSpark
from ling_local.engine.layout import DRAFT_COPIES, TensorSpec, draft_layout, field_specs, model_layout
from ling_local.engine.shard import WHOLE, Shard, rank_config, rank_draft
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
    return replace(rank_config(config, ranks), vocab_size=config.vocab_size // ranks)


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


def dummy_weights(config: ModelConfig, dtype: torch.dtype, device: str, seed: int = 0, shard: Shard = WHOLE) -> Weights:
    """One rank's part of a model of random weights on `device`: for the same seed and kind of device the same model,
    however many ranks share it."""
    return assemble(config, _fields(model_layout(config, shard.size), dtype, device, seed, shard), shard)


def dummy_draft(config: DraftConfig, dtype: torch.dtype, device: str, seed: int = 1, shard: Shard = WHOLE) -> DSpark:
    """A draft of random weights."""
    own = [spec for spec in draft_layout(config, shard.size) if spec.name not in DRAFT_COPIES]
    temperatures = torch.ones(config.block_size, device=device)
    fields = _fields(own, dtype, device, seed, shard)
    return DSpark(config, draft_params(rank_draft(config, shard.size), fields, temperatures), config.block_size)


def _fields(specs: list[TensorSpec], dtype: torch.dtype, device: str, seed: int, shard: Shard) -> dict[str, Tensor]:
    """Values by which a product keeps the size of its input: activations stay finite, routing and gates alive.

    Every tensor is drawn whole, from a generator seeded by its place in the table, and then cut."""
    fields = {
        field.name: torch.empty(field.shape, dtype=torch.float32 if field.fp32 else dtype, device=device)
        for field in field_specs(specs, shard.size)
    }
    generator = torch.Generator(device)
    for number, spec in enumerate(specs):
        target = fields[spec.field] if spec.expert is None else fields[spec.field][spec.expert]
        rows = spec.local_shape(shard.size)[0]
        target = target[spec.row : spec.row + rows]
        if "norm" in spec.field.rpartition(".")[2]:
            target.fill_(1.0)
            continue
        whole = torch.empty(spec.shape, dtype=target.dtype, device=device)
        scale = 0.1 if len(spec.shape) == 1 else math.prod(spec.shape[1:]) ** -0.5
        whole.normal_(0.0, scale, generator=generator.manual_seed(1_000_003 * seed + number))
        target.copy_(whole[shard.slices(spec)].reshape(target.shape))
    return fields
