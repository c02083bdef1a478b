"""Random weights in the published shapes, for measurements and memory tests; never an answer to anybody."""

from __future__ import annotations

import torch
from torch import Tensor

from ling_local.engine.config import DraftConfig, ModelConfig
from ling_local.engine.drafts import draft_params
from ling_local.engine.dspark import DSpark
from ling_local.engine.layout import DRAFT_COPIES, TensorSpec, draft_layout, model_layout
from ling_local.engine.shapes import FLASH, MODELS, TINY, draft_for, shard_of
from ling_local.engine.weights import Weights, assemble, empty_fields

__all__ = ["FLASH", "MODELS", "TINY", "draft_for", "dummy_draft", "dummy_weights", "shard_of"]


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
    fields = empty_fields(specs, dtype, device)
    if device == "meta":
        return fields
    generator = torch.Generator(device).manual_seed(seed)
    for name, value in fields.items():
        if "norm" in name:
            value.fill_(1.0)
        elif value.dim() == 1:
            value.normal_(0.0, 0.1, generator=generator)
        else:
            value.normal_(0.0, value.shape[-1] ** -0.5, generator=generator)
    return fields
