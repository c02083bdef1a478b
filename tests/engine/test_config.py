"""What config.json may say: every switch is read or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import GOLDEN, config_json
from ling_kernels.ops import ROW_TILE
from ling_local.engine.config import MAX_BLOCK, REQUIRED, draft_config, load_model_config, model_config
from ling_local.errors import ModelError
from published import DRAFT, FLASH


def opposite(value: object) -> object:
    return (not value) if isinstance(value, bool) else "something-else"


@pytest.mark.parametrize("key", REQUIRED)
def test_an_unsupported_switch_is_refused_by_name(key: str) -> None:
    with pytest.raises(ModelError, match=key) as caught:
        model_config(config_json(**{key: opposite(REQUIRED[key])}))
    assert caught.value.exit_code == 1
    assert caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_sliding_window", True),  # a switch that nobody knows
        ("quantization_config", {"quant_method": "fp8"}),
        ("architectures", 5),
        ("architectures", ["BailingHybridForCausalLM"]),  # written again by transformers
        ("model_type", "bailing_moe"),
        ("num_nextn_predict_layers", 2),
        ("num_hidden_layers", 3),  # a ragged last group
        ("num_key_value_heads", 1),
        ("n_group", 3),
        ("qk_head_dim", 64),
        ("rotary_dim", 8),
        ("num_experts_per_tok", 9),
        ("num_kv_heads_for_linear_attn", 1),
        ("expert_swiglu_limit_list", [4, 4]),
        ("hidden_size", 0),
        ("hidden_size", "64"),
        ("hidden_size", None),
        ("rope_theta", "big"),
        ("rope_theta", 0),
        ("rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
        ("rope_parameters", [6e6]),
        ("rms_norm_eps", float("nan")),
        ("routed_scaling_factor", float("inf")),
        ("kda_lower_bound", -20),  # a tile of a prefill would overflow
        ("quantization_config", "fp8"),
        ("architectures", 7),
        ("eos_token_id", "3"),
        ("pad_token_id", [1.5]),
    ],
)
def test_a_bad_value_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key.removesuffix("s") if key == "architectures" else key):
        model_config(config_json(**{key: value}))


def test_keys_that_change_nothing_are_ignored() -> None:
    plain = model_config(config_json())
    assert model_config(config_json(partial_rotary_factor=0.25, auto_map={}, seq_aux=True, seq_len="x")) == plain
    assert model_config(config_json(kda_lower_bound=-5)).kda_lower_bound == -5.0
    assert model_config(config_json(eos_token_id=[3, 5])).eos_token_ids == (3, 5)


def test_names_of_other_writers_are_read() -> None:
    data = config_json()
    data["num_experts_per_token"] = data.pop("num_experts_per_tok")
    data["num_expert_group"] = data.pop("n_group")
    data["rope_parameters"] = {"rope_theta": data.pop("rope_theta")}
    assert model_config(data) == model_config(config_json())


@pytest.mark.parametrize("text", ["", "{", "[1]", '"text"'])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)
    with pytest.raises(ModelError, match="no such folder"):
        load_model_config(tmp_path / "elsewhere")


def test_layer_kinds_follow_the_published_pattern() -> None:
    flash = model_config(config_json(**FLASH))
    assert flash.mla_layers == (5, 11, 17, 23, 29, 35, 41)
    assert flash.is_mla(42)
    assert [layer for layer in range(42) if flash.is_dense(layer)] == [0, 1]
    assert (flash.expert_limit(34), flash.expert_limit(35), flash.expert_limit(42)) == (0.0, 4.0, 0.0)
    assert (flash.shared_limit(33), flash.shared_limit(34), flash.shared_limit(41)) == (0.0, 5.0, 7.0)


def test_goldens_are_read() -> None:
    for name in ("flashlike", "tinylike_realdims"):
        data = json.loads((GOLDEN / name / "config.json").read_text())
        config = load_model_config(GOLDEN / name)
        assert config.hidden_size == data["hidden_size"]
        assert config.q_lora_rank == (data["q_lora_rank"] or 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["Qwen3ForCausalLM"]),
        ("architectures", 5),
        ("block_size", None),
        ("block_size", 16),
        ("num_key_value_heads", 3),
        ("mask_token_id", None),
        ("mask_token_id", 157184),
        ("markov_rank", 0),
        ("markov_head_type", "deep"),
        ("target_layer_ids", [3, 1]),
        ("target_layer_ids", [41, 42]),
        ("target_layer_ids", None),
        ("rope_theta", None),
        ("rope_scaling", {"type": "yarn", "factor": 2}),
        ("rope_scaling", "yarn"),
        ("rope_scaling", {"rope_dim": 130}),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("layer_types", ["sliding_attention"]),
        ("layer_types", 5),
        ("dspark_config", [1]),
    ],
)
def test_a_draft_is_never_guessed(key: str, value: object) -> None:
    with pytest.raises(ModelError, match=key):
        draft_config({**DRAFT, key: value}, model_config(config_json(**FLASH)))


def test_the_largest_block_fills_a_window() -> None:
    assert MAX_BLOCK + 1 == ROW_TILE


def test_a_draft_of_another_model_is_refused() -> None:
    with pytest.raises(ModelError, match="width 2560"):
        draft_config({**DRAFT, "target_layer_ids": [0, 2]}, model_config(config_json()))
