"""Random weights in the published shapes, for measurements and memory tests; never an answer to anybody."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ling_local.engine.config import DraftConfig, ModelConfig
from ling_local.engine.drafts import draft_params
from ling_local.engine.dspark import DSpark
from ling_local.engine.layout import DRAFT_COPIES, TensorSpec, draft_layout, model_layout
from ling_local.engine.protocol import Progress, ProgressFn
from ling_local.engine.shapes import FLASH, MODELS, TINY, draft_for, shard_of
from ling_local.engine.shard import WHOLE, Shard, rank_draft
from ling_local.engine.weights import Weights, assemble, empty_fields

__all__ = ["FLASH", "MODELS", "TINY", "draft_for", "dummy_draft", "dummy_weights", "shard_of"]

ROUTER_BIAS = "mlp.bias"
# Of a router's biases. The scores that they are added to are between 0 and 1, and the best of hundreds lie close
# together: biases of 0.1 made some experts so popular that nine rows chose 54 in place of 68.
UNNOTICED, SETTLED = 1e-4, 1e3
VECTOR_SCALE = 0.1


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    shard: Shard = WHOLE,
    progress: ProgressFn | None = None,
    settled: bool = False,
) -> Weights:
    """One rank's part of a model of random weights on `device`: for the same seed and kind of device the same model,
    however many ranks share it. settled: see `protocol.Dummy`."""
    fields = _fields(model_layout(config, shard.size), dtype, device, seed, shard, progress)
    for name, field in fields.items():
        if name.endswith(ROUTER_BIAS):
            field.mul_((SETTLED if settled else UNNOTICED) / VECTOR_SCALE)
    return assemble(config, fields, shard)


def dummy_draft(config: DraftConfig, dtype: torch.dtype, device: str, seed: int = 1, shard: Shard = WHOLE) -> DSpark:
    """A draft of random weights."""
    own = [spec for spec in draft_layout(config, shard.size) if spec.name not in DRAFT_COPIES]
    temperatures = torch.ones(config.block_size, device=device)
    fields = _fields(own, dtype, device, seed, shard)
    return DSpark(config, draft_params(rank_draft(config, shard.size), fields, temperatures), config.block_size)


def _fields(
    specs: Sequence[TensorSpec],
    dtype: torch.dtype,
    device: str,
    seed: int,
    shard: Shard,
    progress: ProgressFn | None = None,
) -> dict[str, Tensor]:
    """Values by which a product keeps the size of its input: activations stay finite, routing and gates alive.

    Every tensor is drawn whole, from a generator seeded by its place in the table, and then cut."""
    fields = empty_fields(specs, dtype, device, shard)
    if device == "meta":
        return fields
    generator = torch.Generator(device)
    total, done, said = sum(field.nbytes for field in fields.values()), 0, -1
    for number, spec in enumerate(specs):
        if progress and 100 * done // total > said:
            said = 100 * done // total
            progress(Progress("making random weights", done, total))
        target = fields[spec.field] if spec.expert is None else fields[spec.field][spec.expert]
        target = target[spec.row : spec.row + spec.local_shape(shard.size)[0]]
        done += target.nbytes
        if "norm" in spec.field.rpartition(".")[2]:
            target.fill_(1.0)
            continue
        whole = torch.empty(spec.shape, dtype=target.dtype, device=device)
        scale = VECTOR_SCALE if len(spec.shape) == 1 else math.prod(spec.shape[1:]) ** -0.5
        whole.normal_(0.0, scale, generator=generator.manual_seed(1_000_003 * seed + number))
        target.copy_(whole[shard.slices(spec)].reshape(target.shape))
    if progress:
        progress(Progress("making random weights", done, total))
    return fields
