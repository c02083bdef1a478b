"""Weights in memory: fused, on one rank, read-only. Filled tensor by tensor from checked files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from ling_local.engine.shard import WHOLE, Shard
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
    """One rank's part of a model, all of it where there is one rank. embedding, lm_head [V / N, D]; norm [D]; config:
    the whole model's."""

    config: ModelConfig
    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor
    mtp: MtpWeights | None
    shard: Shard = WHOLE

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype


def load_weights(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: str,
    progress: ProgressFn | None = None,
    shard: Shard = WHOLE,
) -> Weights:
    """Check the files of `folder` and read one rank's part. Raises ModelError or OutOfMemory before a byte is mapped.

    Peak memory is the part plus one tensor, on a GPU plus a few pinned buffers on the host.
    """
    specs = model_layout(config, shard.size)
    entries = check_files(folder, specs)
    needed = memory_bytes(specs, dtype.itemsize, shard.size) * shard.size
    if device == "cpu":
        check_memory(folder, needed, dtype)
    fields = fill_fields(specs, entries, dtype, device, progress, shard)
    return assemble(config, fields, shard)


def host_free_bytes() -> int:
    """Host memory that can be had now, 0 where nobody can tell."""
    try:
        with open("/proc/meminfo") as meminfo:  # counts page cache that can be dropped
            return next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable"))
    except (OSError, ValueError, StopIteration):
        return 0


def check_memory(folder: Path | str, needed: int, dtype: torch.dtype) -> None:
    """OutOfMemory with both numbers if the weights cannot fit into free host memory."""
    free = host_free_bytes()
    if free and needed > free:
        raise OutOfMemory(
            f"{folder}: the weights need {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free",
            "close other programs, use a smaller model" + (", or --dtype bfloat16" if dtype.itemsize == 4 else ""),
        )


def fill_fields(
    specs: Sequence[TensorSpec],
    entries: dict[str, Entry],
    dtype: torch.dtype,
    device: str,
    progress: ProgressFn | None = None,
    shard: Shard = WHOLE,
) -> dict[str, Tensor]:
    """Fused tensors of one rank by name, each part read from its file, converted and put in its place. On the device
    "meta" nothing is read."""
    present = [spec for spec in specs if spec.name in entries]
    fields = empty_fields(present, dtype, device, shard)
    if device == "meta":
        return fields
    total = sum(_read_bytes(spec, entries[spec.name], shard) for spec in present)
    done = 0
    for spec, first, part in _read(present, entries, device, shard):
        done += part.nbytes
        _place(fields, spec, first, part, shard)
        if progress:
            progress(Progress("loading weights", done, total))
    return fields


def empty_fields(
    specs: Sequence[TensorSpec], dtype: torch.dtype, device: str, shard: Shard = WHOLE
) -> dict[str, Tensor]:
    """The fused tensors that the table fills on one rank, by name, not yet filled."""
    return {
        field.name: torch.empty(field.shape, dtype=torch.float32 if field.fp32 else dtype, device=device)
        for field in field_specs(specs, shard.size)
    }


def blank_weights(config: ModelConfig, dtype: torch.dtype, shard: Shard = WHOLE) -> Weights:
    """One rank's weights on the meta device: shapes and sizes, no memory."""
    return assemble(config, empty_fields(model_layout(config, shard.size), dtype, "meta", shard), shard)


def _place(fields: dict[str, Tensor], spec: TensorSpec, first: int, part: Tensor, shard: Shard) -> None:
    """Put rows `first`.. of this rank's rows of a tensor where they belong; on a GPU the copy is only queued.

    A part of each row is cut out here: the pages of the file that hold it are those of the whole rows.
    """
    target = fields[spec.field] if spec.expert is None else fields[spec.field][spec.expert]
    cut = spec.shard == 1 and shard.size > 1
    if part.dtype != target.dtype or cut:
        part = part.to(target.device, non_blocking=True)  # so that it is widened, and cut, there
    if cut:
        part = part[:, shard.part(spec.shape[1])]
    start = spec.row + first
    target[start : start + part.shape[0]].copy_(part.reshape(part.shape[0], *target.shape[1:]), non_blocking=True)


def _read_bytes(spec: TensorSpec, entry: Entry, shard: Shard) -> int:
    return entry.num_bytes // shard.size if spec.shard == 0 else entry.num_bytes


def _read(
    specs: Sequence[TensorSpec], entries: dict[str, Entry], device: str, shard: Shard
) -> Iterator[tuple[TensorSpec, int, Tensor]]:
    """This rank's rows of tensors in the order of their bytes, so that a disk reads ahead: which, from which of them
    on, values."""
    if device == "cpu":
        for spec in sorted(specs, key=lambda s: (entries[s.name].file, entries[s.name].offset)):
            yield spec, 0, read_tensor(entries[spec.name], spec, shard)
        return
    for span, data in read_spans(spans_of(specs, entries, shard=shard), device):
        for piece in span.pieces:
            yield piece.spec, piece.first, piece_values(piece, data, entries[piece.spec.name].dtype)


def piece_values(piece: Piece, data: Tensor, kind: str) -> Tensor:
    """The piece's rows as a tensor of the type that the file has: a view of the span's bytes where they lie even."""
    part = data[piece.at : piece.at + piece.num_bytes]
    dtype = FILE_DTYPES[kind]
    if piece.at % dtype.itemsize:
        part = part.clone()
    return part.view(dtype).view(piece.rows, *piece.spec.shape[1:])


def read_tensor(entry: Entry, spec: TensorSpec, shard: Shard = WHOLE) -> Tensor:
    """This rank's rows of a tensor by plain reads: mapped pages would count as memory until their file is closed."""
    rows = shard.rows(spec)
    step = entry.num_bytes // spec.shape[0]
    count, at = (rows.stop - rows.start) * step, entry.offset + rows.start * step
    data = np.fromfile(entry.file, dtype=np.uint8, count=count, offset=at)
    return torch.from_numpy(data).view(FILE_DTYPES[entry.dtype]).view(-1, *spec.shape[1:])


def assemble(config: ModelConfig, fields: dict[str, Tensor], shard: Shard = WHOLE) -> Weights:
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
    return Weights(config, fields["embedding"], layers, fields["norm"], fields["lm_head"], mtp, shard)


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
