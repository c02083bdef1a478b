"""The published shapes as numbers, for dummy models and floors. No torch."""

from __future__ import annotations

from dataclasses import replace

from ling_local.engine.config import DraftConfig, ModelConfig
from ling_local.engine.protocol import Dummy
from ling_local.engine.shard import rank_config
from ling_local.errors import UsageError

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
# layers, heads, block, Markov rank and MLP width of the draft that goes with each
DRAFTS = {"tiny": (3, 16, 7, 512, 4608), "flash": (5, 32, 8, 256, 6144)}


def shard_of(config: ModelConfig, ranks: int) -> ModelConfig:
    """The part of a model that one of `ranks` ranks computes, as a model of its own that exchanges nothing."""
    return replace(rank_config(config, ranks), vocab_size=config.vocab_size // ranks)


def draft_for(
    config: ModelConfig, layers: int = 3, heads: int = 16, block: int = 7, rank: int = 512, inner: int = 4608
) -> DraftConfig:
    """A DSpark draft of a usual size for a model; inner: width of its MLP."""
    layers = min(layers, config.num_layers)
    taps = tuple((i + 1) * config.num_layers // layers - 1 for i in range(layers))
    return DraftConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=128,
        intermediate_size=inner,
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


def dummy_config(dummy: Dummy, mtp: bool = False) -> ModelConfig:
    """The numbers of a dummy model. mtp: with the model's own next-token layer. Raises UsageError."""
    if dummy.shape not in MODELS:
        raise UsageError(f"no published shape '{dummy.shape}'", f"use one of: {', '.join(MODELS)}")
    config = MODELS[dummy.shape]
    if not 0 <= dummy.layers <= config.num_layers:
        raise UsageError(f"{dummy.shape} has {config.num_layers} layers, not {dummy.layers}", "give fewer --layers")
    if dummy.shard not in (1, 2, 4, 8):
        raise UsageError(f"a shard of {dummy.shard} ranks is not possible", "give --shard 2, 4 or 8")
    config = replace(config, num_layers=dummy.layers or config.num_layers, num_mtp_layers=int(mtp))
    return shard_of(config, dummy.shard)


def dummy_draft_config(dummy: Dummy) -> DraftConfig:
    """The numbers of the draft that goes with a dummy model."""
    layers, heads, block, rank, inner = DRAFTS[dummy.shape]
    config = dummy_config(dummy)
    return draft_for(config, layers, heads // dummy.shard, block, rank, inner // dummy.shard)


def dummy_marks(dummy: Dummy) -> tuple[str, ...]:
    """What every report must say about a dummy."""
    marks = [f"DUMMY: random weights in the shape of {dummy.shape}; times are real, text and acceptance are not"]
    if dummy.layers and dummy.layers != MODELS[dummy.shape].num_layers:
        marks.append(f"CUT: {dummy.layers} of {MODELS[dummy.shape].num_layers} layers")
    if dummy.shard > 1:
        marks.append(f"SHARD: one rank's part of {dummy.shard}, without the exchange between them")
    return tuple(marks)
