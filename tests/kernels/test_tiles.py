"""How matrices are dealt out: nothing is lost, nothing depends on the rows, published shapes fill the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling_kernels.cuda import experts, tiles
from ling_kernels.cuda.compile import SOURCES
from ling_kernels.cuda.driver import Properties

H200 = 132
KB = 1024
GPUS = {
    "H200": Properties("sm_90", H200, 60 * KB * KB, 227 * KB),
    "A100": Properties("sm_80", 108, 40 * KB * KB, 163 * KB),
    "RTX PRO 6000": Properties("sm_120", 188, 96 * KB * KB, 99 * KB),
}
counts, widths = st.integers(1, 200_000), st.integers(1, 2000).map(lambda n: 8 * n)
rows_of_a_window = st.integers(1, 16)


@given(counts, widths, rows_of_a_window, st.sampled_from(list(GPUS)), st.booleans(), st.sampled_from([1, 8]))
def test_every_row_is_dealt_out_once_and_memory_suffices(
    count: int, width: int, rows: int, gpu: str, paired: bool, step: int
) -> None:
    properties = GPUS[gpu]
    dealt = tiles.stream(count, width, rows, properties, paired, step=step)
    assert dealt.blocks <= properties.num_sms
    assert (dealt.blocks - 1) * dealt.per < count <= dealt.blocks * dealt.per, "a row or a block is left over"
    assert 1 <= dealt.tall <= (8 if paired else 16)
    assert 1 <= dealt.depth <= tiles.MAX_RING
    assert dealt.shared <= properties.shared_bytes


@given(counts, widths, rows_of_a_window)
def test_how_rows_are_dealt_out_does_not_depend_on_the_window(count: int, width: int, rows: int) -> None:
    one, many = (tiles.stream(count, width, live, GPUS["H200"]) for live in (1, rows))
    assert one[:3] == many[:3]


# rows, width: tiny's in_proj, out_proj, both halves of the dense MLP; flash's on one of four
DEALT = [(10256, 1536, False), (1536, 2048, False), (4608, 1536, True), (1536, 4608, False)]
DEALT += [(5128, 2560, False), (2560, 1024, False), (1536, 2560, True), (2560, 1536, False)]


@pytest.mark.parametrize(("count", "width", "paired"), DEALT)
def test_published_shapes_are_dealt_out_evenly_and_two_share_a_multiprocessor(
    count: int, width: int, paired: bool
) -> None:
    for rows in (1, 9):
        dealt = tiles.stream(count, width, rows, GPUS["H200"], paired, scaled=width in (1024, 2048))
        assert dealt.per * H200 / count < 1.05
        flying = min(dealt.depth * dealt.tall * min(width, tiles.PART), dealt.per * width) * (4 if paired else 2)
        assert flying > 32 * KB, f"{flying / KB:.0f} KB on the way to each multiprocessor"
        beside = 2 * (dealt.shared + tiles.BLOCK_BYTES + tiles.SPARE) <= 228 * KB
        assert beside or (rows == 9 and width > 2048), f"{dealt.shared / KB:.0f} KB"


def test_the_head_of_tiny_is_dealt_out_evenly() -> None:
    dealt = tiles.stream(157184, 1536, 1, GPUS["H200"], step=8)
    assert (dealt.blocks, dealt.per % 8) == (H200, 0)
    assert dealt.per * H200 / 157184 < 1.002


def test_python_and_cuda_agree_on_constants() -> None:
    text = "".join(Path(path).read_text() for path in sorted(SOURCES.glob("*.cu*")))

    def constant(name: str) -> int:
        return int(re.search(rf"\b{name} = (\d+)", text)[1])

    assert (constant("CHUNK"), constant("PITCH")) == (tiles.CHUNK, tiles.PITCH)
    for name in ("CONSUMERS", "PART", "STAGE_PITCH", "RING_HEAD", "SUM_PITCH"):
        assert constant(name) == getattr(tiles, name)
    held = re.search(r"\bHELD = NT == 1 \? (\d+) : (\d+)", text)
    assert (int(held[1]), int(held[2])) == (tiles.HELD[1], tiles.HELD[2])
    assert (constant("MAX_EXPERTS"), constant("MAX_CHOSEN")) == (experts.MAX_EXPERTS, experts.MAX_CHOSEN)
    for name in ("ROUTER_PARTS", "ROUTER_DEPTH"):
        assert constant(name) == getattr(tiles, name)
