"""The whole decode step on the GPU's kernels, run on a CPU: the engine as it is, with other ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints import write_checkpoint, write_draft
from device_checks import assert_near
from ling_kernels.cuda import CudaOps
from ling_local.engine.breakdown import Recorder, grouped, op_bytes
from ling_local.engine.native import NativeEngine
from ling_local.engine.step import step
from ling_local.types import SamplingParams, StepResult, TokenRequest
from parity import assert_bits
from settled import SettledDevice

pytestmark = pytest.mark.emulated

# the sizes that the kernels know, and little of everything else
SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "qk_head_dim": 192,
    "rotary_dim": 64,
    "v_head_dim": 128,
    "expert_swiglu_limit_list": [0, 4],
    "share_expert_swiglu_limit_list": [0, 5],
}
IDS = tuple((7 * i + 3) % 128 for i in range(9))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_checkpoint(tmp_path_factory.mktemp("model"), seed=5, **SHAPE)
    changes = {"head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1, "target_layer_ids": [0, 1]}
    write_draft(folder / "dspark", folder, block_size=4, **changes)
    return folder


@pytest.fixture(scope="module")
def device(built: Path) -> Iterator[SettledDevice]:
    with SettledDevice(built).in_order() as device:
        yield device


def tensors_of(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)


def emulated(folder: Path, device: SettledDevice, draft: str = "off") -> NativeEngine:
    engine = NativeEngine.load(folder, dtype="bfloat16", draft=draft, context=64)
    engine.ops = CudaOps(device)
    device.constant(*tensors_of(engine.weights), *tensors_of(getattr(engine.drafter, "params", None)))
    device.constant(engine._state.rope)
    gates = [layer.mlp.gate for layer in engine.weights.layers if hasattr(layer.mlp, "gate")]
    if engine.weights.mtp:
        gates.append(engine.weights.mtp.layer.mlp.gate)
    device.constant(*[engine.ops._gate(gate) for gate in gates])
    return engine


def test_logits_are_the_references_and_do_not_depend_on_the_window(folder: Path, device: SettledDevice) -> None:
    engine = emulated(folder, device)
    state = engine.new_state
    engine.new_state = lambda context: _declared(device, state(context))
    alone = engine.score(IDS, window=1)
    want = NativeEngine.load(folder, dtype="bfloat16").score(IDS, window=1)
    assert_near(alone, want, "logits", 3e-2)  # two layers of bf16, rounded in other places
    assert_bits(engine.score(IDS, window=4), alone, "logits in windows of 4")
    assert_bits(engine.score(IDS, window=9), alone, "logits in a window of 9")
    longer = (*IDS, *IDS, *IDS)
    want = NativeEngine.load(folder, dtype="bfloat16").score(longer)
    assert_near(engine.score(longer), want, "logits by prefill", 3e-2)


def test_norms_in_the_kernels_after_change_no_logit(
    folder: Path, device: SettledDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    # enough multiprocessors for all projections to be short ones
    monkeypatch.setattr(device, "properties", dataclasses.replace(device.properties, num_sms=64))
    engine = emulated(folder, device)
    state, ids = engine.new_state, IDS[:3]
    engine.new_state = lambda context: _declared(device, state(context))
    engine.ops.norm_in_next = False
    want = engine.score(ids, window=1)
    engine.ops.norm_in_next = True
    device.launched.clear()
    assert_bits(engine.score(ids, window=1), want, "logits")
    count = device.launched.count
    assert count("linear_normed") == count("router_normed") == len(ids)  # of the second layer
    assert count("experts_choose_gate_up_1") == len(ids)
    assert not count("route_select_8")
    assert count("exchange_norm") == 2 * len(ids)  # before a dense MLP and before the head


def test_a_breakdown_counts_bytes_where_they_are_moved(folder: Path, device: SettledDevice) -> None:
    engine = emulated(folder, device)
    state = _declared(device, engine.new_state(64))
    state.begin(8, 1, 100, [], SamplingParams(temperature=0.0))
    recorder = Recorder(engine.ops)
    step(recorder, engine.weights, state, None, 1, 0)
    recorder.close()
    rows = grouped(recorder.calls, 8)
    idle = [call.name for call in recorder.calls if not call.launches]
    assert idle == ["embed", "exchange_norm", "exchange_norm", "kda_commit"]  # before MLA and before a router
    assert (rows["embed"].bytes, rows["kda_commit"].bytes) == (0.0, 0.0)
    assert rows["advance"].bytes > 2 * state.conv.nbytes
    assert sum(row.bytes for row in rows.values()) == pytest.approx(sum(op_bytes(c, 8) for c in recorder.calls))


def _declared(device: SettledDevice, state: Any) -> Any:
    device.constant(state.rope)
    return state


GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(0.8, 30, 0.9, 3)


@pytest.mark.parametrize(("draft", "params"), [("dspark", GREEDY), ("dspark", SAMPLED), ("mtp", GREEDY)])
def test_drafts_change_no_token(folder: Path, device: SettledDevice, draft: str, params: SamplingParams) -> None:
    engine = emulated(folder, device, draft)
    if draft == "dspark":
        device.constant(engine._state.draft_rope)
    plain = run(engine, params, drafts=False)  # long enough that steps without drafts are timed, and drafting begins
    speculated = run(engine, params, drafts=True)
    assert any(result.drafted for result in speculated)
    assert [token for result in speculated for token in result.ids] == [t for result in plain for t in result.ids]


def run(engine: NativeEngine, params: SamplingParams, drafts: bool) -> list[StepResult]:
    return list(engine.generate(TokenRequest(IDS, sampling=params, max_tokens=5, draft=drafts)))


# layers, how many of them make a group that ends with MLA, how many have a dense MLP
@pytest.mark.parametrize(("layers", "group", "dense"), [(2, 2, 1), (2, 2, 0), (2, 1, 1), (1, 1, 1), (1, 1, 0)])
def test_what_may_still_run_is_not_read(
    tmp_path: Path, device: SettledDevice, monkeypatch: pytest.MonkeyPatch, layers: int, group: int, dense: int
) -> None:
    """Steps one behind the other, as if each kernel began as soon as the ones before it let it: nothing that is read
    before the wait is older than it would be if each had ended first."""
    monkeypatch.setattr(device, "properties", dataclasses.replace(device.properties, num_sms=64))
    changes = {
        "num_hidden_layers": layers,
        "layer_group_size": group,
        "first_k_dense_replace": dense,
        "expert_swiglu_limit_list": [0] * layers,
        "share_expert_swiglu_limit_list": [0] * layers,
    }
    folder = write_checkpoint(tmp_path / "model", seed=6, **SHAPE | changes)
    ones = {"head_dim": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    write_draft(folder / "dspark", folder, block_size=4, target_layer_ids=list(range(layers)), **ones)
    for draft in ("off", "dspark", "mtp"):
        engine = emulated(folder, device, draft)
        ends = []
        for waits in (False, True):
            with monkeypatch.context() as patch:
                if waits:
                    launch = device.launch
                    patch.setattr(device, "launch", lambda *a, launch=launch, **k: (device.settle(), launch(*a, **k)))
                ends.append([end for params in (GREEDY, SAMPLED) for end in _after_steps(engine, device, params)])
        for early, late in zip(*ends, strict=True):
            assert torch.equal(early, late)


@torch.inference_mode()
def _after_steps(engine: NativeEngine, device: SettledDevice, params: SamplingParams) -> list[Tensor]:
    """What some steps leave that nothing comes between."""
    state = _declared(device, engine.new_state(64))
    if state.draft_rope is not None:
        device.constant(state.draft_rope)
    state.reserve(64)
    state.begin(0, 3, 64, [], params)
    drafts = 3 if engine.drafter else 0
    kinds = [(1, 0), (1, 0), (1, drafts), (drafts + 1, drafts), (drafts + 1, 0), (3, 0), (9, 0), (1, 0)]
    for width, following in kinds:
        step(engine.ops, engine.weights, state, engine.drafter, width, following)
    kept = (state.ring, state.positions, state.recurrent, state.conv, state.latent, state.draft_context)
    return [tensor for tensor in (*kept, state.mtp_latent) if tensor is not None]
