"""Weights in memory: fused, on one rank, read-only. Filled tensor by tensor from checked files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ling_kernels.ops import KdaParams, MlaParams, MlpParams, MoeParams
from ling_local.engine.checkpoint import Entry, check_files
from ling_local.engine.config import ModelConfig
from ling_local.engine.layout import BF16, F32, TensorSpec, field_specs, memory_bytes, model_layout
from ling_local.engine.protocol import Progress, ProgressFn
from ling_local.engine.staging import Piece, read_spans, spans_of
from ling_local.errors import OutOfMemory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FILE_DTYPES = {BF16: torch.bfloat16, F32: torch.float32}


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer; attention is KDA or MLA, mlp dense or mixture of experts."""

    attention_norm: Tensor
    attention: KdaParams | MlaParams
    mlp_norm: Tensor
    mlp: MlpParams | MoeParams


@dataclass(frozen=True, slots=True)
class MtpWeights:
    """The model's own next-token layer (ling3-model.md section 5): eh_proj [D, 2D] takes embedding‖hidden."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    eh_proj: Tensor
    layer: LayerWeights
    norm: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model on one rank. embedding, lm_head [V, D]; norm [D]."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor
    mtp: MtpWeights | None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def load_weights(
    folder: Path, config: ModelConfig, dtype: torch.dtype, device: str, progress: ProgressFn | None = None
) -> Weights:
    """Check the files of `folder` and read them. Raises ModelError or OutOfMemory before a byte is mapped.

    Peak memory is the weights plus one tensor, on a GPU plus a few pinned buffers on the host.
    """
    specs = model_layout(config)
    entries = check_files(folder, specs)
    needed = memory_bytes(specs, dtype.itemsize)
    if device == "cpu":
        check_memory(folder, needed, dtype)
    fields = fill_fields(specs, entries, dtype, device, progress)
    return assemble(config, fields)


def check_memory(folder: Path | str, needed: int, dtype: torch.dtype) -> None:
    """OutOfMemory with both numbers if the weights cannot fit into free host memory."""
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        with open("/proc/meminfo") as meminfo:  # counts page cache that can be dropped, unlike AVPHYS
            free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return  # no way to know here: let the allocation speak
    if needed > free:
        raise OutOfMemory(
            f"{folder}: the weights need {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free",
            "close other programs, use a smaller model" + (", or --dtype bfloat16" if dtype.itemsize == 4 else ""),
        )


def fill_fields(
    specs: list[TensorSpec],
    entries: dict[str, Entry],
    dtype: torch.dtype,
    device: str,
    progress: ProgressFn | None = None,
) -> dict[str, Tensor]:
    """Fused tensors by name, each part read from its file, converted and put in its place. On the device "meta"
    nothing is read."""
    present = [spec for spec in specs if spec.name in entries]
    fields = empty_fields(present, dtype, device)
    if device == "meta":
        return fields
    total, done = sum(entries[spec.name].num_bytes for spec in present), 0
    for spec, first, part in _read(present, entries, device):
        _place(fields, spec, first, part)
        done += part.nbytes
        if progress:
            progress(Progress("loading weights", done, total))
    return fields


def empty_fields(specs: list[TensorSpec], dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """The fused tensors that the table fills, by name, not yet filled."""
    return {
        field.name: torch.empty(field.shape, dtype=torch.float32 if field.fp32 else dtype, device=device)
        for field in field_specs(specs)
    }


def blank_weights(config: ModelConfig, dtype: torch.dtype) -> Weights:
    """A model's weights on the meta device: shapes and sizes, no memory."""
    return assemble(config, empty_fields(model_layout(config), dtype, "meta"))


def _place(fields: dict[str, Tensor], spec: TensorSpec, first: int, part: Tensor) -> None:
    """Put rows `first`.. of a tensor of the table where they belong; on a GPU the copy is only queued."""
    target = fields[spec.field] if spec.expert is None else fields[spec.field][spec.expert]
    if part.dtype != target.dtype:
        part = part.to(target.device, non_blocking=True)  # so that it is widened there
    start = spec.row + first
    target[start : start + part.shape[0]].copy_(part.reshape(part.shape[0], *target.shape[1:]), non_blocking=True)


