"""The demo model's config.json: Ling-3.0 in small, with the production head sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ling_local.engine.config import ModelConfig, model_config
from ling_local.train.vocab import CONTROL_TOKENS, EOS, PAD, VOCAB_SIZE

CONTEXT = 8192
DEMO: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "layer_group_size": 3,
    "head_dim": 128,
    "intermediate_size": 512,
    "first_k_dense_replace": 1,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "num_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 48,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "v_head_dim": 128,
    "rotary_dim": 64,
    "partial_rotary_factor": 0.5,
    "rope_theta": 6000000,
    "rope_scaling": None,
    "rope_interleave": True,
    "use_mla_nope": False,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "short_conv_kernel_size": 4,
    "kda_safe_gate": True,
    "kda_lower_bound": -5,
    "no_kda_lora": True,
    "use_kda_lora": False,
    "num_kv_heads_for_linear_attn": 0,
    "gated_attention_proj_granularity_type": "head_wise",
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "expert_swiglu_limit_list": [0, 0, 0, 0, 4, 4],
    "share_expert_swiglu_limit_list": [0, 0, 0, 5, 5, 7],
    "num_nextn_predict_layers": 1,
    "mtp_use_kda": False,
    "tie_word_embeddings": False,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": True,
    "linear_silu": True,
    "group_norm_size": 1,
    "up_proj_norm": False,
    "value_norm": False,
    "use_nGPT": False,
    "scale_router_input": False,
    "seq_aux": True,
    "max_window_layers": 20,
    "mtp_loss_scaling_factor": 0,
    "output_router_logits": False,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "output_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "eos_token_id": CONTROL_TOKENS.index(EOS),
    "pad_token_id": CONTROL_TOKENS.index(PAD),
}


def demo_config() -> ModelConfig:
    """The demo model's numbers."""
    return model_config(DEMO)


def save_config(folder: Path) -> None:
    """Write config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(DEMO, indent=2) + "\n", encoding="utf-8")
