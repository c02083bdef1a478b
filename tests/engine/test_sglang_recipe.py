"""SGLang's flags: what we ask it for, against the flags that the real package was seen to take."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

import sglang_facts
from ling_local.engine.gpus import Gpu
from ling_local.engine.protocol import Dummy, EngineSpec
from ling_local.engine.sglang import package
from ling_local.engine.sglang.package import check_version
from ling_local.engine.sglang.recipe import Recipe, as_command, build_recipe, file_bytes, with_passed
from ling_local.errors import EngineError, ModelError, UsageError
from sglang_stand_in import HOPPER, make_model

FACTS = json.loads(sglang_facts.FILE.read_text(encoding="utf-8"))


def gpus(count: int, capability: tuple[int, int] = (9, 0), total: int = 1 << 37) -> list[Gpu]:
    return [Gpu(index, "GPU", total, total, capability) for index in range(count)]


def flags(recipe: Recipe) -> dict[str, list[str]]:
    """The words after each flag."""
    found: dict[str, list[str]] = {}
    for word in recipe.words:
        if word.startswith("--"):
            assert word not in found, f"{word} twice"
            found[word] = []
        else:
            list(found.values())[-1].append(word)
    return found


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return EngineSpec(str(make_model(tmp_path)), "sglang", "cuda", "bfloat16")


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0), (12, 0)])
def test_every_flag_is_one_of_sglangs_with_as_many_words(tmp_path: Path, capability: tuple[int, int]) -> None:
    for recipe in sglang_facts.recipes(tmp_path, capability).values():
        for name, words in flags(recipe).items():
            kind, _, choices = FACTS["options"][name].partition(" ")
            assert len(words) == {"none": 0, "one": 1}[kind], name
            assert not choices or words[0] in choices.split("|"), name
        assert {name for name, _ in recipe.variables} <= set(FACTS["variables"])


def test_what_sglang_made_of_them_is_what_was_meant(tmp_path: Path) -> None:
    """The resolved values were read from the real package."""
    resolved = FACTS["resolved"]
    assert set(resolved) == set(sglang_facts.SPECS)
    for name, recipe in sglang_facts.recipes(tmp_path).items():
        values, given = resolved[name], flags(recipe)
        assert values["disable_radix_cache"] is values["skip_tokenizer_init"] is True
        assert values["incremental_streaming_output"] is True
        assert values["max_running_requests"] == 1
        assert [str(values["tp_size"])] == given["--tp-size"]
        assert str(values["context_length"] or "") == "".join(given.get("--context-length", []))
    assert resolved["plain"]["speculative_algorithm"] is None
    assert resolved["dspark"]["speculative_algorithm"] == "DSPARK"
    assert resolved["dspark"]["speculative_num_draft_tokens"] == 8 + 1  # the draft's own block, and the anchor
    assert resolved["dspark, block 4"]["speculative_num_draft_tokens"] == 4 + 1
    assert resolved["nextn"]["speculative_algorithm"] == "EAGLE"  # NEXTN is another name of it
    assert resolved["nextn"]["speculative_num_draft_tokens"] == 5 + 1
    assert resolved["nextn, block 3"]["speculative_num_draft_tokens"] == 3 + 1


def test_what_the_engine_relies_on_was_there() -> None:
    assert "BailingMoeV3ForCausalLM" in FACTS["architectures"]
    assert {"input_ids", "sampling_params", "stream", "rid"} <= set(FACTS["generate"])
    assert "rid" in FACTS["abort_request"]
    assert FACTS["engine"] == ["loop", "tokenizer_manager"]
    assert FACTS["methods"] == ["get_server_info", "shutdown"]
    assert FACTS["meta_info"] == list(sglang_facts.META)
    assert FACTS["server_info"] == ["max_req_input_len"]
    assert FACTS["nan_is_said"]
    assert FACTS["variables"] == {"SGLANG_OPT_FUSED_KDA_VERIFY": False, "SGLANG_RAGGED_VERIFY_MODE": "static"}


def test_the_published_recipe(spec: EngineSpec) -> None:
    """Four Blackwell GPUs, DSPARK."""
    recipe = build_recipe(replace(spec, gpus=(0, 1, 2, 3)), gpus(4, (10, 0)))
    given = flags(recipe)
    assert given["--tp-size"] == ["4"]
    assert given["--speculative-algorithm"] == ["DSPARK"]
    assert given["--speculative-draft-model-path"] == [f"{spec.model}/dspark"]
    assert given["--attention-backend"] == ["trtllm_mla"]
    assert given["--flashinfer-allreduce-fusion-backend"] == ["auto"]
    assert given["--disable-radix-cache"] == []
    assert dict(recipe.variables) == {"SGLANG_OPT_FUSED_KDA_VERIFY": "1", "SGLANG_RAGGED_VERIFY_MODE": "static"}
    assert not {"--speculative-num-steps", "--speculative-num-draft-tokens"} & set(given)


@pytest.mark.parametrize(("capability", "named"), [((9, 0), False), ((10, 0), True), ((10, 3), True), ((12, 0), False)])
def test_trtllm_mla_is_for_blackwell_in_the_data_centre(
    spec: EngineSpec, capability: tuple[int, int], named: bool
) -> None:
    assert ("--attention-backend" in flags(build_recipe(spec, gpus(1, capability)))) is named
    assert "--attention-backend" not in flags(build_recipe(spec, []))


def test_the_generation_is_that_of_the_gpus_in_use(spec: EngineSpec) -> None:
    mixed = [Gpu(0, "old", 1 << 37, 1 << 37, (9, 0)), Gpu(1, "new", 1 << 37, 1 << 37, (10, 0))]
    assert "--attention-backend" in flags(build_recipe(replace(spec, gpus=(1,)), mixed))
    assert "--attention-backend" not in flags(build_recipe(replace(spec, gpus=(0,)), mixed))


def test_the_best_drafter_that_is_there(tmp_path: Path) -> None:
    plain = EngineSpec(str(make_model(tmp_path, draft=False)), "sglang", "cuda", "bfloat16")
    assert build_recipe(plain, HOPPER).drafter == "mtp"
    off = build_recipe(replace(plain, draft="off"), HOPPER)
    assert (off.drafter, off.variables) == ("off", ())
    assert not [name for name in flags(off) if "speculative" in name]
    with pytest.raises(ModelError, match="no draft"):
        build_recipe(replace(plain, draft="dspark"), HOPPER)
    config = json.loads((Path(plain.model) / "config.json").read_text())
    (Path(plain.model) / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    assert build_recipe(plain, HOPPER).drafter == "off"
    with pytest.raises(ModelError, match="no MTP layer"):
        build_recipe(replace(plain, draft="mtp"), HOPPER)


def test_a_block_is_at_most_the_drafts_own(spec: EngineSpec) -> None:
    assert flags(build_recipe(replace(spec, block=8), HOPPER))["--speculative-dspark-block-size"] == ["8"]
    with pytest.raises(UsageError, match="blocks of 8"):
        build_recipe(replace(spec, block=9), HOPPER)


def test_as_many_gpus_as_the_files_need(spec: EngineSpec) -> None:
    needed = file_bytes(Path(spec.model))

    def size(*totals: int) -> str:
        found = [Gpu(index, "GPU", total, total, (9, 0)) for index, total in enumerate(totals)]
        return flags(build_recipe(spec, found))["--tp-size"][0]

    assert size(2 * needed, 2 * needed, 2 * needed) == "1"
    assert size(needed, needed, needed) == "2"
    assert size(*[needed // 2] * 8) == "4"
    assert size(*[1] * 3) == "2"  # nothing fits: SGLang says what is short
    assert size() == "1"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ((0,), {}),
        ((3,), {"--base-gpu-id": ["3"]}),
        ((0, 1), {}),
        ((2, 3), {"--base-gpu-id": ["2"]}),
        ((1, 3, 5, 7), {"--base-gpu-id": ["1"], "--gpu-id-step": ["2"]}),
    ],
)
def test_named_gpus(spec: EngineSpec, named: tuple[int, ...], expected: dict[str, list[str]]) -> None:
    given = flags(build_recipe(replace(spec, gpus=named), gpus(8)))
    assert given["--tp-size"] == [str(len(named))]
    assert {name: words for name, words in given.items() if "gpu-id" in name} == expected


@pytest.mark.parametrize("named", [(0, 1, 2), (1, 0), (0, 1, 3, 4)])
def test_gpus_that_sglang_cannot_be_given(spec: EngineSpec, named: tuple[int, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        build_recipe(replace(spec, gpus=named), gpus(8))
    assert caught.value.hint


@pytest.mark.parametrize(
    "change", [{"device": "cpu"}, {"dtype": "float32"}, {"dummy": Dummy("tiny")}, {"accept": (1, 2)}]
)
def test_what_only_the_native_engine_does_is_refused(spec: EngineSpec, change: dict) -> None:
    with pytest.raises(UsageError) as caught:
        build_recipe(replace(spec, **change), HOPPER)
    assert "--" in caught.value.hint


def test_flags_are_passed_on_and_replace_ours() -> None:
    ours = {"--tp-size": ("1",), "--disable-radix-cache": (), "--max-running-requests": ("1",)}
    assert with_passed(ours, ["tp_size=8", "nnodes=2", "--dist-init-addr=10.0.0.1:20000"]) == {
        **ours,
        "--tp-size": ("8",),
        "--nnodes": ("2",),
        "--dist-init-addr": ("10.0.0.1:20000",),
    }
    assert with_passed(ours, ["disable-radix-cache=false"]) == {
        "--tp-size": ("1",),
        "--max-running-requests": ("1",),
    }
    assert with_passed({}, ["trust_remote_code"]) == with_passed({}, ["trust_remote_code=true"])
    assert with_passed({}, ["cuda_graph_bs=1", "cuda_graph_bs=2"]) == {"--cuda-graph-bs": ("1", "2")}
    assert with_passed({}, ['json_model_override_args={"a": 1}']) == {"--json-model-override-args": ('{"a": 1}',)}


@pytest.mark.parametrize("text", ["", "=4", "tp size=4", "--", "a;b=1", "model_path=/x", "skip-tokenizer-init=false"])
def test_what_cannot_be_passed_on_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        with_passed({}, [text])
    assert "--sglang-arg" in caught.value.message
    assert caught.value.hint


def test_the_command_can_be_pasted_into_a_shell(spec: EngineSpec) -> None:
    recipe = build_recipe(replace(spec, passed=("served_model_name=my model",)), HOPPER)
    words = shlex.split(as_command(recipe).replace("\\\n", ""))
    start = words.index("python")
    assert words[start : start + 3] == ["python", "-m", "sglang.launch_server"]
    assert tuple(words[start + 3 :]) == recipe.words
    assert [tuple(word.split("=")) for word in words[:start]] == list(recipe.variables)


@pytest.mark.parametrize("found", [package.FIRST_VERSION, package.RUN_VERSION, "0.5.19.post1", "0.6.0", "1.0"])
def test_versions_that_know_the_model(found: str) -> None:
    assert check_version(found) == found


@pytest.mark.parametrize("found", [None, "0.5.18", "0.5.2", "0.4.99"])
def test_versions_that_do_not_say_what_to_install(found: str | None) -> None:
    with pytest.raises(EngineError) as caught:
        check_version(found)
    assert "pip install" in caught.value.hint


def test_the_recorded_package_is_one_that_was_seen_to_run_the_model() -> None:
    assert FACTS["version"] == package.RUN_VERSION
