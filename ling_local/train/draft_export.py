"""A draft's config.json and its weights in the published layout, and reading them back for training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ling_local.engine.config import DraftConfig, ModelConfig, draft_config, load_draft_config
from ling_local.engine.layout import DRAFT_COPIES, draft_layout
from ling_local.errors import ModelError

WEIGHTS = "model.safetensors"


@dataclass(frozen=True)
class DraftShape:
    """Sizes of a draft. taps (): evenly spaced, never the last layer, whose residual engines disagree about.

    The defaults are the demo model's draft: under 4 MB.
    """

    layers: int = 2
    heads: int = 2
    kv_heads: int = 0
    head_dim: int = 128
    mlp: int = 384
    block: int = 8
    taps: tuple[int, ...] = ()
    rank: int = 64
    markov: str = "vanilla"
    confidence_with_markov: bool = True


def spaced_taps(layers: int, count: int = 4) -> tuple[int, ...]:
    """From layer 1 to the last but one, evenly; layer 0 where there is no other."""
    last = max(layers - 2, 0)
    first = min(1, last)
    count = min(count, last - first + 1)
    if count == 1:
        return (last,)
    return tuple(round(first + i * (last - first) / (count - 1)) for i in range(count))


def draft_json(shape: DraftShape, target: ModelConfig, mask_id: int) -> dict[str, Any]:
    """config.json of a draft for `target`, every key at the top level."""
    return {
        "architectures": ["LingDSparkModel"],
        "model_type": "ling_dspark",
        "dtype": "bfloat16",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads or shape.heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "hidden_act": "silu",
        "block_size": shape.block,
        "mask_token_id": mask_id,
        "target_layer_ids": list(shape.taps or spaced_taps(target.num_layers)),
        "markov_rank": shape.rank,
        "markov_head_type": shape.markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": shape.confidence_with_markov,
        "sample_from_anchor": True,
        "rope_theta": target.rope_theta,
        "rope_is_neox_style": True,
        "rms_norm_eps": target.rms_norm_eps,
        "max_position_embeddings": target.max_position_embeddings,
    }


def check_shape(data: Mapping[str, Any], target: ModelConfig) -> DraftConfig:
    """The DraftConfig of a config.json that is about to be trained. Raises ModelError, naming the key."""
    return draft_config(data, target, "the draft's shape")


def export_draft(params: Mapping[str, Tensor], data: Mapping[str, Any], target: ModelConfig, folder: Path) -> int:
    """Write config.json and bf16 weights, without the copies of embedding and head. Returns the file's bytes.

    Raises ModelError if names or shapes are not those of the layout.
    """
    layout = {spec.name: spec for spec in draft_layout(check_shape(data, target)) if spec.name not in DRAFT_COPIES}
    if params.keys() != layout.keys() or any(tuple(params[n].shape) != s.shape for n, s in layout.items()):
        wrong = sorted(
            name
            for name in params.keys() | layout.keys()
            if name not in params or name not in layout or tuple(params[name].shape) != layout[name].shape
        )
        raise ModelError(f"{len(wrong)} tensors do not fit the draft's config, the first is {wrong[0]}", "train again")
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: params[name].detach().to("cpu", torch.bfloat16).contiguous().clone() for name in layout}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / WEIGHTS).chmod(0o644)  # the library writes for the owner alone, and a package is read by others
    (folder / "config.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return (folder / WEIGHTS).stat().st_size


def read_draft(folder: Path, target: ModelConfig) -> tuple[DraftConfig, dict[str, Tensor]]:
    """An exported draft as fp32 tensors on the CPU, embedding and head left out. Raises ModelError."""
    config = load_draft_config(folder, target)
    path = folder / WEIGHTS
    if not path.exists():
        raise ModelError(f"{path}: not there", "export the draft first")
    return config, {name: value.float() for name, value in load_file(path).items() if name not in DRAFT_COPIES}
