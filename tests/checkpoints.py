"""Small random checkpoints in the published layout, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ling_local.engine.config import draft_config, load_model_config, model_config
from ling_local.engine.layout import DRAFT_COPIES, F32, TensorSpec, draft_layout, model_layout

GOLDEN = Path(__file__).parent / "golden"

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "layer_group_size": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "qk_head_dim": 48,
    "rotary_dim": 16,
    "v_head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "expert_swiglu_limit_list": [0, 0, 4, 4],
    "share_expert_swiglu_limit_list": [0, 0, 5, 7],
    "max_position_embeddings": 512,
    "eos_token_id": 3,
}
TWO_LAYERS: dict[str, Any] = {  # one of each kind of attention, one with experts: where the model does not matter
    "num_hidden_layers": 2,
    "expert_swiglu_limit_list": [0, 4],
    "share_expert_swiglu_limit_list": [0, 5],
}


def config_json(**changes: Any) -> dict[str, Any]:
    """A complete published config.json of a small model, with changes."""
    base = json.loads((GOLDEN / "flashlike" / "config.json").read_text())
    return {**base, **SMALL, **changes}


def random_tensor(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """Values that keep activations finite and routing and gates alive."""
    noise = torch.randn(spec.shape, generator=generator)
    if "norm" in spec.name:
        value = 1 + 0.1 * noise
    elif spec.name.endswith("A_log"):
        value = 0.5 * noise
    elif spec.name.endswith(("dt_bias", "expert_bias")):
        value = 0.1 * noise
    elif "conv1d" in spec.name:
        value = 0.5 * noise
    elif "embeddings" in spec.name:
        value = noise
    else:
        value = noise / spec.shape[-1] ** 0.5
    return value.to(torch.float32 if spec.dtype == F32 else torch.bfloat16)


def write_checkpoint(folder: Path, seed: int = 0, shards: int = 2, **changes: Any) -> Path:
    """Write config.json, shards and index of a random model; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    data = config_json(**changes)
    (folder / "config.json").write_text(json.dumps(data))
    generator = torch.Generator().manual_seed(seed)
    specs = model_layout(model_config(data))
    tensors = {spec.name: random_tensor(spec, generator) for spec in specs}
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {spec.name: tensors[spec.name] for spec in specs[shard::shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


DRAFT_ALIASES = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}


def write_draft(
    folder: Path,
    target: Path,
    seed: int = 9,
    prefix: str = "",
    copies: bool = False,
    alias: bool = False,
    **changes: Any,
) -> Path:
    """Write an untrained DSpark draft for the model in `target`; names may be written as other exporters do."""
    folder.mkdir(parents=True, exist_ok=True)
    model = load_model_config(target)
    data = {
        "architectures": ["LingDSparkModel"],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "block_size": 8,
        "mask_token_id": 4,
        "target_layer_ids": [0, 2],
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": model.max_position_embeddings,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(data))
    generator = torch.Generator().manual_seed(seed)
    specs = draft_layout(draft_config(data, model))
    tensors = {spec.name: random_tensor(spec, generator) for spec in specs}
    if not copies:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in DRAFT_COPIES}
    if alias:
        tensors = {DRAFT_ALIASES.get(name, name): tensor for name, tensor in tensors.items()}
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder
