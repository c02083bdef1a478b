"""MLA on a GPU: absorbed attention over the latent cache for windows, expanded attention for prefill."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ling_kernels.cuda.blank import Blanks
from ling_kernels.cuda.driver import Device, Int64
from ling_kernels.cuda.prefill import prefill_mla
from ling_kernels.ops import ROW_TILE, KernelError, MlaParams

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128  # as in mla.cuh
ROW, QUERY = LATENT + ROPE, NOPE + ROPE
SLICE, QUERY_THREADS, QUERY_RANK, THREADS = 256, 384, 256, 256
SPLITS, TILE, PART, ATTEND_WARPS = 66, 16, 192, 8  # as in attend.cuh
MERGE_RUNS, MERGE_COLUMNS = 8, 256


class Form(NamedTuple):
    """Keys of a chunk, which fix the order of sums, and how many query tiles the kernels for it may have."""

    keys: int
    tiles: tuple[int, ...]

    def kernel(self, tiles: int) -> str:
        return f"mla_attend_{self.keys}_{tiles}"


LARGE, SMALL = Form(128, (1, 3, 5)), Form(64, (1,))  # by the shared memory that a block may have


def attend_bytes(form: Form, tiles: int) -> int:
    """sizeof(AttendShared) in attend.cuh."""
    rows, keys, stats = tiles * TILE, form.keys, tiles * TILE * 4 * (2 * ATTEND_WARPS + 4)
    buffers = 1 if tiles == 1 else 2 if tiles > 3 else 3
    weights = (1 if buffers < 3 else rows) * (keys + 8)
    halves = keys * (ROW + 8) + buffers * rows * (PART + 8) + weights
    return -(-(2 * halves + stats) // 16) * 16


def query_bytes() -> int:
    """sizeof(MlaQueryShared) in mla.cuh."""
    return 2 * (NOPE * (SLICE + 8) + ROW_TILE * (QUERY_RANK + 8) + ROW_TILE * (QUERY + 8))


def deal_tiles(tiles: int, form: Form) -> tuple[int, int]:
    """Which of the form's kernels, and how many tiles a block of it takes: two blocks share the keys of a split as
    soon as one would have much to do."""
    most = next((most for most in form.tiles if tiles <= (most if most == 1 else 2 * most)), form.tiles[-1])
    return most, -(-tiles // -(-tiles // most))


class LatentOps:
    """Contracts in `ling_kernels.ops.Ops`."""

    device: Device
    blanks: Blanks

    def mla(
        self, proj: Tensor, cache: Tensor, rope: Tensor, positions: Tensor, params: MlaParams, rows: int, extent: int
    ) -> Tensor:
        _check(proj, params)
        if rows > ROW_TILE:
            return prefill_mla(proj, cache, rope, positions, params, self._end_of(positions))
        heads, width = params.num_heads, proj.shape[1]
        form, tiles = self._form(), -(-rows * heads // TILE)
        most, together = deal_tiles(tiles, form)
        q = self._latent_queries(proj, cache, rope, positions, params, rows, most == 1)

        partial, stats = self._attend_scratch(heads, proj)
        scale = QUERY**-0.5 * 1.4426950408889634
        args = [partial, stats, q, cache, positions, heads, rows, together, cache.shape[0], scale]
        grid, shared = (SPLITS, -(-tiles // together)), attend_bytes(form, most)
        self.device.launch(form.kernel(most), grid, THREADS, args, shared)

        out, gate = self._result(proj, rows, proj.shape[0], heads * VALUE), proj[:, width - heads :]
        up = [params.w_uv, Int64(params.w_uv.stride(0)), gate]
        if rows == 1:  # more would read each split's means too often
            args = [out, partial, stats, positions, *up, heads, *self.blanks.renew(rows, proj)]
            self.device.launch("mla_merge_values", (VALUE // 32, heads), MERGE_RUNS * LATENT // 8, args)
            return out
        latent = proj.new_empty(proj.shape[0], heads, LATENT)
        grid, threads = (heads, rows, LATENT // MERGE_COLUMNS), MERGE_RUNS * MERGE_COLUMNS // 8
        self.device.launch("mla_merge", grid, threads, [latent, partial, stats, positions, heads])
        args = [out, latent, *up, width, heads, rows, *self.blanks.renew(rows, proj)]
        self.device.launch("mla_values", (VALUE // 16, heads), THREADS, args)
        return out

    def _form(self) -> Form:
        most = max(attend_bytes(LARGE, tiles) for tiles in LARGE.tiles)
        return LARGE if most <= self.device.properties.shared_bytes else SMALL

    def _end_of(self, positions: Tensor) -> int:
        """One more than the last position of a prefill chunk, read once for all layers: the host waits for it."""
        kept = self.__dict__.get("_chunk")
        if kept is None or kept[0] is not positions:
            self._chunk = kept = (positions, int(positions[-1]) + 1)
        return kept[1]

    def _latent_queries(
        self,
        proj: Tensor,
        cache: Tensor,
        rope: Tensor,
        positions: Tensor,
        params: MlaParams,
        rows: int,
        fragments: bool,
    ) -> Tensor:
        """The window's absorbed queries [R * H, 576] in whole tiles, or the same as attention's blocks of one tile take
        them; its rows of the cache are written as well."""
        heads, width = params.num_heads, proj.shape[1]
        rank = width - ROW - heads
        count = proj.shape[0] * heads
        q, latent = proj.new_empty(-(-count // TILE) * TILE, ROW), proj[:, rank:]  # whole tiles of fragments
        args = [q, cache, proj, latent, width, params.q_norm, params.q_b_proj, rank, params.w_uk]
        args += [Int64(params.w_uk.stride(0)), params.kv_norm, rope, positions, heads, rows, int(fragments)]
        args += [float(params.eps)]
        self.device.launch("mla_query", heads * LATENT // SLICE, QUERY_THREADS, args, query_bytes())
        return q

    def _attend_scratch(self, heads: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Results of splits [SPLITS, ROW_TILE * H, 512], and their maxima and weights [SPLITS, ROW_TILE * H, 2] fp32.
        Kept: a captured step writes there, and no two launches use them at a time."""
        kept: dict[int, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_attend", {})
        if heads not in kept:
            shape = (SPLITS, ROW_TILE * heads)
            kept[heads] = (
                torch.empty(*shape, LATENT, dtype=torch.bfloat16, device=like.device),
                torch.empty(*shape, 2, dtype=torch.float32, device=like.device),
            )
        return kept[heads]


def _check(proj: Tensor, params: MlaParams) -> None:
    latent, nope, value = params.kv_norm.shape[0], params.w_uk.shape[1], params.w_uv.shape[1]
    found = {"latent": latent, "rope": params.rope_dim, "nope head": nope, "value head": value}
    known = {"latent": LATENT, "rope": ROPE, "nope head": NOPE, "value head": VALUE}
    for name, size in found.items():
        if size != known[name]:
            raise KernelError(f"MLA {name} size {size}: the kernels support {known[name]}")
    if not proj.is_contiguous():
        raise KernelError("an MLA projection must be contiguous")
    if proj.dtype != torch.bfloat16:
        raise KernelError(f"activations in {proj.dtype}: the kernels compute in bfloat16")
    rank = 0 if params.q_b_proj is None else params.q_b_proj.shape[1]
    if rank % 8:
        raise KernelError(f"rank {rank} of MLA's query: the kernels need a multiple of 8")
