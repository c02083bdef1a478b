"""ModelConfig and DraftConfig: the numbers of config.json, checked. No torch.

Only what Ling-3.0 publishes is accepted; each switch that would change the mathematics is either read or refused
by name, so that a checkpoint is never run with the wrong formula in silence.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ling_local.errors import ModelError

ARCHITECTURE = "BailingMoeV3ForCausalLM"
DRAFT_ARCHITECTURES = ("LingDSparkModel", "DSparkDraftModel", "Qwen3DSparkModel")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
MAX_BLOCK = 15  # drafts that fit a window beside its anchor (ROW_TILE of ling_kernels, which imports torch)

# Switches with one supported value. A missing key means that value (older files leave some out).
REQUIRED: dict[str, Any] = {
    "use_bias": False,
    "use_qkv_bias": False,
    "use_nGPT": False,
    "up_proj_norm": False,
    "value_norm": False,
    "use_kda_lora": False,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "mtp_use_kda": False,
    "use_mla_nope": False,
    "tie_word_embeddings": False,
    "scale_router_input": False,
    "gated_attention_proj_granularity_type": "head_wise",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "moe_router_enable_expert_bias": True,
    "hidden_act": "silu",
    "short_conv_kernel_size": 4,
    "rope_interleave": True,
    "rope_scaling": None,
    "num_shared_experts": 1,
}
# Keys that published files carry and that change nothing at inference (ling3-model.md section 1).
IGNORED_SWITCHES = {"use_qk_norm", "linear_silu", "seq_aux", "use_cache", "output_router_logits"}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One Ling-3.0 model. Names follow config.json where that name is clear.

    expert_limits, shared_limits   SwiGLU limit per layer, 0.0 for none (routed experts, shared expert)
    num_mtp_layers                 0 or 1
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    layer_group_size: int
    intermediate_size: int
    first_k_dense: int
    num_experts: int
    experts_per_token: int
    n_group: int
    topk_group: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    routed_scaling_factor: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    rms_norm_eps: float
    kda_lower_bound: float
    max_position_embeddings: int
    num_mtp_layers: int
    expert_limits: tuple[float, ...]
    shared_limits: tuple[float, ...]
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None

    def is_mla(self, layer: int) -> bool:
        """True for attention layers with a latent cache; the MTP layer (index num_layers) is one of them."""
        return layer >= self.num_layers or (layer + 1) % self.layer_group_size == 0

    def is_dense(self, layer: int) -> bool:
        """True for the leading layers with a plain MLP instead of experts."""
        return layer < self.first_k_dense

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if not self.is_mla(layer))

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.is_mla(layer))

    @property
    def latent_dim(self) -> int:
        """Values cached per token and MLA layer: latent, then the shared rope key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def expert_limit(self, layer: int) -> float:
        return self.expert_limits[layer] if layer < len(self.expert_limits) else 0.0

    def shared_limit(self, layer: int) -> float:
        return self.shared_limits[layer] if layer < len(self.shared_limits) else 0.0


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """One DSpark draft (dspark.md section 1). block_size is the number of drafted tokens, the anchor not counted."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    block_size: int
    mask_token_id: int
    target_layers: tuple[int, ...]
    markov_rank: int
    markov_head: str
    confidence_head: bool
    confidence_with_markov: bool
    sample_from_anchor: bool
    rope_theta: float
    rope_neox: bool
    rope_dim: int
    rms_norm_eps: float
    max_position_embeddings: int


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder as a dict, or a ModelError that names the file and the repair."""
    path = folder / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        where = "no such folder" if not folder.exists() else "the folder has no config.json"
        raise ModelError(
            f"{path}: {where}", "give the folder of a downloaded checkpoint (config.json, *.safetensors)"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}", "download this file again") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path}: not a JSON object", "download this file again")
    return data


def architectures(data: Mapping[str, Any]) -> set[str]:
    """What a config.json calls itself; nothing where that is no list of texts."""
    names = data.get("architectures")
    return {name for name in names if isinstance(name, str)} if isinstance(names, list) else set()


def load_model_config(folder: Path) -> ModelConfig:
    """Read and check `folder`/config.json. Raises ModelError naming the file and the key."""
    return model_config(read_config(folder), str(folder / "config.json"))


def model_config(data: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
    """The checked ModelConfig of a parsed config.json; `where` stands in messages."""
    keys = _Keys(data, where)
    _refuse_unsupported(data, keys)
    heads = keys.integer("num_attention_heads")
    layers = keys.integer("num_hidden_layers")
    config = ModelConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=layers,
        num_heads=heads,
        head_dim=keys.integer("head_dim"),
        layer_group_size=keys.integer("layer_group_size"),
        intermediate_size=keys.integer("intermediate_size"),
        first_k_dense=keys.integer("first_k_dense_replace", minimum=0),
        num_experts=keys.integer("num_experts"),
        experts_per_token=keys.integer("num_experts_per_tok", "num_experts_per_token"),
        n_group=keys.integer("n_group", "num_expert_group"),
        topk_group=keys.integer("topk_group"),
        moe_intermediate_size=keys.integer("moe_intermediate_size"),
        shared_intermediate_size=keys.integer("moe_shared_expert_intermediate_size"),
        routed_scaling_factor=keys.number("routed_scaling_factor"),
        q_lora_rank=keys.integer("q_lora_rank", minimum=0, default=0),
        kv_lora_rank=keys.integer("kv_lora_rank"),
        qk_nope_head_dim=keys.integer("qk_nope_head_dim"),
        qk_rope_head_dim=keys.integer("qk_rope_head_dim"),
        v_head_dim=keys.integer("v_head_dim"),
        rope_theta=keys.rope_theta(),
        rms_norm_eps=keys.number("rms_norm_eps", above=0),
        kda_lower_bound=keys.number("kda_lower_bound"),
        max_position_embeddings=keys.integer("max_position_embeddings"),
        num_mtp_layers=keys.integer("num_nextn_predict_layers", minimum=0, default=0),
        expert_limits=keys.limits("expert_swiglu_limit_list", layers),
        shared_limits=keys.limits("share_expert_swiglu_limit_list", layers),
        eos_token_ids=keys.ids("eos_token_id"),
        pad_token_id=next(iter(keys.ids("pad_token_id")), None),
    )
    _check_shape(config, data, keys)
    return config


def load_draft_config(folder: Path, target: ModelConfig) -> DraftConfig:
    """Read and check a DSpark draft's config.json against its target. Raises ModelError."""
    return draft_config(read_config(folder), target, str(folder / "config.json"))


