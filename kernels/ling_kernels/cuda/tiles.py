"""How a matrix is dealt out to warps and blocks: from its shape and the GPU, never from the number of rows.

`warps` fixes the order in which a sum over K is taken, so two GPUs with another number of multiprocessors may differ in
last bits; two widths on one GPU may not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ling_kernels.cuda.driver import Properties

CHUNK, DEPTH, PITCH = 32, 4, 20  # as in gemm.cuh
TALL = 16  # rows that a tile may have
CHUNK_BYTES = TALL * CHUNK * 2
MAX_WARPS = 16
# With 128 registers a thread, the most that the kernels use, a multiprocessor holds this many warps.
WARPS_PER_SM = 16
# As many as a projection takes of them: the rest is for the kernels before and after it, which run at the same time.
TOGETHER = 12
# Bytes that should be on their way per multiprocessor: 4.3 TB/s x 0.8 us / 132 is 26 KB at least; more hides the ramp.
IN_FLIGHT = 48 * 1024
# The same where a block asks L2 for its rows at its start, and its registers wait for L2 only.
IN_FLIGHT_ASKED = 24 * 1024
# A tile that is not full costs this share more for the part that it lacks: tokens and products are for 16 rows.
EMPTY = 0.1


class Deal(NamedTuple):
    """tall: rows of a tile; per: tiles of a block."""

    warps: int
    tall: int
    per: int
    blocks: int


def num_chunks(width: int) -> int:
    return -(-width // CHUNK)


def deal(
    rows: int, width: int, num_sms: int, tall: int = TALL, together: int = TOGETHER, warps: int | None = None
) -> Deal:
    """Deal `rows` of [.., width] out so that each multiprocessor gets nearly the same bytes, in tiles of up to `tall`.

    together: warps that may share a multiprocessor; warps: of a block, to measure others than would be chosen.
    """
    most = min(MAX_WARPS, together, num_chunks(width))
    choice = range(1, most + 1) if warps is None else [min(warps, most)]
    found = _deals(rows, num_sms, tall, together, choice)
    return min(found, key=lambda d: _cost(d, rows, width, num_sms, tall))


def _deals(rows: int, num_sms: int, tall: int, together: int, choice: Iterable[int]) -> list[Deal]:
    found = []
    for warps in choice:
        for blocks_per_sm in range(1, together // warps + 1):
            a_block = -(-rows // (num_sms * blocks_per_sm))
            per = -(-a_block // tall)
            height = -(-a_block // per)
            found.append(Deal(warps, height, per, -(-rows // (per * height))))
    return found


def _cost(deal: Deal, rows: int, width: int, num_sms: int, tall: int) -> tuple[float, int]:
    """Weighed: the fullest multiprocessor, slots of K that stay empty, bytes in flight, tiles that are not full."""
    chunks, at_once = num_chunks(width), deal.warps * DEPTH
    fullest = -(-deal.blocks // num_sms) * deal.per * deal.tall * num_sms / rows
    wasted = _padded(chunks, at_once) / chunks
    flying = deal.blocks * min(at_once, chunks) * CHUNK_BYTES * deal.tall / tall / num_sms
    lacking = 1 + EMPTY * (tall / deal.tall - 1)
    # what is small cannot fly in larger numbers than there are
    enough = min(IN_FLIGHT_ASKED, rows * width * CHUNK_BYTES / (tall * CHUNK) / num_sms)
    return round(fullest * wasted * lacking * max(1.0, enough / flying), 3), abs(deal.warps - 2 * DEPTH)


def warps_for(tiles: int, width: int, num_sms: int) -> int:
    """Warps of a block that owns whole tiles of 16 rows of [.., width].

    Weighed: slots of the last batch that stay empty, bytes in flight, tiles that a block takes one after another.
    """
    chunks = num_chunks(width)

    def cost(warps: int) -> tuple[float, int, int]:
        per = tiles_per_block(tiles, num_sms * (WARPS_PER_SM // warps))
        blocks = -(-tiles // per)
        flying = blocks * min(warps * DEPTH, chunks) * CHUNK_BYTES / num_sms
        wasted = _padded(chunks, warps * DEPTH) / chunks
        return round(wasted * max(1.0, IN_FLIGHT / flying), 3), abs(warps - DEPTH), warps

    return min(range(1, min(MAX_WARPS, chunks) + 1), key=cost)


def tiles_per_block(tiles: int, slots: int) -> int:
    """Tiles that each block takes so that all blocks are on the machine at once, `slots` of them at most."""
    return -(-tiles // max(1, slots))


def sums_bytes(warps: int, rows: int, sets: int = 2) -> int:
    """Shared memory for the warps' sums: float [sets][warps][8 or 16 tokens][PITCH]."""
    return sets * warps * (8 if rows <= 8 else 16) * PITCH * 4


def _padded(chunks: int, at_once: int) -> int:
    return -(-chunks // at_once) * at_once


# ---- router and experts (router.cu, moe.cu) ----

ROUTER_PARTS, ROUTER_DEPTH, BATCH, PAIRS = 2, 4, 2, 8  # as there
MOE_WARPS = 8  # of a block at most
MOST_BATCHES = 10  # of a ring: what copies_wait_upto can tell apart
PLAN_BYTES = 7 * 1024  # shared memory that these kernels have without asking, and more than that
BLOCK_BYTES = 1024  # what each block on a multiprocessor costs beside what it asks for
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
