"""The published layout, checked against an independent implementation. In fp32 every logit within 2e-3."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ling_kernels.ops import Routing
from ling_kernels.reference import ReferenceOps
from ling_local.engine.native import NativeEngine
from ling_local.types import TokenRequest
from parity import assert_close

FOLDER = Path(__file__).parent
MODELS = ("flashlike", "tinylike_realdims")
LENGTHS = (1, 7, 65, 130)
WAYS = {
    "prefill": {},
    "chunks of 17": {"chunk": 17},
    "chunks of 1": {"chunk": 1},
    "one row at a time": {"window": 1},
    "windows of 9": {"window": 9},
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[NativeEngine, dict[str, np.ndarray]]:
    folder = FOLDER / request.param
    return NativeEngine.load(folder, dtype="float32"), np.load(folder / "golden.npz")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("way", WAYS)
def test_logits_of_every_position(model, length: int, way: str) -> None:
    engine, golden = model
    logits = engine.score(golden[f"prompt_{length}"].tolist(), **WAYS[way])
    assert_close(logits, golden[f"prefill_logits_{length}"], "golden logits")


@pytest.mark.parametrize("length", [7, 65])
def test_logits_with_a_cache(model, length: int) -> None:
    engine, golden = model
    logits = engine.score(golden[f"prompt_{length}"].tolist(), window=1)
    assert_close(logits, golden[f"step_logits_{length}"], "golden logits")


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens(model, length: int) -> None:
    engine, golden = model
    request = TokenRequest(tuple(golden[f"prompt_{length}"].tolist()), max_tokens=32)
    made = [token for result in engine.generate(request) for token in result.ids]
    assert made == golden[f"greedy_tokens_{length}"].tolist()
    logits = engine.score([*request.ids, *made[:-1]])[-32:]
    assert_close(logits, golden[f"greedy_logits_{length}"], "golden logits")


class Recorder(ReferenceOps):
    """Keeps the residual stream at every norm and each layer's chosen experts."""

    def __init__(self) -> None:
        self.residual: list[torch.Tensor] = []
        self.normed: list[torch.Tensor] = []
        self.chosen: list[torch.Tensor] = []

    def exchange_norm(self, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        x, h = ReferenceOps.exchange_norm(*args, **kwargs)
        self.residual.append(x)
        self.normed.append(h)
        return x, h

    def route(self, *args, **kwargs) -> Routing:
        routing = ReferenceOps.route(*args, **kwargs)
        self.chosen.append(routing.experts.sort(-1).values)
        return routing


def test_hidden_states_and_routes(model) -> None:
    engine, golden = model
    recorder, plain = Recorder(), engine.ops
    engine.ops = recorder
    try:
        engine.score(golden["prompt_7"].tolist())
    finally:
        engine.ops = plain
    assert_close(torch.stack(recorder.residual[:-1:2]), golden["hidden_in_7"], "golden hidden states")
    assert_close(recorder.normed[-1], golden["hidden_final_normed_7"], "golden hidden states")
    config = engine.weights.config
    routed = [layer for layer in range(config.num_layers) if not config.is_dense(layer)]
    assert len(recorder.chosen) == len(routed)
    for layer, chosen in zip(routed, recorder.chosen, strict=True):
        assert chosen.tolist() == golden[f"route_7_layer{layer}"].tolist(), f"layer {layer}"