def draft_config(data: Mapping[str, Any], target: ModelConfig, where: str = "config.json") -> DraftConfig:
    """The checked DraftConfig. Keys may be nested in dflash_config or dspark_config (dspark.md section 1.4)."""
    nested = _Keys(data, where)
    flat = {**nested.table("dflash_config"), **nested.table("dspark_config"), **data}
    flat |= {key.removeprefix("dspark_"): value for key, value in data.items() if key.startswith("dspark_")}
    keys = _Keys(flat, where)
    names = keys.items("architectures")
    if not any(name in DRAFT_ARCHITECTURES for name in names):
        keys.refuse("architectures", names, f"one of {', '.join(DRAFT_ARCHITECTURES)}")
    rank = keys.integer("markov_rank")
    head = flat.get("markov_head_type", "vanilla")
    if head not in MARKOV_HEADS:
        keys.refuse("markov_head_type", head, f"one of {', '.join(MARKOV_HEADS)}")
    scaling = dict(keys.table("rope_scaling"))
    rope_dim = scaling.pop("rope_dim", None)
    scaling = {k: v for k, v in scaling.items() if not (k in ("type", "rope_type") and v == "default")}
    if scaling:
        keys.refuse("rope_scaling", scaling, "none (the long context is native)")
    if any(kind != "full_attention" for kind in keys.items("layer_types")):
        keys.refuse("layer_types", flat["layer_types"], "full_attention only")
    head_dim = keys.integer("head_dim")
    taps = flat.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or any(not isinstance(i, int) for i in taps):
        keys.refuse("target_layer_ids", taps, "a list of layer numbers")
    if sorted(set(taps)) != taps or taps[0] < -1 or taps[-1] >= target.num_layers:
        keys.refuse("target_layer_ids", taps, f"increasing numbers below {target.num_layers}")
    config = DraftConfig(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=keys.integer("hidden_size"),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=keys.integer("num_attention_heads"),
        num_kv_heads=keys.integer("num_key_value_heads"),
        head_dim=head_dim,
        intermediate_size=keys.integer("intermediate_size"),
        block_size=keys.integer("block_size"),
        mask_token_id=keys.integer("mask_token_id", minimum=0),
        target_layers=tuple(taps),
        markov_rank=rank,
        markov_head=head,
        confidence_head=bool(flat.get("enable_confidence_head", False)),
        confidence_with_markov=bool(flat.get("confidence_head_with_markov", True)),
        sample_from_anchor=bool(flat.get("sample_from_anchor", True)),
        rope_theta=keys.rope_theta(),
        rope_neox=bool(flat.get("rope_is_neox_style", flat.get("is_neox_style", True))),
        rope_dim=head_dim if rope_dim is None else rope_dim,
        rms_norm_eps=keys.number("rms_norm_eps", above=0),
        max_position_embeddings=keys.integer("max_position_embeddings"),
    )
    if (config.vocab_size, config.hidden_size) != (target.vocab_size, target.hidden_size):
        raise ModelError(
            f"{where}: the draft is for a model with vocabulary {config.vocab_size} and width {config.hidden_size}; "
            f"this one has {target.vocab_size} and {target.hidden_size}",
            "use the draft that was trained for this model",
        )
    if config.mask_token_id >= config.vocab_size:
        keys.refuse("mask_token_id", config.mask_token_id, f"an id below {config.vocab_size}")
    if config.block_size > MAX_BLOCK:
        keys.refuse("block_size", config.block_size, f"at most {MAX_BLOCK} drafts a step")
    if config.num_heads % config.num_kv_heads:
        keys.refuse("num_key_value_heads", config.num_kv_heads, f"a divisor of {config.num_heads}")
    if config.rope_dim not in range(2, head_dim + 1, 2):
        keys.refuse("rope_scaling", flat.get("rope_scaling"), f"an even rope_dim up to {head_dim}")
    return config


class _Keys:
    """Typed access to a parsed config with errors that name file and key."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def refuse(self, key: str, value: Any, supported: str) -> None:
        raise ModelError(
            f"{self.where}: {key} is {json.dumps(value)}; ling supports {supported}",
            "use a published Ling-3.0 checkpoint (inclusionAI/Ling-3.0-flash, Ling-3.0-tiny) in its own layout",
        )

    def _get(self, names: tuple[str, ...], default: Any) -> Any:
        for name in names:
            if self.data.get(name) is not None:
                return self.data[name]
        if default is None:
            raise ModelError(f"{self.where}: {names[0]} is missing", "download config.json again")
        return default

    def integer(self, *names: str, minimum: int = 1, default: int | None = None) -> int:
        value = self._get(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self.refuse(names[0], value, f"a whole number from {minimum} up")
        return value

    def number(self, name: str, above: float = -math.inf) -> float:
        value = self._get((name,), None)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value < math.inf:
            self.refuse(name, value, "a number" if above < 0 else f"a number above {above}")
        return float(value)

    def table(self, name: str) -> Mapping[str, Any]:
        """A nested object, empty where there is none."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, value, "an object")
        return value or {}

    def items(self, name: str) -> list[Any]:
        """A list, empty where there is none."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, list):
            self.refuse(name, value, "a list")
        return value or []

    def ids(self, name: str) -> tuple[int, ...]:
        """Token ids: none, one or a list of them."""
        value = self.data.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) for i in found):
            self.refuse(name, value, "token ids")
        return tuple(found)

    def rope_theta(self) -> float:
        """The base of the rope's angles, also where transformers has put it. Refuses a rope that is scaled."""
        rope = self.table("rope_parameters")
        kind = rope.get("rope_type", rope.get("type"))
        if kind not in (None, "default"):
            self.refuse("rope_parameters", rope, "rope_type default (the long context is native)")
        return _Keys({**rope, **self.data}, self.where).number("rope_theta", above=0)

    def limits(self, name: str, layers: int) -> tuple[float, ...]:
        value = self.data.get(name)
        if value is None:
            return ()
        good = isinstance(value, list) and all(v is None or isinstance(v, int | float) for v in value)
        if not good or len(value) < layers:
            self.refuse(name, value, f"null or a list of {layers} numbers")
        return tuple(float(v or 0.0) for v in value)


