"""KDA, MLA, sampling and draft kernels and their host side, run on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import device_mixers as checks
from device_checks import Place
from emulator import ORDERS, EmulatedDevice
from ling_kernels.cuda import CudaOps
from ling_kernels.cuda.latent import LARGE, SMALL, Form, attend_bytes, deal_tiles
from ling_kernels.ops import ROW_TILE, KernelError
from ling_kernels.reference import sample
from settled import SETTLED, SettledDevice

pytestmark = pytest.mark.emulated


@pytest.fixture(scope="module")
def device(built: Path) -> Iterator[EmulatedDevice]:
    with SettledDevice(built).in_order() as device:
        yield device


@pytest.fixture
def place(device: EmulatedDevice) -> Place:
    return Place(CudaOps(device), "cpu", device.constant)


@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (1, 9), (2, 5), (2, 16), (4, 1), (4, 2), (4, 5), (4, 16)])
def test_kda_window_and_commit(place: Place, heads: int, rows: int) -> None:
    checks.check_kda_window(place, heads, rows)


@pytest.mark.parametrize("heads", [1, 4])
def test_kda_keeps_a_steps_only_row(device: EmulatedDevice, place: Place, heads: int) -> None:
    checks.check_kda_keeps_one_row(place, heads)
    assert device.launched[-1] == "kda_commit_layers"  # without limits
    assert "kda_follow_layers" in device.launched


def test_kda_bits_at_any_width(place: Place) -> None:
    checks.check_kda_bits(place, 1, (3, 16))
    checks.check_kda_bits(place, 4, (7, 16))


@pytest.mark.parametrize(("heads", "rows"), [(1, 1), (2, 2), (1, 70), (4, 3), (4, 21)])
def test_kda_prefill(place: Place, heads: int, rows: int) -> None:
    checks.check_kda_prefill(place, heads, rows)


def test_kda_prefill_in_parts(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ling_kernels.cuda.recurrent.PREFILL_ROWS", 8)
    checks.check_kda_prefill(place, 1, 19)


# heads, rank of the queries, length, rows
MLA_SIZES = [(2, 0, 0, 1), (2, 0, 126, 5), (3, 48, 70, 3), (17, 264, 65, 2), (1, 0, 191, 16), (9, 0, 30, 16)]


@pytest.mark.parametrize(
    ("form", "heads", "rank", "length", "rows"),
    [*((LARGE, *sizes) for sizes in (*MLA_SIZES, (8, 8, 2110, 5))), *((SMALL, *sizes) for sizes in MLA_SIZES[::2])],
    ids=lambda value: f"{value.keys} keys" if isinstance(value, Form) else str(value),
)
def test_mla(device: EmulatedDevice, form: Form, heads: int, rank: int, length: int, rows: int) -> None:
    place = Place(with_form(device, form), "cpu", device.constant)
    checks.check_mla(place, heads, rank, length, rows)
    most, _ = deal_tiles(-(-heads * rows // 16), form)
    assert device.launched[-2 if rows == 1 else -3] == form.kernel(most)


def with_form(device: EmulatedDevice, form: Form) -> CudaOps:
    """Ops for a device that gives a block as much shared memory as the form needs and no more."""
    shared = max(attend_bytes(form, tiles) for tiles in form.tiles)
    device.properties = replace(device.properties, shared_bytes=shared)
    return CudaOps(device)


# as many heads and rows as bring each number of tiles that the form has
@pytest.mark.parametrize(
    ("form", "heads", "widths"),
    [(LARGE, 8, (3, 8, 14)), (LARGE, 16, (5, 9)), (SMALL, 2, (3, 8, 14))],
    ids=["large", "large, 16 heads", "small"],
)
def test_mla_bits_at_any_width(device: EmulatedDevice, form: Form, heads: int, widths: tuple[int, ...]) -> None:
    checks.check_mla_bits(Place(with_form(device, form), "cpu", device.constant), heads, 123, widths)


@pytest.mark.parametrize(("heads", "rank"), [(2, 256), (3, 48), (1, 264)])
def test_mla_bits_of_low_rank_queries(place: Place, heads: int, rank: int) -> None:
    checks.check_mla_bits(place, heads, 37, (9, 16), rank)


@pytest.mark.parametrize("form", [LARGE, SMALL], ids=["large", "small"])
def test_mla_bits_where_the_splits_grow(device: EmulatedDevice, form: Form) -> None:
    """Position 2112 is the first whose keys are split in larger pieces: its neighbours keep theirs."""
    checks.check_mla_bits(Place(with_form(device, form), "cpu", device.constant), 1, 2108, (8,))


def test_mla_of_splits_of_several_chunks(device: EmulatedDevice) -> None:
    place = Place(with_form(device, LARGE), "cpu", device.constant)
    checks.check_mla(place, 1, 0, 8600, 1)


def test_tiles_are_dealt_evenly() -> None:
    dealt = [deal_tiles(tiles, LARGE) for tiles in (1, 2, 4, 5, 6, 7, 9, 10, 11, 16, 32)]
    assert dealt == [(1, 1), (3, 2), (3, 2), (3, 3), (3, 3), (5, 4), (5, 5), (5, 5), (5, 4), (5, 4), (5, 5)]
    assert [deal_tiles(tiles, SMALL) for tiles in (1, 9)] == [(1, 1), (1, 1)]


SAMPLINGS = [
    (0.0, 0, 1.0),
    (1.0, 0, 1.0),
    (0.7, 20, 1.0),
    (1.3, 0, 0.8),
    (0.9, 40, 0.6),
    (1.0, 1, 1.0),
    (2.0, 9, 0.0),
    (8.0, 3, 0.95),
]


@pytest.mark.parametrize(("rows", "span"), [(1, 0), (4, 0), (1, 16), (4, 48), (16, 16)])
def test_verdict(place: Place, rows: int, span: int) -> None:
    checks.check_verdict(place, 301, 307, checks.make_sampling(place, 301, *SAMPLINGS[0]), rows, span=span)


@pytest.mark.parametrize("span", [0, 16])
@pytest.mark.parametrize("words", SAMPLINGS[1:])
def test_verdict_of_drawn_tokens(place: Place, words: tuple[float, int, float], span: int) -> None:
    sampling = checks.make_sampling(place, 301, *words)
    checks.check_verdict(place, 301, 307, sampling, 3, thorough=words == SAMPLINGS[4], span=span)


# few best ones in few spans, many best ones, a share of all, both; peaked and flat; a list that is too short for it
@pytest.mark.parametrize("words", [(0.9, 20, 0.9), (1.0, 800, 1.0), (0.6, 0, 0.95), (1.0, 900, 0.9), (1.0, 0, 1.0)])
@pytest.mark.parametrize(("scale", "listed"), [(4.0, 2048), (0.2, 2048), (1.0, 7)])
def test_ways_to_find_the_lowest_kept(
    place: Place, words: tuple[float, int, float], scale: float, listed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.ops, "listed", listed)
    sampling = checks.make_sampling(place, 3001, *words)
    for span in (0, 16):
        checks.check_verdict(place, 3001, 3008, sampling, 2, thorough=False, span=span, scale=scale)
    assert not any(
        part.any() for part in (place.ops._scratch.masses, place.ops._scratch.counts, place.ops._scratch.listed)
    )


def test_equal_logits_are_all_kept(place: Place) -> None:
    sampling = checks.make_sampling(place, 3000, 1.0, 5, 0.5)
    limits = checks.make_limits(place)
    logits, positions = torch.ones(ROW_TILE, 3000), torch.arange(ROW_TILE)
    got = place.ops.verdict(logits, None, positions, sampling, limits, 1)
    assert torch.equal(got.tokens, sample.verdict(logits, None, positions, sampling, limits, 1).tokens)
    assert got.tokens[0] >= 5  # by this seed


def test_the_words_move_on(place: Place) -> None:
    checks.check_advance(place)


@pytest.mark.parametrize("words", [SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[4]])
def test_pick(place: Place, words: tuple[float, int, float]) -> None:
    checks.check_pick(place, 203, checks.make_sampling(place, 203, *words))


@pytest.mark.parametrize(("neox", "rope_dim"), [(True, 128), (False, 128), (True, 64), (False, 32)])
def test_draft_block(place: Place, neox: bool, rope_dim: int) -> None:
    params = checks.make_draft(place, 40, 4, 2, 8, 30, "vanilla", neox, rope_dim)
    checks.check_draft(place, params, 70, 3, 8)


def test_draft_embed(place: Place) -> None:
    checks.check_draft_embed(place, 40)


@pytest.mark.parametrize("length", [9, 200])
def test_draft_of_a_context_in_many_splits(
    device: EmulatedDevice, place: Place, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(device, "resident", lambda *of: 15)
    checks.check_draft(place, checks.make_draft(place, 16, 2, 1, 8, 30, "vanilla", True, 128), length, 9, 7)


def test_draft_with_many_heads_a_key_head(place: Place) -> None:
    params = checks.make_draft(place, 16, 6, 1, 8, 30, "vanilla", True, 128)
    checks.check_draft(place, params, 130, 16, 16)


@pytest.mark.parametrize(("rank", "vocab"), [(8, 30), (64, 131), (128, 90), (200, 77), (512, 65), (1024, 40)])
def test_markov_picks(place: Place, rank: int, vocab: int) -> None:
    params = checks.make_draft(place, 24, 2, 1, rank, vocab, "vanilla", True, 128)
    checks.check_markov(place, params, checks.make_sampling(place, vocab, *SAMPLINGS[0]), 3)


@pytest.mark.parametrize("head", ["gated", "rnn"])
@pytest.mark.parametrize("words", [SAMPLINGS[0], SAMPLINGS[3]])
def test_markov_heads(place: Place, head: str, words: tuple[float, int, float]) -> None:
    params = checks.make_draft(place, 24, 2, 1, 16, 50, head, True, 128)
    checks.check_markov(place, params, checks.make_sampling(place, 50, *words), 3)


@pytest.mark.parametrize("order", ORDERS[1:])
def test_in_another_order_of_threads_the_results_hold(
    device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """A barrier too few shows in one order or another."""
    monkeypatch.setattr(device, "order", ORDERS.index(order))
    place = Place(with_form(device, LARGE), "cpu", device.constant)
    checks.check_kda_window(place, 1, 9)
    checks.check_kda_prefill(place, 1, 19)
    checks.check_mla(place, 16, 48, 126, 7)
    checks.check_verdict(place, 300, 307, checks.make_sampling(place, 300, *SAMPLINGS[0]), 4)
    for words, span in ((SAMPLINGS[0], 16), (SAMPLINGS[3], 0), (SAMPLINGS[4], 16)):
        checks.check_verdict(place, 300, 307, checks.make_sampling(place, 300, *words), 2, thorough=False, span=span)
    checks.check_advance(place)
    params = checks.make_draft(place, 24, 2, 1, 8, 50, "rnn", True, 128)
    checks.check_draft(place, params, 70, 3, 8)
    checks.check_markov(place, params, checks.make_sampling(place, 50, *SAMPLINGS[0]), 2)


def test_unsupported_sizes_are_named(place: Place) -> None:
    at = checks.make_kda(place, 1, 1)
    with pytest.raises(KernelError, match="17 rows"):
        place.ops.kda_verify(checks.tile(at.proj), at.conv[1], at.state[1], at.params, 17)
    with pytest.raises(KernelError, match="does not fit"):
        place.ops.kda_verify(checks.tile(at.proj)[:, 1:], at.conv[1], at.state[1], at.params, 1)
    params = checks.make_draft(place, 16, 1, 1, 12, 30, "vanilla", True, 128)
    with pytest.raises(KernelError, match="Markov rank 12"):
        checks.check_markov(place, params, checks.make_sampling(place, 30, 0, 0, 1.0), 1)


def test_an_early_read_of_what_is_not_settled_is_seen(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(SETTLED, "kda_verify_sums_uneven")
    with pytest.raises(AssertionError, match="touched before the wait"):
        checks.check_kda_window(place, 1, 1)
