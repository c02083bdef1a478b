"""Reading a checkpoint for a GPU, without one: spans of bytes, and the same weights as by plain reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import write_checkpoint
from ling_local.engine import weights as room
from ling_local.engine.checkpoint import check_files
from ling_local.engine.config import load_model_config
from ling_local.engine.layout import model_layout
from ling_local.engine.shard import WHOLE, Shard
from ling_local.engine.staging import BUFFERS, read_spans, spans_of
from ling_local.engine.weights import fill_fields, piece_values
from ling_local.errors import ModelError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "m", seed=3, shards=3)


@pytest.mark.parametrize("span_bytes", [1, 1000, 50_000, 2**24])
def test_spans_cover_every_byte_once_in_order(folder: Path, span_bytes: int) -> None:
    specs = model_layout(load_model_config(folder))
    entries = check_files(folder, specs)
    spans = spans_of(specs, entries, span_bytes)
    assert [(s.file, s.offset) for s in spans] == sorted((s.file, s.offset) for s in spans)
    assert sum(s.num_bytes for s in spans) == sum(entries[s.name].num_bytes for s in specs)
    rows: dict[str, int] = {}
    for span in spans:
        row = max(p.num_bytes // p.rows for p in span.pieces)
        assert span.num_bytes == sum(p.num_bytes for p in span.pieces) <= max(span_bytes, row)
        for piece in span.pieces:
            assert piece.first == rows.get(piece.spec.name, 0)
            rows[piece.spec.name] = piece.first + piece.rows
            entry = entries[piece.spec.name]
            row_bytes = entry.num_bytes // piece.spec.shape[0]
            assert span.offset + piece.at == entry.offset + piece.first * row_bytes
    assert rows == {spec.name: spec.shape[0] for spec in specs}


@pytest.mark.parametrize("shard", [WHOLE, Shard(0, 2), Shard(1, 2)], ids=["whole", "first", "second"])
@pytest.mark.parametrize("span_bytes", [1000, 20_000])
def test_staged_weights_are_those_of_plain_reads(
    folder: Path, span_bytes: int, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config(folder)
    specs = model_layout(config, shard.size)
    entries = check_files(folder, specs)
    want = fill_fields(specs, entries, torch.float32, "cpu", shard=shard)
    spans = spans_of(specs, entries, span_bytes, shard)
    assert len(spans) > BUFFERS, "the buffers must be used again"

    def staged(_specs: object, _entries: object, device: str, _shard: Shard) -> object:
        for span, data in read_spans(spans, device):
            for piece in span.pieces:
                yield piece.spec, piece.first, piece_values(piece, data, entries[piece.spec.name].dtype)

    monkeypatch.setattr(room, "_read", staged)
    got = fill_fields(specs, entries, torch.float32, "cpu", shard=shard)
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_a_file_that_shrinks_while_it_is_read_is_an_error(folder: Path) -> None:
    specs = model_layout(load_model_config(folder))
    spans = spans_of(specs, check_files(folder, specs), 2000)
    last = spans[-1].file
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(ModelError, match="ended while it was read"):
        for _ in read_spans(spans, "cpu"):
            pass


def test_nothing_is_read_for_the_meta_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = model_layout(load_model_config(folder))
    entries = check_files(folder, specs)
    monkeypatch.setattr(room, "_read", lambda *_: pytest.fail("a tensor was read"))
    assert all(field.is_meta for field in fill_fields(specs, entries, torch.bfloat16, "meta").values())
