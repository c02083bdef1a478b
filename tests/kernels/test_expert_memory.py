"""Shared memory of the experts' kernels: it fits, and it keeps the memory busy."""

from __future__ import annotations

import re

import pytest

from ling_kernels.cuda import expert_memory as memory
from ling_kernels.cuda.compile import SOURCES, compile_unit
from ling_kernels.cuda.driver import Properties
from ling_kernels.cuda.tiles import BLOCK_BYTES, STREAM_THREADS

H200 = 132
# hidden size, width of an expert: tiny, flash on one and on four ranks, the demo, an odd one
EXPERTS = [(1536, 512), (2560, 768), (2560, 192), (256, 48), (1544, 136)]
GPUS = {"H200": (132, 227), "A100": (108, 163), "RTX PRO 6000": (188, 99)}


def properties_of(gpu: str) -> Properties:
    num_sms, kilobytes = GPUS[gpu]
    return Properties("sm_90", num_sms, 40 * 2**20, kilobytes * 1024)


def test_python_and_cuda_agree_on_constants() -> None:
    text = "".join((SOURCES / name).read_text() for name in ("gate_up.cuh", "down.cuh"))
    for name in ("PAIRS", "GROUP"):
        assert int(re.search(rf"\b{name} = (\d+)", text)[1]) == getattr(memory, name)


@pytest.mark.parametrize(("width", "inner"), EXPERTS)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("rows", range(1, 17))
def test_experts_fit_into_shared_memory(gpu: str, width: int, inner: int, rows: int) -> None:
    properties = properties_of(gpu)
    rows_of_block = memory.rows_of_down(width, properties.num_sms)
    assert 1 <= rows_of_block <= memory.TALLEST
    made = memory.expert_memory(properties, width, inner, rows_of_block, rows, 8, (5, 12))
    assert made.gate_bytes + memory.PLAN_BYTES <= properties.shared_bytes
    assert made.down_bytes + memory.PLAN_BYTES <= properties.shared_bytes
    assert made.gate_depth >= (4 if gpu == "H200" else 2)
    assert made.down_depth >= 2
    assert made.room == 9 * rows or made.room >= 3 * memory.GROUP
    if gpu == "H200":
        assert made.local
    if gpu == "H200" and rows <= 9 and inner < 768:
        both = made.gate_bytes + made.down_bytes + 2 * (memory.PLAN_BYTES + BLOCK_BYTES)
        assert both <= properties.shared_bytes + BLOCK_BYTES, "no room for both on a multiprocessor"


@pytest.mark.parametrize(("width", "inner"), [(1536, 512), (2560, 192)])
@pytest.mark.parametrize("rows", [1, 9])
def test_published_shapes_keep_the_memory_busy(width: int, inner: int, rows: int) -> None:
    """One wave of blocks nearly everywhere, and 32 KB a multiprocessor on the way: 4.3 TB/s for a microsecond."""
    rows_of_block = memory.rows_of_down(width, H200)
    assert 0.95 * H200 < -(-width // rows_of_block) <= H200
    made = memory.expert_memory(properties_of("H200"), width, inner, rows_of_block, rows, 8, (5, 12))
    assert made.gate_depth == 5
    assert made.down_depth * rows_of_block * inner * 2 >= 32 * 1024


def test_what_the_kernels_have_without_asking_is_what_the_compiler_says() -> None:
    _, log = compile_unit("moe", "sm_90")
    taken = [int(found) for found in re.findall(r"(\d+) bytes smem", log)]
    assert taken
    assert max(taken) <= memory.PLAN_BYTES


def test_two_blocks_fit_into_the_registers_of_a_multiprocessor() -> None:
    """Registers are given out for four warps at a time, 65,536 in all."""
    _, log = compile_unit("moe", "sm_90")
    used = [int(found) for found in re.findall(r"Used (\d+) registers", log)]
    assert used
    for registers in used:
        warps = 65536 // (-(-registers // 8) * 8 * 32) // 4 * 4
        assert warps * 32 >= 2 * STREAM_THREADS, f"{registers} registers: {warps} warps"
