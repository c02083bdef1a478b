"""Shared memory and rows of the experts' kernels (gate_up.cuh, down.cuh): from shape, GPU and live rows.

Only the shape decides about bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from ling_kernels.cuda.driver import Properties
from ling_kernels.cuda.tiles import (
    BLOCK_BYTES,
    CONSUMERS,
    MAX_RING,
    RING_HEAD,
    STAGE_PITCH,
    SUM_PITCH,
    sums_of_stream,
)

PAIRS, GROUP = 8, 8  # as there
TALLEST = 32  # rows of a block of down, two groups of 16
PLAN_BYTES = 7 * 1024  # shared memory that these kernels have without asking
TILE_BYTES = 2 * PAIRS * STAGE_PITCH
ROOM = 3 * GROUP  # rows of slots on their way to a block: one slot's sixteen may lie in three groups
# Below this a ring cannot hide the way to memory, and there is no use in being beside gate_up.
LEAST = 24 * 1024


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """Stages of gate_up's and down's rings, and the kernels' bytes; local: gate_up keeps its tokens there; room: pairs
    of a slot and a row in down."""

    gate_depth: int
    gate_bytes: int
    local: bool
    down_depth: int
    down_bytes: int
    room: int


def row_bytes(values: int) -> int:
    """Distance of rows of bf16 in shared memory."""
    return -(-values * 2 // 128) * 128 + 64


def rows_of_down(width: int, num_sms: int) -> int:
    """Rows of a block, at most TALLEST, so that every multiprocessor has the same number of blocks, nearly."""
    blocks_per_sm = -(-width // (TALLEST * num_sms))
    return -(-width // (blocks_per_sm * num_sms))


def expert_memory(
    properties: Properties, width: int, inner: int, down_rows: int, rows: int, chosen: int, most: tuple[int, int]
) -> ExpertMemory:
    """For `rows` live rows of `width`, experts of `inner`, so that a block of down has room beside one of gate_up.

    most: stages of gate_up and of down.
    """
    limit = properties.shared_bytes - PLAN_BYTES - RING_HEAD
    gate, tokens = sums_of_stream(rows), rows * (-(-width // 64) * 64 + 32) * 2
    local = gate + tokens + 2 * TILE_BYTES <= limit
    gate += tokens if local else 0
    gate_depth = max(1, min(most[0], MAX_RING, (limit - gate) // TILE_BYTES))
    gate += RING_HEAD + gate_depth * TILE_BYTES

    room = min(rows * (chosen + 1), ROOM)
    steps = -(-inner // (CONSUMERS * 32))
    down = -(-down_rows // 16) * CONSUMERS * rows * SUM_PITCH * 4 + room * steps * CONSUMERS * 64
    stage = down_rows * row_bytes(inner)
    beside = limit - gate - PLAN_BYTES - BLOCK_BYTES - down
    if beside < max(LEAST, 2 * stage):
        beside = limit - down
    down_depth = max(1, min(most[1], MAX_RING, beside // stage))
    return ExpertMemory(gate_depth, gate, local, down_depth, RING_HEAD + down + down_depth * stage, room)
