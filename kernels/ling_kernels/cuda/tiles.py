"""How a matrix is dealt out to warps and blocks: from its shape and the GPU, never from the number of rows.

`warps` fixes the order in which a sum over K is taken, so two GPUs with another number of multiprocessors may differ in
last bits; two widths on one GPU may not.
"""

from __future__ import annotations

CHUNK, DEPTH, PITCH = 32, 4, 16  # as in gemm.cuh
CHUNK_BYTES = 16 * CHUNK * 2
MAX_WARPS = 16
# Tiles a multiprocessor from which on a matrix is a long walk.
LONG_WALK = 16
# Of a block that leaves its sums in parts: few, so that it finds room while the kernel before it drains.
PART_WARPS = 4
MAX_PARTS = 8
# Such blocks on a multiprocessor at one row; of several rows there are four, and the last ones come later (measured:
# out_proj of flash on a rank of two in 640 blocks of one trip, a step 1.861 to 1.840 ms, nine rows alike).
PART_BLOCKS = 5
# With 128 registers a thread, the most that the kernels use, a multiprocessor holds this many warps.
WARPS_PER_SM = 16
# Bytes that should be on their way per multiprocessor: 4.3 TB/s x 0.8 us / 132 is 26 KB at least; more hides the ramp.
IN_FLIGHT = 48 * 1024


def num_chunks(width: int) -> int:
    return -(-width // CHUNK)


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
        price = wasted * max(1.0, IN_FLIGHT / flying)
        # a long walk: a whole tile each trip to memory, where that costs nothing (lm_head: 8 us of 124)
        if tiles >= LONG_WALK * num_sms:
            return round(price, 1), -warps, warps
        return round(price, 3), abs(warps - DEPTH), warps

    return min(range(1, min(MAX_WARPS, chunks) + 1), key=cost)


def parts_for(tiles: int, width: int, num_sms: int) -> int:
    """Parts of K for blocks of PART_WARPS warps that own one tile and one part, where the sums stay in parts.

    Weighed as above; all blocks have to be on the machine at once at one row.
    """
    chunks, slots = num_chunks(width), num_sms * PART_BLOCKS

    def cost(parts: int) -> tuple[float, int]:
        each = part_width(width, parts) // CHUNK
        flying = tiles * -(-chunks // each) * min(PART_WARPS * DEPTH, each) * CHUNK_BYTES / num_sms
        wasted = parts * _padded(each, PART_WARPS * DEPTH) / chunks
        waves = -(-tiles * parts // slots)
        return round(waves * wasted * max(1.0, IN_FLIGHT / flying), 3), parts

    return min(range(1, min(MAX_PARTS, chunks) + 1), key=cost)


def part_width(width: int, parts: int) -> int:
    """Values of K in each of so many parts, whole spans of a warp; the last one has what is left."""
    return -(-width // (parts * DEPTH * CHUNK)) * DEPTH * CHUNK


def down_shape(width: int) -> tuple[int, int]:
    """Warps of a block, and parts, where each warp has one chunk of K: as few slots without a chunk as possible, and,
    unless parts get many, not three warps: four schedulers have registers for an even number each."""
    chunks = num_chunks(width)

    def cost(warps: int) -> tuple[int, bool, bool, int]:
        return _padded(chunks, warps), -(-chunks // warps) > PART_WARPS, warps == 3, -warps

    warps = min(range(1, PART_WARPS + 1), key=cost)
    return warps, -(-chunks // warps)


def tiles_together(tiles: int, parts: int, each: int, num_sms: int) -> int:
    """Tiles of a block of down, `each` warps a tile, where several tokens are worth sharing: as many as let no
    multiprocessor have more warps than it must."""

    def most_warps(together: int) -> tuple[int, int]:
        blocks = -(-tiles // together) * parts
        return -(-blocks // num_sms) * together * each, -together

    return min(range(1, MAX_WARPS // each + 1), key=most_warps)


def router_parts(width: int) -> tuple[int, int]:
    """Parts of K, a block each, and warps of a block, so that every warp's weights are on their way at once; at most
    two, which selection adds."""
    chunks = num_chunks(width)
    parts = 1 if chunks <= MAX_WARPS * DEPTH else 2
    return parts, min(MAX_WARPS, -(-chunks // (parts * DEPTH)))


def shared_chunks(width: int, warps: int) -> int:
    """Chunks of K, side by side, that each warp of a block has of a tile of the shared expert."""
    return -(-num_chunks(width) // warps)


def contest_bytes(experts: int) -> int:
    """Shared memory in which a row's experts are chosen: Contest in select.cuh."""
    quads = 1 if experts <= 128 else 2 if experts <= 256 else 4
    return quads * 512 + 192


def tiles_per_block(tiles: int, slots: int) -> int:
    """Tiles that each block takes so that all blocks are on the machine at once, `slots` of them at most."""
    return -(-tiles // max(1, slots))


def even_deal(tiles: int, slots: int) -> tuple[int, int, int]:
    """Tiles that each block takes, how many of the first blocks take one more, and blocks, `slots` of them at most.

    With all slots in use every multiprocessor has as many blocks. Each gets as much of the bandwidth, so all wait
    for the one with the most tiles (flash's in_proj on a rank of two: 6 tiles where 4.9 are the mean, now 5)."""
    blocks = min(tiles, max(1, slots))
    return tiles // blocks, tiles % blocks, blocks


def sums_bytes(warps: int, rows: int, sets: int = 2) -> int:
    """Shared memory for the warps' sums: float [sets][warps][8 or 16 tokens][PITCH]."""
    return sets * warps * (8 if rows <= 8 else 16) * PITCH * 4


def row_bytes(width: int) -> int:
    """Shared memory for a row that a block makes itself, behind the sums: bf16, and eight zeros."""
    return 2 * (width + 8)


def _padded(chunks: int, at_once: int) -> int:
    return -(-chunks // at_once) * at_once
