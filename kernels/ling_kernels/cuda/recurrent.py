"""KDA on a GPU: verify, commit and prefill, one order of operations for all three (kda.cuh)."""

from __future__ import annotations

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Argument, Device
from ling_kernels.cuda.lazy import Gated, Uncommitted
from ling_kernels.ops import ROW_TILE, KdaParams, KdaStaged, KernelError, Limits

HEAD, SLICES, THREADS, RECORD = 128, 8, 256, 516  # as in kda.cuh
COMMIT_PARTS = 4  # blocks that share a head in a commit
TILE, TILE_THREADS, WALKERS = 16, 512, 128  # as in kda_prefill.cuh
SCAN_BYTES = 3 * (16 + 1) * (3 * HEAD + 16 + 4) * 4
NO_WORDS = [None, None, None, None, 0, 0, None, None, None, None, None]  # of a commit that moves none
# Rows whose inputs a prefill keeps at a time: 2,064 bytes for each row and head.
PREFILL_ROWS = 2048


class RecurrentOps:
    """Contracts in `ling_kernels.ops.Ops`. A head's norm is left to the projection that follows (`Gated`), a commit to
    `advance`; a step's only row advances the state in kda_verify."""

    device: Device
    gated: Gated | None
    uncommitted: Uncommitted | None = None

    def kda_verify(
        self, proj: Tensor, conv: Tensor, state: Tensor, params: KdaParams, rows: int, limits: Limits | None = None
    ) -> tuple[Tensor, KdaStaged]:
        heads = _check(proj, params)
        if not 1 <= rows <= ROW_TILE:
            raise KernelError(f"{rows} rows: a window has 1 to {ROW_TILE}")
        staged = self._staging(state, heads)
        out = proj.new_empty(proj.shape[0], heads * HEAD)
        sums = torch.empty(ROW_TILE, heads, SLICES, dtype=torch.float32, device=proj.device)
        inputs = [proj, conv, state, params.conv, params.a_log, params.dt_bias, params.o_norm]
        advances = limits is not None and rows == 1
        words = [limits.remaining, limits.done] if advances else [None, None]
        args = [out, sums, staged.states, staged.inputs, *inputs, heads, rows, float(params.lower_bound), *words]
        self.device.launch(_named("kda_verify_sums", proj), heads * SLICES, THREADS, args)
        self.gated = Gated(out, sums, params.eps)
        return out, KdaStaged(staged.states, staged.inputs[:rows], advances)

    def _staging(self, state: Tensor, heads: int) -> KdaStaged:
        """Where a layer stages its window: its part of one buffer for all layers of the state that it is a part of, so
        that one launch finds them all. Kept for good: a captured step writes there."""
        kept: dict[int, tuple[Tensor, Tensor]] = self.__dict__.setdefault("_stagings", {})
        layer = heads * HEAD * HEAD
        storage = state.untyped_storage()
        key = storage.data_ptr()
        layers = storage.nbytes() // (4 * layer)
        index, rest = divmod(state.storage_offset(), layer)
        if rest or state.numel() != layer or not state.is_contiguous():
            raise KernelError(f"a KDA state must be one of [layers, {heads}, {HEAD}, {HEAD}] fp32")
        if key not in kept or kept[key][0].shape[:3:2] != (layers, heads):
            records = torch.zeros(layers, ROW_TILE, heads, RECORD, dtype=torch.float32, device=state.device)
            raw = torch.zeros(layers, ROW_TILE, 3 * heads * HEAD, dtype=torch.bfloat16, device=state.device)
            kept[key] = records, raw
        records, raw = kept[key]
        return KdaStaged(records[index], raw[index])

    def kda_commit(
        self, staged: list[KdaStaged], conv: Tensor, state: Tensor, count: Tensor, lazy: bool = False
    ) -> None:
        if not staged:
            return
        layers, heads = state.shape[:2]
        first, last = staged[0].states, staged[-1].states
        if len(staged) != layers or last.storage_offset() - first.storage_offset() != (layers - 1) * first.numel():
            raise KernelError(f"commit needs the staged windows of all {layers} layers, in order")
        raw = staged[0].inputs  # as many rows as the window had
        if staged[0].advanced:
            blocks = -(-layers * 3 * heads * HEAD // (4 * THREADS))
            left = Uncommitted(count, "kda_follow_layers", blocks, [raw, conv, heads, layers])
        else:
            args = [first, raw, conv, state, heads, layers, raw.shape[0]]
            left = Uncommitted(count, "kda_commit_layers", COMMIT_PARTS * heads * layers, args)
        if lazy:
            self.uncommitted = left
        else:
            self.device.launch(left.name, left.blocks, THREADS, [*left.args, count, *NO_WORDS])

    def _commit_and_advance(self, count: Tensor, words: list[Argument]) -> bool:
        """The commit by this count that was left to `advance`, in one launch with its words: whether there was one."""
        left, self.uncommitted = self.uncommitted, None
        if left is None or left.count is not count:
            return False
        self.device.launch(left.name, left.blocks + 1, THREADS, [*left.args, *words])
        return True

    def kda_prefill(self, proj: Tensor, conv: Tensor, state: Tensor, params: KdaParams) -> Tensor:
        heads = _check(proj, params)
        out = proj.new_empty(proj.shape[0], heads * HEAD)
        for start in range(0, proj.shape[0], PREFILL_ROWS):
            part = slice(start, start + PREFILL_ROWS)
            self._prefill(proj[part], conv, state, params, out[part])
        return out

    def _prefill(self, proj: Tensor, history: Tensor, state: Tensor, params: KdaParams, out: Tensor) -> None:
        """The recurrence itself, row by row, with every head and slice at work. It needs no division by a decay and
        leaves the very bits that decoding would."""
        rows, heads = proj.shape[0], params.num_heads
        records = torch.empty(rows, heads, RECORD, dtype=torch.float32, device=proj.device)
        o = torch.empty(rows, heads * HEAD, dtype=torch.float32, device=proj.device)
        inputs = [proj, history, params.conv, params.a_log, params.dt_bias, heads, rows, float(params.lower_bound)]
        name = _named("kda_prefill_inputs", proj)
        self.device.launch(name, (-(-rows // TILE), heads), TILE_THREADS, [records, *inputs])
        # more than half of a multiprocessor's shared memory: two scans on one would take turns while others idle
        alone = max(SCAN_BYTES, self.device.properties.shared_bytes // 2 + 1024)
        args = [o, state, history, records, proj, heads, rows]
        self.device.launch("kda_prefill_scan", (SLICES, heads), WALKERS, args, alone)
        args = [out, o, proj, params.o_norm, heads, rows, float(params.eps)]
        self.device.launch("kda_prefill_gate", -(-rows * heads // 16), THREADS, args)


def _named(name: str, proj: Tensor) -> str:
    """Kernels come for projections whose rows are 8-byte aligned, and for others."""
    return name if proj.shape[1] % 4 == 0 else f"{name}_uneven"


def _check(proj: Tensor, params: KdaParams) -> int:
    """Heads, if the sizes are ones that the kernels know."""
    head = params.o_norm.shape[0]
    if head != HEAD:
        raise KernelError(f"KDA heads of {head}: the kernels support {HEAD}")
    if proj.shape[1] != 5 * params.num_heads * HEAD + params.num_heads or not proj.is_contiguous():
        raise KernelError(f"a KDA projection of shape {tuple(proj.shape)} does not fit {params.num_heads} heads")
    return params.num_heads
