"""How a matrix is dealt out to warps and blocks: from its shape and the GPU, never from the number of rows.

`warps` fixes the order in which a sum over K is taken, so two GPUs with another number of multiprocessors may differ in
last bits; two widths on one GPU may not.
"""

from __future__ import annotations

CHUNK, DEPTH, PITCH = 32, 4, 20  # as in gemm.cuh
CHUNK_BYTES = 16 * CHUNK * 2
MAX_WARPS = 16
# Bytes that should be on their way per multiprocessor: 4.3 TB/s x 0.8 us / 132 is 26 KB at least; more hides the ramp.
IN_FLIGHT = 64 * 1024


def num_chunks(width: int) -> int:
    return -(-width // CHUNK)


def warps_for(tiles: int, width: int, num_sms: int) -> int:
    """Warps of a block that owns whole tiles of 16 rows of [.., width].

    Enough for IN_FLIGHT bytes with all tiles at work, then the fewest that leave no slot of the last batch empty.
    """
    chunks = num_chunks(width)
    wanted = -(-IN_FLIGHT * num_sms // (tiles * DEPTH * CHUNK_BYTES))
    most = min(MAX_WARPS, max(1, chunks // 2))
    wanted = min(max(wanted, min(4, most)), most)
    return min(range(wanted, most + 1), key=lambda warps: (_padded(chunks, warps * DEPTH), warps))


def warps_for_down(tiles: int, widths: tuple[int, ...], num_sms: int) -> int:
    """The same for a block that walks several matrices of the given widths without a barrier between them."""
    wanted = -(-IN_FLIGHT * num_sms // (tiles * DEPTH * CHUNK_BYTES))
    most = min(MAX_WARPS, max(num_chunks(width) for width in widths))
    wanted = min(max(wanted, min(4, most)), most)

    def cost(warps: int) -> tuple[int, int]:
        return sum(_padded(num_chunks(width), warps) for width in widths), -warps

    return min(range(-(-wanted // 2), most + 1), key=cost)


def tiles_per_block(tiles: int, slots: int) -> int:
    """Tiles that each block takes so that all blocks are on the machine at once, `slots` of them at most."""
    return -(-tiles // max(1, slots))


def sums_bytes(warps: int, rows: int, sets: int = 2) -> int:
    """Shared memory for the warps' sums: float [sets][warps][8 or 16 tokens][PITCH]."""
    return sets * warps * (8 if rows <= 8 else 16) * PITCH * 4


def _padded(chunks: int, at_once: int) -> int:
    return -(-chunks // at_once) * at_once
