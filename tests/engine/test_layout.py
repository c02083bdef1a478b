"""The checkpoint table: published totals to the last parameter, and the sizes derived from it."""

from __future__ import annotations

import pytest

from checkpoints import config_json
from ling_local.engine.config import draft_config, model_config
from ling_local.engine.layout import draft_layout, field_specs, memory_bytes, model_layout, parameter_count
from published import DRAFT, FLASH, TINY


@pytest.mark.parametrize(
    ("name", "changes", "tensors", "parameters", "fp32"),
    [("flash", FLASH, 63_783, 127_486_405_600, 165_472), ("tiny", TINY, 9_283, 7_893_392_800, None)],
)
def test_published_totals(name: str, changes: dict, tensors: int, parameters: int, fp32: int | None) -> None:
    specs = model_layout(model_config(config_json(**changes)))
    assert len(specs) == tensors
    assert len({spec.name for spec in specs}) == tensors
    assert parameter_count(specs) == parameters
    if fp32:
        assert sum(spec.numel for spec in specs if spec.dtype == "F32") == fp32


def test_published_draft_total() -> None:
    flash = model_config(config_json(**FLASH))
    assert parameter_count(draft_layout(draft_config(DRAFT, flash))) == 1_363_707_905


@pytest.mark.parametrize(("changes", "gib"), [(FLASH, (237.46, 118.80, 59.48)), (TINY, (14.70, 7.36, 3.69))])
def test_memory_by_rank_is_the_published_one(changes: dict, gib: tuple[float, ...]) -> None:
    config = model_config(config_json(**changes))
    for ranks, expected in zip((1, 2, 4), gib, strict=True):
        needed = memory_bytes(model_layout(config, ranks), 2, ranks) / 2**30
        router = sum(s.numel for s in model_layout(config) if s.wide) * 2 / 2**30  # held in fp32 here
        assert needed - router == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_fill_their_fields_without_gap_or_overlap(ranks: int) -> None:
    specs = model_layout(model_config(config_json(**TINY)), ranks)
    rows: dict[tuple[str, int | None], int] = {}
    for spec in specs:
        assert spec.row == rows.get((spec.field, spec.expert), 0), spec.name
        rows[spec.field, spec.expert] = spec.row + spec.local_shape(ranks)[0]
    for field in field_specs(specs, ranks):
        stacked = len({expert for name, expert in rows if name == field.name and expert is not None})
        assert field.shape[1 if stacked else 0] == rows[field.name, 0 if stacked else None]
        assert not stacked or field.shape[0] == stacked


@pytest.mark.parametrize(
    ("key", "value"),
    [("dflash_config", "nested"), ("dspark_config", "nested"), ("dspark_", "prefixed")],
)
def test_draft_keys_are_found_where_exports_put_them(key: str, value: str) -> None:
    flash = model_config(config_json(**FLASH))
    own = ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "enable_confidence_head")
    data = {k: v for k, v in DRAFT.items() if k not in own}
    moved = {k: DRAFT[k] for k in own}
    data |= {key: moved} if value == "nested" else {key + k: v for k, v in moved.items()}
    assert draft_config(data, flash) == draft_config(DRAFT, flash)
