"""MLA on a GPU: absorbed attention over the latent cache for windows, expanded attention for prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Device, Int64
from ling_kernels.cuda.prefill import prefill_mla
from ling_kernels.ops import ROW_TILE, KernelError, MlaParams

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128  # as in mla.cuh
SPLITS, KEYS, TILE, THREADS, MERGE_GROUPS = 64, 64, 16, 256, 4  # as in attend.cuh
LARGE, SMALL = (3, 2), (1, 1)  # row tiles and stages of a block, by the shared memory that it may have


def attend_bytes(keys: int, values: int, tiles: int, stages: int, same: bool) -> int:
    """sizeof(AttendShared) in attend.cuh. same: values are the first part of the keys."""
    row = 2 * (keys + 8)
    chunks = stages * KEYS * row + (16 if same else stages * KEYS * 2 * (values + 8))
    return chunks + tiles * TILE * row + TILE * (KEYS + 4) * 4 + TILE * (KEYS + 8) * 2 + (2 * tiles + 1) * TILE * 4


class AttendOps:
    """Scratch that attention kernels share."""

    device: Device

    def attend_scratch(self, tiles: int, values: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Partial sums [tiles, SPLITS, 16, values], and their maxima and weights [tiles, SPLITS, 16, 2]. Kept: a
        captured step writes there, and no two launches use them at a time."""
        kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = self.__dict__.setdefault("_attend", {})
        if (tiles, values) not in kept:
            shape = (tiles, SPLITS, TILE)
            kept[tiles, values] = (
                torch.empty(*shape, values, dtype=torch.float32, device=like.device),
                torch.empty(*shape, 2, dtype=torch.float32, device=like.device),
            )
        return kept[tiles, values]


class LatentOps(AttendOps):
    """Contracts in `ling_kernels.ops.Ops`."""

    def mla(
        self, proj: Tensor, cache: Tensor, rope: Tensor, positions: Tensor, params: MlaParams, rows: int, extent: int
    ) -> Tensor:
        _check(proj, params)
        if rows > ROW_TILE:
            return prefill_mla(proj, cache, rope, positions, params, self._end_of(positions))
        heads, width = params.num_heads, proj.shape[1]
        rank = width - LATENT - ROPE - heads
        query = proj if params.q_b_proj is None else self._low_rank_query(proj, params, rank, rows)
        q = proj.new_empty(proj.shape[0], heads, LATENT + ROPE)
        args = [q, cache, query, query.shape[1], proj[:, rank:], width, params.w_uk, Int64(params.w_uk.stride(0))]
        args += [params.kv_norm, rope, positions, heads, rows, float(params.eps)]
        self.device.launch("mla_prepare", heads * LATENT // 64 + rows, THREADS, args)

        tiles = rows * -(-heads // TILE)
        # for all rows that a window may have: one buffer serves every width
        sums, stats = self.attend_scratch(ROW_TILE * -(-heads // TILE), LATENT, proj)
        large = attend_bytes(LATENT + ROPE, LATENT, *LARGE, same=True) <= self.device.properties.shared_bytes
        together, stages = LARGE if large else SMALL
        scale = (NOPE + ROPE) ** -0.5
        args = [sums, stats, q, cache, positions, heads, rows, cache.shape[0], scale]
        shared = attend_bytes(LATENT + ROPE, LATENT, together, stages, same=True)
        name = "mla_attend_large" if large else "mla_attend_small"
        self.device.launch(name, (SPLITS, -(-tiles // together)), THREADS, args, shared)

        latent = proj.new_empty(proj.shape[0], heads, LATENT)
        self.device.launch(
            "mla_merge", (heads, rows), MERGE_GROUPS * LATENT // 4, [latent, sums, stats, positions, heads]
        )
        out = proj.new_empty(proj.shape[0], heads * VALUE)
        args = [out, latent, params.w_uv, Int64(params.w_uv.stride(0)), proj[:, width - heads :], width, heads, rows]
        self.device.launch("mla_values", (VALUE // 16, heads), THREADS, args)
        return out

    def _end_of(self, positions: Tensor) -> int:
        """One more than the last position of a prefill chunk, read once for all layers: the host waits for it."""
        kept = self.__dict__.get("_chunk")
        if kept is None or kept[0] is not positions:
            self._chunk = kept = (positions, int(positions[-1]) + 1)
        return kept[1]

    def _low_rank_query(self, proj: Tensor, params: MlaParams, rank: int, rows: int) -> Tensor:
        normed = proj.new_empty(proj.shape[0], rank)
        args = [normed, proj, proj.shape[1], params.q_norm, rank, float(params.eps)]
        self.device.launch("mla_query_norm", rows, THREADS, args)
        return self.linear(normed, params.q_b_proj, rows)


def _check(proj: Tensor, params: MlaParams) -> None:
    latent, nope, value = params.kv_norm.shape[0], params.w_uk.shape[1], params.w_uv.shape[1]
    found = {"latent": latent, "rope": params.rope_dim, "nope head": nope, "value head": value}
    known = {"latent": LATENT, "rope": ROPE, "nope head": NOPE, "value head": VALUE}
    for name, size in found.items():
        if size != known[name]:
            raise KernelError(f"MLA {name} size {size}: the kernels support {known[name]}")
    if not proj.is_contiguous():
        raise KernelError("an MLA projection must be contiguous")
