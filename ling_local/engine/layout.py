"""The checkpoint as one table: every tensor's name, shape, dtype, shard rule and place in memory. No torch.

Names on disk are the published ones (ling3-model.md section 3); a field is the fused tensor in memory that one or
more of them fill. Totals, memory needs, file checks, loading and dummy weights are all derived from this table.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ling_local.engine.config import DraftConfig, ModelConfig

BF16, F32 = "BF16", "F32"
DTYPE_BYTES = {BF16: 2, F32: 4}
IGNORED_SUFFIX = "rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor on disk and where it goes.

    shape   on disk, of the whole tensor
    dtype   as published; F32 ones stay fp32 in memory whatever the engine's dtype
    field   fused tensor that it fills, a path such as "layers.3.attention.in_proj"
    row     its first row there, counted on one rank (dimension 0, or 1 for an expert)
    expert  index in dimension 0 of a stacked field, None for a plain one
    shard   dimension split over ranks, None if every rank holds all of it
    wide    keep in fp32 in memory though the file has BF16 (router weights)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    field: str
    row: int = 0
    expert: int | None = None
    shard: int | None = None
    wide: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def local_shape(self, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's part."""
        if self.shard is None:
            return self.shape
        return tuple(n // ranks if i == self.shard else n for i, n in enumerate(self.shape))

    def is_fp32(self) -> bool:
        """True if it is held in fp32 in memory at any engine dtype."""
        return self.dtype == F32 or self.wide


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """A fused tensor in memory on one rank."""

    name: str
    shape: tuple[int, ...]
    fp32: bool


class _Table:
    """Collects specs; `part` puts one below the last in the same field."""

    def __init__(self, ranks: int) -> None:
        self.specs: list[TensorSpec] = []
        self.ranks = ranks
        self.rows: dict[tuple[str, int | None], int] = {}

    def part(
        self,
        name: str,
        shape: tuple[int, ...],
        field: str,
        shard: int | None = None,
        *,
        dtype: str = BF16,
        expert: int | None = None,
        wide: bool = False,
    ) -> None:
        row = self.rows.get((field, expert), 0)
        spec = TensorSpec(name, shape, dtype, field, row, expert, shard, wide)
        self.rows[field, expert] = row + spec.local_shape(self.ranks)[0]
        self.specs.append(spec)


@lru_cache(maxsize=4)  # a load asks several times, and Flash has 60,000 of them
def model_layout(config: ModelConfig, ranks: int = 1) -> tuple[TensorSpec, ...]:
    """All tensors of a model, MTP layer included. `ranks` only sets the row offsets of fused parts."""
    table = _Table(ranks)
    wide = (config.vocab_size, config.hidden_size)
    table.part("model.word_embeddings.weight", wide, "embedding", 0)
    for layer in range(config.num_layers + config.num_mtp_layers):
        field = f"layers.{layer}." if layer < config.num_layers else "mtp."
        _layer(table, config, layer, f"model.layers.{layer}.", field)
    table.part("model.norm.weight", (config.hidden_size,), "norm")
    table.part("lm_head.weight", wide, "lm_head", 0)
    return tuple(table.specs)


def _layer(table: _Table, config: ModelConfig, layer: int, disk: str, field: str) -> None:
    width = config.hidden_size
    table.part(disk + "input_layernorm.weight", (width,), field + "attention_norm")
    attention = _mla if config.is_mla(layer) else _kda
    attention(table, config, disk + "attention.", field + "attention.")
    table.part(disk + "post_attention_layernorm.weight", (width,), field + "mlp_norm")
    mlp = _dense if config.is_dense(layer) else _moe
    mlp(table, config, disk + "mlp.", field + "mlp.")
    if layer >= config.num_layers:
        for name, inner in (
            ("enorm", "embedding_norm"),
            ("hnorm", "hidden_norm"),
            ("final_layernorm", "norm"),
        ):
            table.part(f"{disk}{name}.weight", (width,), field + inner)
        table.part(disk + "eh_proj.weight", (width, 2 * width), field + "eh_proj")


def _kda(table: _Table, config: ModelConfig, disk: str, field: str) -> None:
    heads, width = config.num_heads, config.hidden_size
    inner = heads * config.head_dim
    for name in "qkvfg":
        table.part(f"{disk}{name}_proj.weight", (inner, width), field + "in_proj", 0)
    table.part(disk + "b_proj.weight", (heads, width), field + "in_proj", 0)
    for name in "qkv":
        table.part(f"{disk}{name}_conv1d.weight", (inner, 1, 4), field + "conv", 0)
    table.part(disk + "A_log", (heads,), field + "a_log", 0, dtype=F32)
    table.part(disk + "dt_bias", (inner,), field + "dt_bias", 0, dtype=F32)
    table.part(disk + "o_norm.weight", (config.head_dim,), field + "o_norm")
    table.part(disk + "o_proj.weight", (width, inner), field + "out_proj", 1)


def _mla(table: _Table, config: ModelConfig, disk: str, field: str) -> None:
    heads, width, latent = config.num_heads, config.hidden_size, config.kv_lora_rank
    query = (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank or width)
    if config.q_lora_rank:
        table.part(disk + "q_a_proj.weight", (config.q_lora_rank, width), field + "in_proj")
        table.part(disk + "q_a_layernorm.weight", (config.q_lora_rank,), field + "q_norm")
        table.part(disk + "q_b_proj.weight", query, field + "q_b_proj", 0)
    else:
        table.part(disk + "q_proj.weight", query, field + "in_proj", 0)
    table.part(disk + "kv_a_proj_with_mqa.weight", (config.latent_dim, width), field + "in_proj")
    table.part(disk + "g_proj.weight", (heads, width), field + "in_proj", 0)
    table.part(disk + "kv_a_layernorm.weight", (latent,), field + "kv_norm")
    per_head = config.qk_nope_head_dim + config.v_head_dim
    table.part(disk + "kv_b_proj.weight", (heads * per_head, latent), field + "kv_b_proj", 0)
    table.part(disk + "dense.weight", (width, heads * config.v_head_dim), field + "out_proj", 1)


def _mlp(table: _Table, disk: str, field: str, width: int, inner: int, expert: int | None = None) -> None:
    for name in ("gate", "up"):
        table.part(f"{disk}{name}_proj.weight", (inner, width), field + "gate_up", 0, expert=expert)
    table.part(disk + "down_proj.weight", (width, inner), field + "down", 1, expert=expert)


def _dense(table: _Table, config: ModelConfig, disk: str, field: str) -> None:
    _mlp(table, disk, field, config.hidden_size, config.intermediate_size)


def _moe(table: _Table, config: ModelConfig, disk: str, field: str) -> None:
    width, experts = config.hidden_size, config.num_experts
    table.part(disk + "gate.weight", (experts, width), field + "gate", wide=True)
    table.part(disk + "gate.expert_bias", (experts,), field + "bias", dtype=F32)
    for expert in range(experts):
        _mlp(table, f"{disk}experts.{expert}.", field, width, config.moe_intermediate_size, expert)
    _mlp(table, disk + "shared_experts.", field + "shared_", width, config.shared_intermediate_size)


# A draft carries copies of the target's embedding and head; ling uses the target's, so they may be left out.
DRAFT_COPIES = ("embed_tokens.weight", "lm_head.weight")
_DRAFT_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def draft_tensor_name(name: str) -> str:
    """The layout's name for one that an export of a draft uses (dspark.md section 1.2)."""
    name = name.removeprefix("model.")
    return _DRAFT_ALIASES.get(name, name)


def draft_layout(config: DraftConfig, ranks: int = 1) -> list[TensorSpec]:
    """All tensors of a DSpark draft (dspark.md section 1.2), its copies of embedding and head included."""
    table = _Table(ranks)
    width, rank = config.hidden_size, config.markov_rank
    wide = (config.vocab_size, width)
    table.part("embed_tokens.weight", wide, "embedding", 0)
    table.part("fc.weight", (width, width * len(config.target_layers)), "fc")
    table.part("hidden_norm.weight", (width,), "hidden_norm")
    query, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    for layer in range(config.num_layers):
        disk = field = f"layers.{layer}."
        table.part(disk + "input_layernorm.weight", (width,), field + "attention_norm")
        for name, rows in (("q", query), ("k", keys), ("v", keys)):
            table.part(f"{disk}self_attn.{name}_proj.weight", (rows, width), field + "in_proj", 0)
        table.part(disk + "self_attn.o_proj.weight", (width, query), field + "out_proj", 1)
        for name in "qk":
            table.part(f"{disk}self_attn.{name}_norm.weight", (config.head_dim,), f"{field}{name}_norm")
        table.part(disk + "post_attention_layernorm.weight", (width,), field + "mlp_norm")
        _mlp(table, disk + "mlp.", field + "mlp.", width, config.intermediate_size)
    table.part("norm.weight", (width,), "norm")
    table.part("lm_head.weight", wide, "lm_head", 0)
    table.part("markov_head.markov_w1.weight", (config.vocab_size, rank), "markov_w1")
    table.part("markov_head.markov_w2.weight", (config.vocab_size, rank), "markov_w2", 0)
    if config.markov_head == "gated":
        table.part("markov_head.gate_proj.weight", (rank, width + rank), "markov_gate")
        table.part("markov_head.gate_proj.bias", (rank,), "markov_gate_bias")
    if config.markov_head == "rnn":
        table.part("markov_head.joint_proj.weight", (3 * rank, 2 * rank + width), "markov_joint")
        table.part("markov_head.joint_proj.bias", (3 * rank,), "markov_joint_bias")
    if config.confidence_head:
        inputs = width + (rank if config.confidence_with_markov else 0)
        table.part("confidence_head.proj.weight", (1, inputs), "confidence")
        table.part("confidence_head.proj.bias", (1,), "confidence_bias")
    return table.specs


def field_specs(specs: Sequence[TensorSpec], ranks: int = 1) -> Iterator[FieldSpec]:
    """The fused tensors that the table fills on one rank, in the order of the table."""
    shapes: dict[str, tuple[list[int], bool]] = {}
    for spec in specs:
        rows, *rest = spec.local_shape(ranks)
        inner = [math.prod(rest)] if rest else []
        stack = [] if spec.expert is None else [spec.expert + 1]
        last = [*stack, spec.row + rows, *inner]
        known = shapes.get(spec.field, (last, False))[0]
        shapes[spec.field] = ([max(a, b) for a, b in zip(known, last, strict=True)], spec.is_fp32())
    for name, (shape, fp32) in shapes.items():
        yield FieldSpec(name, tuple(shape), fp32)


def parameter_count(specs: Sequence[TensorSpec]) -> int:
    """Number of parameters on disk."""
    return sum(spec.numel for spec in specs)


def memory_bytes(specs: Sequence[TensorSpec], element_bytes: int, ranks: int = 1) -> int:
    """Bytes that the weights need on one rank when held with `element_bytes` an element (fp32 ones with 4)."""
    return sum(math.prod(f.shape) * (4 if f.fp32 else element_bytes) for f in field_specs(specs, ranks))
