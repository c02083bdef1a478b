"""Parameters for training: made new, read from a checkpoint, written as one. Experts are stacked in memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ling_local.engine.config import ModelConfig
from ling_local.engine.layout import F32, model_layout
from ling_local.errors import ModelError

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+\.weight)$")
OUTPUTS = ("o_proj.weight", "dense.weight", "down_proj.weight")  # what adds to the residual stream


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """experts.3.up_proj.weight, ... become experts.up_proj.weight [E, out, in]."""
    stacked: dict[str, Tensor] = {}
    groups: dict[str, dict[int, Tensor]] = {}
    for name, value in tensors.items():
        match = _EXPERT.match(name)
        if match is None:
            stacked[name] = value
        else:
            groups.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = value
    for name, parts in groups.items():
        stacked[name] = torch.stack([parts[i] for i in range(len(parts))])
    return stacked


def split_experts(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of stack_experts."""
    flat: dict[str, Tensor] = {}
    for name, value in params.items():
        head, found, tail = name.partition(".mlp.experts.")
        if found:
            flat |= {f"{head}.mlp.experts.{i}.{tail}": part for i, part in enumerate(value)}
        else:
            flat[name] = value
    return flat


def new_params(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Fresh fp32 parameters on the CPU, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    flat = {spec.name: _new(spec.name, spec.shape, config, generator) for spec in model_layout(config)}
    return stack_experts(flat)


def _new(name: str, shape: tuple[int, ...], config: ModelConfig, generator: torch.Generator) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith(("A_log", "expert_bias")):
        return torch.zeros(shape)
    if name.endswith("dt_bias"):
        # decays per token spread from 0.0005 to 0.5, so that channels remember over many lengths from the start
        low, high = math.log(0.0005), math.log(0.5)
        decay = torch.exp(low + (high - low) * torch.rand(shape, generator=generator)) / -config.kda_lower_bound
        return torch.log(decay / (1 - decay))
    if "word_embeddings" in name:
        return torch.randn(shape, generator=generator) * 0.1
    fan_in = shape[-1] * (shape[1] if "conv1d" in name else 1)
    scale = 0.25 if name.endswith(OUTPUTS) else 0.5 if "lm_head" in name or "gate.weight" in name else 1.0
    return torch.randn(shape, generator=generator) * scale * fan_in**-0.5


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """A published-layout checkpoint as fp32 parameters with stacked experts."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    flat: dict[str, Tensor] = {}
    for shard in sorted(set(index["weight_map"].values())):
        flat |= load_file(folder / shard)
    if flat.keys() != index["weight_map"].keys():
        raise ModelError(f"{folder}: its index and its shards name different tensors", "export the model again")
    return stack_experts({name: value.float() for name, value in flat.items()})


def export_checkpoint(params: Mapping[str, Tensor], config: ModelConfig, folder: Path, shards: int = 2) -> int:
    """Write `shards` safetensors files and their index in the published layout. Returns the tensor bytes.

    Raises ModelError if names or shapes are not those of the layout table.
    """
    flat = split_experts(params)
    layout = {spec.name: spec for spec in model_layout(config)}
    if flat.keys() != layout.keys():
        wrong = sorted(flat.keys() ^ layout.keys())
        raise ModelError(
            f"{len(wrong)} tensors do not fit config.json, the first is {wrong[0]}", "train with this config"
        )
    tensors: dict[str, Tensor] = {}
    for name, spec in layout.items():
        if tuple(flat[name].shape) != spec.shape:
            raise ModelError(
                f"{name} has shape {list(flat[name].shape)}, not {list(spec.shape)}", "train with this config"
            )
        dtype = torch.float32 if spec.dtype == F32 else torch.bfloat16
        tensors[name] = flat[name].detach().to("cpu", dtype).contiguous().clone()
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(value.nbytes for value in tensors.values())
    weight_map: dict[str, str] = {}
    parts: list[dict[str, Tensor]] = [{} for _ in range(shards)]
    filled = 0
    for name, value in tensors.items():
        part = min(filled * shards // total, shards - 1)
        parts[part][name] = value
        weight_map[name] = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        filled += value.nbytes
    for number, part in enumerate(parts, start=1):
        save_file(part, folder / f"model-{number:05}-of-{shards:05}.safetensors", metadata={"format": "pt"})
    index: dict[str, Any] = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return total
