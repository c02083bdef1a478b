"""How matrices are dealt out: nothing is lost, nothing depends on the rows, published shapes fill the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_kernels.cuda import dense, experts, tiles
from ling_kernels.cuda.compile import SOURCES, compile_unit
from ling_kernels.cuda.driver import Properties

H200 = 132
# tiles, width: tiny's in_proj, out_proj, expert gate_up of one row, head, router; flash's on one rank of four
PUBLISHED = [(641, 1536), (96, 2048), (576, 1536), (9824, 1536), (321, 2560), (160, 1024), (216, 2560), (2456, 2560)]
sizes = st.tuples(
    st.integers(1, 20000), st.integers(1, 1000).map(lambda n: 8 * n), st.sampled_from([1, 20, 108, 132, 188])
)


@given(sizes)
def test_every_chunk_of_k_belongs_to_one_warp_once(size: tuple[int, int, int]) -> None:
    count, width, sms = size
    warps = tiles.warps_for(count, width, sms)
    assert 1 <= warps <= tiles.MAX_WARPS
    chunks = tiles.num_chunks(width)
    batches = -(-chunks // (warps * tiles.DEPTH))
    taken = [
        (batch * warps + warp) * tiles.DEPTH + s
        for batch in range(batches)
        for s in range(tiles.DEPTH)
        for warp in range(warps)
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


@pytest.mark.parametrize(("count", "width"), PUBLISHED)
def test_published_shapes_keep_enough_on_the_way(count: int, width: int) -> None:
    warps = tiles.warps_for(count, width, H200)
    per = tiles.tiles_per_block(count, H200 * (tiles.WARPS_PER_SM // warps))
    flying = -(-count // per) * min(warps * tiles.DEPTH, tiles.num_chunks(width)) * tiles.CHUNK_BYTES / H200
    assert flying > 26 * 1024, f"{flying / 1024:.0f} KB a multiprocessor with {warps} warps, {per} tiles a block"
    empty = -(-tiles.num_chunks(width) // (warps * tiles.DEPTH)) * warps * tiles.DEPTH / tiles.num_chunks(width)
    assert empty < 1.2


def owners(dealt: tiles.Deal, rows: int) -> list[int]:
    """Blocks in the order of the rows that they own, as the kernels count them."""
    found = []
    for block in range(dealt.blocks):
        for tile in range(block * dealt.per, (block + 1) * dealt.per):
            found += [block] * len(range(tile * dealt.tall, min(rows, (tile + 1) * dealt.tall)))
    return found


@given(st.integers(1, 20000), sizes, st.sampled_from([8, 16]), st.sampled_from([8, 12, 16]))
def test_every_row_is_dealt_out_once(rows: int, size: tuple[int, int, int], tall: int, together: int) -> None:
    dealt = tiles.deal(rows, size[1], size[2], tall, together)
    assert 1 <= dealt.warps <= together
    assert 1 <= dealt.tall <= tall
    assert dealt.blocks <= size[2] * (together // dealt.warps)
    owned = owners(dealt, rows)
    assert len(owned) == rows
    assert set(owned) == set(range(dealt.blocks)), "a block without a row"


# rows, width, rows of a tile at most: tiny's in_proj, out_proj, both halves of the dense MLP; flash's on one of four
DEALT = [(10256, 1536, 16), (1536, 2048, 16), (4608, 1536, 8), (1536, 4608, 16)]
DEALT += [(5128, 2560, 16), (2560, 1024, 16), (1536, 2560, 8), (2560, 1536, 16)]


@pytest.mark.parametrize(("rows", "width", "tall"), DEALT)
def test_published_shapes_are_dealt_out_evenly(rows: int, width: int, tall: int) -> None:
    dealt = tiles.deal(rows, width, H200, tall)
    blocks = -(-dealt.blocks // H200)
    fullest = blocks * dealt.per * dealt.tall
    assert fullest * H200 / rows < 1.05, f"{dealt}: {fullest} rows on one multiprocessor"
    empty = -(-tiles.num_chunks(width) // (dealt.warps * tiles.DEPTH)) * dealt.warps * tiles.DEPTH
    assert empty / tiles.num_chunks(width) < 1.2
    assert blocks * dealt.warps <= tiles.TOGETHER


@pytest.mark.parametrize("rows", [1, 8, 9, 16])
def test_the_sums_fit_into_what_a_block_has_without_asking(rows: int) -> None:
    largest_static = 4096  # of linear_normed
    assert tiles.sums_bytes(tiles.MAX_WARPS, rows) + largest_static <= 48 * 1024


def test_python_and_cuda_agree_on_constants() -> None:
    text = "".join(Path(path).read_text() for path in sorted(SOURCES.glob("*.cu*")))

    def constant(name: str) -> int:
        return int(re.search(rf"\b{name} = (\d+)", text)[1])

    assert (constant("CHUNK"), constant("DEPTH"), constant("PITCH")) == (tiles.CHUNK, tiles.DEPTH, tiles.PITCH)
    assert (constant("MAX_EXPERTS"), constant("MAX_CHOSEN")) == (experts.MAX_EXPERTS, experts.MAX_CHOSEN)
    assert constant("MAX_HEADS") == dense.MAX_HEADS
    for name in ("ROUTER_PARTS", "ROUTER_DEPTH", "BATCH", "PAIRS"):
        assert constant(name) == getattr(tiles, name)
    assert constant("MOE_THREADS") == 32 * tiles.MOE_WARPS


# hidden size, width of an expert: tiny, flash on one and on four ranks, the demo, an odd one
EXPERTS = [(1536, 512), (2560, 768), (2560, 192), (256, 48), (1544, 136)]
GPUS = {"H200": (132, 227), "A100": (108, 163), "RTX PRO 6000": (188, 99)}


@pytest.mark.parametrize(("width", "inner"), EXPERTS)
@pytest.mark.parametrize("gpu", GPUS)
def test_experts_fit_into_shared_memory_and_warps_do_not_depend_on_rows(gpu: str, width: int, inner: int) -> None:
    num_sms, kilobytes = GPUS[gpu]
    properties = Properties("sm_90", num_sms, 40 * 2**20, kilobytes * 1024)
    rows_of_block = tiles.rows_of_down(width, num_sms)
    assert 1 <= rows_of_block <= 16
    blocks_per_sm = -(-width // (rows_of_block * num_sms))
    for rows in range(1, 17):
        memory = tiles.expert_memory(
            properties, tiles.warps_of((width,)), tiles.warps_of((inner, inner)), width, rows_of_block, rows, (4, 10)
        )
        assert 1 <= memory.gate_depth <= 4
        assert 1 <= memory.down_depth <= tiles.MOST_BATCHES
        block = tiles.PLAN_BYTES + tiles.BLOCK_BYTES
        assert memory.gate_bytes + tiles.PLAN_BYTES <= properties.shared_bytes
        assert blocks_per_sm * (memory.down_bytes + block) <= properties.shared_bytes + tiles.BLOCK_BYTES
        if gpu == "H200" and rows <= 9:
            assert memory.local
            assert memory.gate_bytes + memory.down_bytes + 2 * block <= properties.shared_bytes + tiles.BLOCK_BYTES


def test_a_window_of_tiny_keeps_the_memory_busy() -> None:
    """Both rings together, and down's alone for the few rows where the way to memory counts most."""
    properties = Properties("sm_90", H200, 60 * 2**20, 227 * 1024)
    rows_of_block = tiles.rows_of_down(1536, H200)
    assert -(-1536 // rows_of_block) > 0.95 * H200
    for rows, most in ((1, 9), (9, 4)):
        memory = tiles.expert_memory(properties, 8, 8, 1536, rows_of_block, rows, (4, 10))
        assert (memory.gate_depth, memory.down_depth) == (4, most)


def test_the_few_bytes_that_a_plan_takes_are_what_the_compiler_says() -> None:
    _, log = compile_unit("moe", "sm_90")
    taken = [int(found) for found in re.findall(r"(\d+) bytes smem", log)]
    assert taken
    assert max(taken) <= tiles.PLAN_BYTES
