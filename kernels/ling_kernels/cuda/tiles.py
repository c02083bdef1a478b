"""How a matrix is dealt out to blocks and warps, and their shared memory.

A sum over K follows from the width alone (stream.cuh) or from shape and GPU (the router), never from the number of
rows: a row's bits are its own.
"""

from __future__ import annotations

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


# ---- router (router.cu) ----

ROUTER_PARTS, ROUTER_DEPTH = 2, 4  # as there


def warps_for_router(width: int) -> int:
    """As many as it takes that all chunks of a part of K are on their way at once."""
    return min(MAX_WARPS, -(-num_chunks(width) // (ROUTER_PARTS * ROUTER_DEPTH)))
