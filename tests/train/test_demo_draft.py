"""The bundled draft: it helps, it is read the right way, and it changes nothing (dspark.md section 16, T4)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import EngineSpec
from ling_local.generate import TextModel
from ling_local.paths import demo_dir
from ling_local.types import Message, Request, TokenRequest

CODE = '''"""Helpers for reading settings."""

import json
from pathlib import Path


def read_settings(path):
    """Return the settings in a JSON file, or an empty dict if there is none."""
    path = Path(path)
    if not path.exists():
        return {}
    with path.open(encoding="utf-8") as file:
        return json.load(file)


def write_settings(path, settings):
    """Write the settings to a JSON file."""
'''


@pytest.fixture(scope="module")
def engine() -> NativeEngine:
    return NativeEngine.load(demo_dir(), draft="dspark")


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    text = TextModel.load(EngineSpec(str(demo_dir())))
    chat = Request((Message("user", "What does itertools.chain do?"),), thinking=False)
    return [tuple(text.encode(Request(CODE))), tuple(text.encode(chat))]


def accept_length(engine: NativeEngine, ids: tuple[int, ...], max_tokens: int = 40) -> float:
    request = TokenRequest(ids, max_tokens=max_tokens, stop_ids=frozenset({1}), full_width=True)
    results = list(engine.generate(request))
    return sum(len(r.ids) for r in results) / len(results)


@pytest.fixture(scope="module")
def lengths(engine: NativeEngine, prompts: list[tuple[int, ...]]) -> list[float]:
    """Accept length of each prompt, the draft read as it is meant."""
    return [accept_length(engine, ids) for ids in prompts]


def test_the_bundled_draft_gets_several_tokens_through_a_step(lengths: list[float]) -> None:
    assert min(lengths) > 1.5
    assert sum(lengths) / len(lengths) > 2.5


@pytest.mark.parametrize(
    "changes",
    [{"mask_id": 0}, {"neox": False}, {"rope_dim": 64}, {"from_anchor": False}],
    ids=["mask id", "rope style", "rope width", "row shift"],
)
def test_reading_the_draft_another_way_loses_acceptance(engine, prompts, lengths, changes: dict) -> None:
    plain, drafter = engine.drafter, engine.drafter
    config = dataclasses.replace(drafter.config, rope_dim=changes.get("rope_dim", drafter.config.rope_dim))
    engine.drafter = dataclasses.replace(drafter, params=dataclasses.replace(drafter.params, **changes), config=config)
    state, engine._state = engine._state, engine.new_state(engine.info.context_limit)
    engine._forget()
    try:
        wrong = [accept_length(engine, ids) for ids in prompts]
    finally:
        engine.drafter, engine._state = plain, state
        engine._forget()
    assert sum(wrong) < 0.9 * sum(lengths)


def test_target_draft_and_tokenizer_stay_under_their_size() -> None:
    files = [*demo_dir().glob("*.safetensors"), *(demo_dir() / "dspark").glob("*.safetensors")]
    total = sum(Path(file).stat().st_size for file in [*files, demo_dir() / "tokenizer.json"])
    assert 20_000_000 < total <= 24_000_000
