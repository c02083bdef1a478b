"""How a matrix is dealt out to blocks and warps, and their shared memory.

A sum over K follows from the width alone (stream.cuh) or from shape and GPU (the router), never from the number of
rows: a row's bits are its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ling_kernels.cuda.driver import Properties

CHUNK, PITCH = 32, 20  # as in gemm.cuh
TALL = 16  # rows that a tile may have
CHUNK_BYTES = TALL * CHUNK * 2
MAX_WARPS = 16

# ---- the stream (stream.cuh) ----

CONSUMERS, PART, STAGE_PITCH, RING_HEAD, SUM_PITCH = 8, 512, 1088, 256, 17  # as there
STREAM_THREADS = 32 * (CONSUMERS + 1)
MAX_RING = RING_HEAD // 16
HELD = {1: 5, 2: 3}  # parts of K that registers hold, for 8 and for 16 tokens
# What a multiprocessor has beyond the most that one block may ask for, and what it takes for each block unasked.
BLOCK_BYTES = 1024
# Of half a multiprocessor, what is left for small kernels between two streams.
SPARE = 1024
# The least that covers the way to memory; more than half of a multiprocessor is taken for it where there must be.
MIN_RING = 3


class Stream(NamedTuple):
    """per: rows (or pairs) of a block; tall: of a tile; depth: stages of the ring; kept: tokens are kept in shared
    memory where registers do not hold them; shared: bytes."""

    blocks: int
    per: int
    tall: int
    depth: int
    kept: bool
    shared: int


def stream(
    count: int,
    width: int,
    rows: int,
    properties: Properties,
    paired: bool = False,
    scaled: bool = False,
    step: int = 1,
    most: int = MAX_RING,
) -> Stream:
    """Deal `count` rows, or pairs of rows, of a matrix out so that every multiprocessor has the same number, as nearly
    as may be: a multiple of `step`. rows: live ones, on which memory depends but no bit. scaled: heads have factors.
    most: stages of the ring."""
    per = -(-count // properties.num_sms)
    per = -(-per // step) * step
    height = TALL // 2 if paired else TALL
    tiles = -(-per // height)
    tall = -(-per // tiles)
    parts = -(-width // PART)
    tokens = rows * (-(-width // 64) * 64 + 32) * 2
    held = parts <= HELD[1 if rows <= 8 else 2] and not (scaled and rows > 8)
    stage = tall * (2 if paired else 1) * STAGE_PITCH
    sums = sums_of_stream(rows) + (CONSUMERS * parts * TALL * 4 if scaled else 0)
    fixed = RING_HEAD + sums
    kept = not held and fixed + tokens + MIN_RING * stage <= properties.shared_bytes
    fixed += tokens if kept else 0
    depth = ring_depth(fixed, stage, min(parts * tiles, most), properties)
    return Stream(-(-count // per), per, tall, depth, kept, fixed + depth * stage)


def ring_depth(fixed: int, stage: int, most: int, properties: Properties) -> int:
    """Stages of `stage` bytes, at most `most`, beside `fixed` bytes in half a multiprocessor, or in all that one block
    may have where that would be too few."""
    half = (properties.shared_bytes + BLOCK_BYTES) // 2 - BLOCK_BYTES - SPARE
    depth = max((half - fixed) // stage, min(MIN_RING, (properties.shared_bytes - fixed) // stage))
    return max(1, min(most, depth))


def sums_of_stream(rows: int) -> int:
    """Bytes of two sets of the warps' sums."""
    return -(-2 * CONSUMERS * rows * SUM_PITCH // 4) * 16


def num_chunks(width: int) -> int:
    return -(-width // CHUNK)


def sums_bytes(warps: int, rows: int, sets: int = 2) -> int:
    """Shared memory for the sums of gemm.cuh: float [sets][warps][8 or 16 tokens][PITCH]."""
    return sets * warps * (8 if rows <= 8 else 16) * PITCH * 4


def _padded(chunks: int, at_once: int) -> int:
    return -(-chunks // at_once) * at_once


# ---- router and experts (router.cu, moe.cu) ----

ROUTER_PARTS, ROUTER_DEPTH, BATCH, PAIRS = 2, 4, 2, 8  # as there
MOE_WARPS = 8  # of a block at most
MOST_BATCHES = 10  # of a ring: what copies_wait_upto can tell apart
PLAN_BYTES = 7 * 1024  # shared memory that these kernels have without asking, and more than that
# 8 warps with these chunks on their way are the 64 KB for each multiprocessor that cover the way to memory
FEW_BATCHES = 4


def warps_for_router(width: int) -> int:
    """As many as it takes that all chunks of a part of K are on their way at once."""
    return min(MAX_WARPS, -(-num_chunks(width) // (ROUTER_PARTS * ROUTER_DEPTH)))


def warps_of(widths: tuple[int, ...]) -> int:
    """Warps that share the K of matrices of these widths: chunks divided evenly, then as many as there may be."""
    chunks = [num_chunks(width) for width in widths]

    def cost(warps: int) -> tuple[int, int]:
        return sum(_padded(count, warps) for count in chunks), -warps

    return min(range(1, min(MOE_WARPS, max(chunks)) + 1), key=cost)


def rows_of_down(width: int, num_sms: int) -> int:
    """Rows of a block, at most 16, so that every multiprocessor has the same number of blocks, as nearly as may be."""
    blocks_per_sm = -(-width // (16 * num_sms))
    return -(-width // (blocks_per_sm * num_sms))


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """Rings of gate_up and down, in batches, and their shared memory; local: gate_up keeps its tokens there."""

    gate_depth: int
    gate_bytes: int
    local: bool
    down_depth: int
    down_bytes: int


def expert_memory(
    properties: Properties,
    gate_warps: int,
    down_warps: int,
    width: int,
    down_rows: int,
    rows: int,
    most: tuple[int, int],
) -> ExpertMemory:
    """Shared memory of the experts' kernels for `rows` live rows, so that a block of each has room beside the other.

    Depths change no bit; most: of gate_up and down.
    """
    limit = properties.shared_bytes - PLAN_BYTES
    batch = gate_warps * BATCH * CHUNK_BYTES
    fixed, tokens = sums_bytes(gate_warps, rows), rows * (_padded(width, 64) + 32) * 2
    gate_depth = max(1, min(most[0], (limit - fixed) // batch))
    local = fixed + gate_depth * batch + tokens <= limit
    gate = fixed + gate_depth * batch + (tokens if local else 0)

    batch = down_warps * BATCH * (down_rows + rows) * CHUNK * 2
    fixed = sums_bytes(down_warps, rows, 1)
    beside = limit - gate - PLAN_BYTES - BLOCK_BYTES - fixed  # gate_up
    blocks_per_sm = -(-width // (down_rows * properties.num_sms))
    alone = (limit - (blocks_per_sm - 1) * (PLAN_BYTES + BLOCK_BYTES)) // blocks_per_sm - fixed
    depth = beside // batch if beside >= 2 * batch else FEW_BATCHES
    down_depth = max(1, min(most[1], MOST_BATCHES, depth, alone // batch))
    return ExpertMemory(gate_depth, gate, local, down_depth, fixed + down_depth * batch)