def _read(specs: list[TensorSpec], entries: dict[str, Entry], device: str) -> Iterator[tuple[TensorSpec, int, Tensor]]:
    """Rows of tensors in the order of their bytes, so that a disk reads ahead: which, from which row on, values."""
    if device == "cpu":
        for spec in sorted(specs, key=lambda s: (entries[s.name].file, entries[s.name].offset)):
            yield spec, 0, read_tensor(entries[spec.name]).view(spec.shape)
        return
    for span, data in read_spans(spans_of(specs, entries), device):
        for piece in span.pieces:
            yield piece.spec, piece.first, piece_values(piece, data, entries[piece.spec.name].dtype)


def piece_values(piece: Piece, data: Tensor, kind: str) -> Tensor:
    """The piece's rows as a tensor of the type that the file has: a view of the span's bytes where they lie even."""
    part = data[piece.at : piece.at + piece.num_bytes]
    dtype = FILE_DTYPES[kind]
    if piece.at % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(piece.rows, *piece.spec.shape[1:])


def read_tensor(entry: Entry) -> Tensor:
    """One tensor by plain reads: mapped pages would count as memory until their whole file is closed."""
    data = np.fromfile(entry.file, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
    return torch.from_numpy(data).view(FILE_DTYPES[entry.dtype]).view(entry.shape)


def assemble(config: ModelConfig, fields: dict[str, Tensor]) -> Weights:
    """Fields by name to frozen weights."""
    layers = tuple(_layer(config, fields, i, f"layers.{i}.") for i in range(config.num_layers))
    mtp = None
    if config.num_mtp_layers:
        mtp = MtpWeights(
            fields["mtp.embedding_norm"],
            fields["mtp.hidden_norm"],
            fields["mtp.eh_proj"],
            _layer(config, fields, config.num_layers, "mtp."),
            fields["mtp.norm"],
        )
    return Weights(config, fields["embedding"], layers, fields["norm"], fields["lm_head"], mtp)


def _layer(config: ModelConfig, fields: dict[str, Tensor], layer: int, prefix: str) -> LayerWeights:
    attention = _mla if config.is_mla(layer) else _kda
    mlp = _dense if config.is_dense(layer) else _moe
    return LayerWeights(
        fields[prefix + "attention_norm"],
        attention(config, fields, prefix + "attention."),
        fields[prefix + "mlp_norm"],
        mlp(config, fields, layer, prefix + "mlp."),
    )


def _kda(config: ModelConfig, fields: dict[str, Tensor], at: str) -> KdaParams:
    names = ("in_proj", "conv", "a_log", "dt_bias", "o_norm", "out_proj")
    heads = fields[at + "a_log"].shape[0]
    tensors = [fields[at + name] for name in names]
    return KdaParams(*tensors, heads, config.kda_lower_bound, config.rms_norm_eps)


def _mla(config: ModelConfig, fields: dict[str, Tensor], at: str) -> MlaParams:
    per_head = config.qk_nope_head_dim + config.v_head_dim
    by_head = fields[at + "kv_b_proj"].view(-1, per_head, config.kv_lora_rank)
    return MlaParams(
        fields[at + "in_proj"],
        fields.get(at + "q_norm"),
        fields.get(at + "q_b_proj"),
        fields[at + "kv_norm"],
        by_head[:, : config.qk_nope_head_dim],
        by_head[:, config.qk_nope_head_dim :],
        fields[at + "out_proj"],
        by_head.shape[0],
        config.qk_rope_head_dim,
        config.rms_norm_eps,
    )


def _dense(config: ModelConfig, fields: dict[str, Tensor], layer: int, at: str) -> MlpParams:
    return MlpParams(fields[at + "gate_up"], fields[at + "down"])


def _moe(config: ModelConfig, fields: dict[str, Tensor], layer: int, at: str) -> MoeParams:
    return MoeParams(
        fields[at + "gate"],
        fields[at + "bias"],
        fields[at + "gate_up"],
        fields[at + "down"],
        MlpParams(fields[at + "shared_gate_up"], fields[at + "shared_down"], config.shared_limit(layer)),
        config.experts_per_token,
        config.n_group,
        config.topk_group,
        config.routed_scaling_factor,
        config.expert_limit(layer),
    )