def _refuse_unsupported(data: Mapping[str, Any], keys: _Keys) -> None:
    if ARCHITECTURE not in keys.items("architectures") or data.get("model_type") != "bailing_hybrid":
        found = {"architectures": data.get("architectures"), "model_type": data.get("model_type")}
        keys.refuse("the architecture", found, f"{ARCHITECTURE} with model_type bailing_hybrid")
    if quantization := keys.table("quantization_config"):
        method = quantization.get("quant_method", "unknown")
        keys.refuse("quantization_config", method, "bf16 checkpoints for now (fp8, fp4 and int4 are not read yet)")
    for key, supported in REQUIRED.items():
        if key in data and data[key] != supported:
            keys.refuse(key, data[key], json.dumps(supported))
    for key, value in data.items():
        if value is True and key not in REQUIRED and key not in IGNORED_SWITCHES:
            keys.refuse(key, value, "no such switch; it may change the mathematics")
    if data.get("num_kv_heads_for_linear_attn", 0) not in (0, data.get("num_attention_heads")):
        keys.refuse("num_kv_heads_for_linear_attn", data["num_kv_heads_for_linear_attn"], "0")
    if data.get("num_nextn_predict_layers", 0) not in (0, 1, None):
        keys.refuse("num_nextn_predict_layers", data["num_nextn_predict_layers"], "0 or 1")


def _check_shape(config: ModelConfig, data: Mapping[str, Any], keys: _Keys) -> None:
    """Sizes that must fit each other."""
    if config.num_layers % config.layer_group_size:
        keys.refuse(
            "num_hidden_layers",
            config.num_layers,
            f"a multiple of {config.layer_group_size} (layer_group_size)",
        )
    if data.get("num_key_value_heads", config.num_heads) != config.num_heads:
        keys.refuse("num_key_value_heads", data["num_key_value_heads"], str(config.num_heads))
    if config.num_experts % config.n_group or config.num_experts // config.n_group < 2:
        keys.refuse("n_group", config.n_group, f"groups of two experts or more out of {config.num_experts}")
    if not config.topk_group <= config.n_group:
        keys.refuse("topk_group", config.topk_group, f"at most {config.n_group}")
    if config.experts_per_token > config.topk_group * (config.num_experts // config.n_group):
        keys.refuse("num_experts_per_tok", config.experts_per_token, "as many as the chosen groups hold")
    rope = config.qk_rope_head_dim
    for key, expected in (("rotary_dim", rope), ("qk_head_dim", config.qk_nope_head_dim + rope)):
        if data.get(key, expected) != expected:
            keys.refuse(key, data[key], str(expected))
    if rope % 2:
        keys.refuse("qk_rope_head_dim", rope, "an even number")
    if not -5.0 <= config.kda_lower_bound < 0:
        # prefill takes 16 tokens at once: exp(16 * 5) is the most that fp32 holds
        keys.refuse("kda_lower_bound", config.kda_lower_bound, "a number from -5 up to 0")
