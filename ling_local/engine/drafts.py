"""Which drafter a model gets, and reading a DSpark draft in the published layout."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ling_kernels.ops import DraftLayerParams, DraftParams, MlpParams
from ling_local.engine.checkpoint import DSPARK_FOLDER, check_draft_files, read_calibration
from ling_local.engine.config import DraftConfig, ModelConfig, load_draft_config
from ling_local.engine.drafter import Drafter
from ling_local.engine.dspark import DSpark
from ling_local.engine.layout import DRAFT_COPIES, draft_layout
from ling_local.engine.nextn import MAX_DEPTH, Nextn
from ling_local.engine.shard import WHOLE, Shard, check_size, rank_draft
from ling_local.engine.weights import Weights, fill_fields
from ling_local.errors import ModelError, UsageError

DRAFTS = ("off", "auto", "mtp", "dspark")


def open_drafter(folder: Path, weights: Weights, draft: str, block: int) -> Drafter | None:
    """The drafter that was asked for: "off", "dspark" (the folder's `dspark` subfolder), "mtp" (the model's own
    layer), or "auto", the first of them that is there. block: drafts a step, 0 for the drafter's own number.
    """
    if draft not in DRAFTS:
        raise UsageError(f"no drafter '{draft}'", f"use one of: {', '.join(DRAFTS)}")
    here = folder / DSPARK_FOLDER
    if draft == "auto":
        draft = "dspark" if (here / "config.json").exists() else "mtp" if weights.mtp else "off"
    if draft == "off":
        return None
    if draft == "mtp":
        if weights.mtp is None:
            raise ModelError(f"{folder}: this model has no MTP layer", "use --speculation off")
        if block > MAX_DEPTH:
            raise UsageError(f"--block {block}: MTP drafts at most {MAX_DEPTH} tokens", f"give 1 to {MAX_DEPTH}")
        return Nextn(block or 1)
    drafter = load_dspark(here, weights.config, weights.dtype, str(weights.embedding.device), weights.shard)
    if block > drafter.block:
        raise UsageError(
            f"--block {block}: this draft was trained on blocks of {drafter.block}; a larger one breaks every row",
            f"give 1 to {drafter.block}",
        )
    return drafter.limited(block) if block else drafter


def load_dspark(folder: Path, target: ModelConfig, dtype: torch.dtype, device: str, shard: Shard = WHOLE) -> DSpark:
    """Check and load one rank's part of a draft folder in the published layout. Raises ModelError, UsageError."""
    config = load_draft_config(folder, target)
    check_size(target, shard.size, config)
    specs = draft_layout(config, shard.size)
    entries = check_draft_files(folder, specs)
    own = [spec for spec in specs if spec.name not in DRAFT_COPIES]
    fields = fill_fields(own, entries, dtype, device, shard=shard)
    temperatures = torch.tensor(read_calibration(folder, config), device=device)
    params = draft_params(rank_draft(config, shard.size), fields, temperatures)
    return DSpark(config, params, config.block_size)


def draft_params(config: DraftConfig, fields: dict[str, Tensor], temperatures: Tensor) -> DraftParams:
    """A draft's fields by name to what the ops take."""
    extra = [fields[n] for n in fields if n.startswith(("markov_gate", "markov_joint"))]
    return DraftParams(
        fields["fc"],
        fields["hidden_norm"],
        tuple(_layer(fields, f"layers.{index}.") for index in range(config.num_layers)),
        fields["norm"],
        fields["markov_w1"],
        fields["markov_w2"],
        config.markov_head,
        tuple(extra),
        fields.get("confidence"),
        fields.get("confidence_bias"),
        config.confidence_with_markov,
        temperatures,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rope_dim,
        config.rope_neox,
        config.sample_from_anchor,
        config.block_size,
        config.mask_token_id,
        config.rms_norm_eps,
    )


def _layer(fields: dict[str, Tensor], at: str) -> DraftLayerParams:
    names = ("attention_norm", "in_proj", "q_norm", "k_norm", "out_proj", "mlp_norm")
    mlp = MlpParams(fields[at + "mlp.gate_up"], fields[at + "mlp.down"])
    return DraftLayerParams(*(fields[at + name] for name in names), mlp)
