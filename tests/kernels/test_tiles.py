"""How matrices are dealt out: nothing is lost, nothing depends on the rows, published shapes fill the machine."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_kernels.cuda import dense, recurrent, tiles
from ling_kernels.cuda.compile import SOURCES

H200 = 132
# tiles, width: tiny's in_proj, out_proj, expert gate_up of one row, head; flash's on one rank of four
PUBLISHED = [(641, 1536), (96, 2048), (512, 1536), (9824, 1536), (321, 2560), (160, 1024), (192, 2560), (2456, 2560)]
sizes = st.tuples(
    st.integers(1, 20000), st.integers(1, 1000).map(lambda n: 8 * n), st.sampled_from([1, 20, 108, 132, 188])
)


@given(sizes)
def test_every_chunk_of_k_belongs_to_one_warp_once(size: tuple[int, int, int]) -> None:
    count, width, sms = size
    warps = tiles.warps_for(count, width, sms)
    assert 1 <= warps <= tiles.MAX_WARPS
    chunks = tiles.num_chunks(width)
    taken = [
        chunk + s
        for warp in range(warps)
        for chunk in range(warp * tiles.DEPTH, chunks, warps * tiles.DEPTH)
        for s in range(tiles.DEPTH)
    ]
    assert sorted(c for c in taken if c < chunks) == list(range(chunks))


@given(sizes, st.integers(1, 4000))
def test_every_tile_belongs_to_one_block(size: tuple[int, int, int], slots: int) -> None:
    count = size[0]
    per = tiles.tiles_per_block(count, slots)
    blocks = -(-count // per)
    assert blocks <= max(slots, 1)
    owned = [tile for block in range(blocks) for tile in range(block * per, min(count, (block + 1) * per))]
    assert owned == list(range(count))


@given(sizes, st.integers(0, 4000))
def test_an_even_deal_leaves_no_slot_empty_and_no_block_two_tiles_behind(
    size: tuple[int, int, int], slots: int
) -> None:
    count = size[0]
    per, extra, blocks = tiles.even_deal(count, slots)
    assert blocks == min(count, max(slots, 1))
    first = [block * per + min(block, extra) for block in range(blocks + 1)]  # as Deal in gemm.cuh
    assert (first[0], first[-1]) == (0, count)
    assert {b - a for a, b in pairwise(first)} <= {per, per + 1}
    assert per >= 1


@pytest.mark.parametrize(("inner", "count", "most"), [(512, 96, 12), (384, 160, 16), (192, 160, 8)])
def test_down_of_published_shapes_fills_the_machine_with_blocks_of_several_tiles(
    inner: int, count: int, most: int
) -> None:
    """Tiny's, flash's on a rank of two and of four. most: warps of the multiprocessor that has the most."""
    each, parts = tiles.down_shape(inner)
    together = tiles.tiles_together(count, parts, each, H200)
    blocks = -(-count // together) * parts
    assert together > 1
    assert -(-blocks // H200) * together * each == most
    assert most <= tiles.MAX_WARPS


@pytest.mark.parametrize(("count", "width"), PUBLISHED)
def test_published_shapes_keep_enough_on_the_way(count: int, width: int) -> None:
    warps = tiles.warps_for(count, width, H200)
    per = tiles.tiles_per_block(count, H200 * (tiles.WARPS_PER_SM // warps))
    flying = -(-count // per) * min(warps * tiles.DEPTH, tiles.num_chunks(width)) * tiles.CHUNK_BYTES / H200
    assert flying > 26 * 1024, f"{flying / 1024:.0f} KB a multiprocessor with {warps} warps, {per} tiles a block"
    empty = -(-tiles.num_chunks(width) // (warps * tiles.DEPTH)) * warps * tiles.DEPTH / tiles.num_chunks(width)
    assert empty < 1.2


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_the_sums_fit_into_what_a_block_has_without_asking(rows: int) -> None:
    largest_static = 2048  # of head
    assert tiles.sums_bytes(tiles.MAX_WARPS, rows) + largest_static <= 48 * 1024


@pytest.mark.parametrize("width", [8, 1536, 2560, 3 * 1536, 3 * 2560, 8192])
def test_a_router_has_its_weights_on_their_way_at_once(width: int) -> None:
    """In one turn, up to what two blocks with all their warps can ask for."""
    parts, warps = tiles.router_parts(width)
    assert 1 <= parts <= 2
    assert 1 <= warps <= tiles.MAX_WARPS
    each = -(-tiles.num_chunks(width) // parts)
    assert each <= warps * tiles.DEPTH or (parts, warps) == (2, tiles.MAX_WARPS)


@pytest.mark.parametrize("width", [8, 48, 1536, 2560, 4096])
@pytest.mark.parametrize("forms", [1, 3])
def test_a_shared_tile_is_one_trip_of_weights_where_one_row_is_alone(width: int, forms: int) -> None:
    """By the router's warps, of up to DEPTH chunks for each of its parts; the fp32 gate is three forms side by side."""
    parts, warps = tiles.router_parts(forms * width)
    assert warps * 256 >= width
    assert tiles.shared_chunks(width, warps) <= parts * tiles.DEPTH


def test_python_and_cuda_agree_on_constants() -> None:
    text = "".join(Path(path).read_text() for path in sorted(SOURCES.glob("*.cu*")))

    def constant(name: str) -> int:
        return int(re.search(rf"\b{name} = (\d+)", text)[1])

    assert (constant("CHUNK"), constant("DEPTH"), constant("PITCH")) == (tiles.CHUNK, tiles.DEPTH, tiles.PITCH)
    assert (constant("MAX_EXPERTS"), constant("MAX_CHOSEN")) == (dense.MAX_EXPERTS, dense.MAX_CHOSEN)
    assert constant("HEAD_SLICES") == recurrent.SLICES
