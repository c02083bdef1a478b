"""Embedding, norms, projections, MLP, router, experts and head on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Argument, Device
from ling_kernels.cuda.lazy import Candidates, Gated, Unembedded, Unnormed, Unselected
from ling_kernels.cuda.prefill import prefill_choose, prefill_experts, prefill_mlp
from ling_kernels.cuda.recurrent import SLICES
from ling_kernels.cuda.tiles import (
    CHUNK,
    DEPTH,
    PART_WARPS,
    WARPS_PER_SM,
    contest_bytes,
    down_shape,
    even_deal,
    part_width,
    parts_for,
    router_parts,
    row_bytes,
    shared_chunks,
    sums_bytes,
    tiles_per_block,
    tiles_together,
    warps_for,
)
from ling_kernels.ops import ROW_TILE, KernelError, MlpParams, MoeParams, Routing
from ling_kernels.reference import dense as reference

MAX_EXPERTS, MAX_CHOSEN = 512, 8  # as in select.cuh
MAX_SLOTS = ROW_TILE * MAX_CHOSEN + 1
CHOOSING = 128  # experts of which a lane has four where gate_up chooses; of more it has sixteen
PLAN_IDS, PLAN_MASKS, PLAN_WEIGHTS = 4, 4 + MAX_SLOTS, 4 + 2 * MAX_SLOTS + 2
PLAN_WORDS = PLAN_WEIGHTS + MAX_SLOTS * ROW_TILE
MAX_WIDTH = 8192  # of a row that one block norms
# Slots that the forms of experts_down ask for at once, and the warps that a block of them may have, for up to 8 and 16
# tokens.
DOWN_FORMS = {9: 4, 8: 4}, {10: 8, 6: 12, 5: 16}


class DenseOps:
    """Contracts in `ling_kernels.ops.Ops`. gate_fp32: keep the router's weights in fp32 instead of bf16.
    For measurements, without effect on any bit: early_norm, exchange_norm lets the next kernel start before it waits
    itself; norm_in_next, at one row the router's kernel, where it has one part of K, or that of a short projection does
    the exchange_norm before it."""

    early_norm = True
    norm_in_next = True

    def __init__(self, device: Device, gate_fp32: bool = False) -> None:
        self.device = device
        self.gate_fp32 = gate_fp32
        self.gated: Gated | None = None
        self.unnormed: Unnormed | None = None
        self.unselected: Unselected | None = None
        self.unembedded: Unembedded | None = None
        self.candidates: Candidates | None = None
        self._gates: dict[int, tuple[Tensor, Tensor]] = {}

    def embed(self, ids: Tensor, table: Tensor, lazy: bool = False) -> Tensor:
        width = _width("hidden size", table.shape[1], MAX_WIDTH)
        x = table.new_empty(ids.shape[0], width)
        self.unembedded = Unembedded(x, ids, table) if lazy else None
        if not lazy:
            self.device.launch("embed", ids.shape[0], _threads(width), [ids, table, x, width])
        return x

    def exchange_norm(
        self,
        partial: Tensor | None,
        x: Tensor,
        weight: Tensor,
        eps: float,
        rows: int | None = None,
        lazy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        width = _width("hidden size", x.shape[1], MAX_WIDTH)
        unembedded, self.unembedded = self.unembedded, None
        if partial is None and unembedded is not None and unembedded.x is x:
            h = torch.empty_like(x)
            args = [unembedded.ids, unembedded.table, weight, x, h, width, float(eps)]
            self.device.launch("embed_norm", x.shape[0] if rows is None else rows, _threads(width), args)
            return x, h
        total, h = (x if partial is None else torch.empty_like(x)), torch.empty_like(x)
        args = [*parts_of(partial), x, weight, total, h, width, float(eps)]
        later = self.norm_in_next and lazy and rows == 1 and partial is not None
        self.unnormed = Unnormed(h, args) if later else None
        if not later:
            self._norm(args, x.shape[0] if rows is None else rows)
        return total, h

    def _norm(self, args: list[Argument], rows: int) -> None:
        width = args[-2]
        self.device.launch("exchange_norm", rows, _threads(width), [*args, int(self.early_norm)])

    def _take_unnormed(self, h: Tensor, fits: bool) -> list[Argument] | None:
        """Sum and norm that h still lacks, for a kernel that does them; where that does not fit they are done now."""
        unnormed, self.unnormed = self.unnormed, None
        if unnormed is None or unnormed.h is not h:
            return None
        if not fits:
            self._norm(unnormed.args, 1)
        return unnormed.args if fits else None

    def linear(self, h: Tensor, weight: Tensor, rows: int | None = None, out: Tensor | None = None) -> Tensor:
        """out: where to, [R, n], for a window."""
        if self._take_norm(h) is not None:
            raise KernelError("KDA's window output lacks its norm: only linear_partial applies it")
        if rows is None:
            return reference.linear(h, weight)
        n, width = weight.shape
        out = h.new_empty(h.shape[0], n) if out is None else out
        # where a block has one trip of weights, and no multiprocessor two blocks that make the same row
        tiles, sms = -(-n // 16), self.device.properties.num_sms
        warps = warps_for(tiles, width, sms)
        norm = self._take_unnormed(h, tiles <= sms and warps * DEPTH * CHUNK >= width)
        if norm is None:
            self._stream_evenly("linear", tiles, width, rows, [h, weight, out, rows, n, width])
        else:
            bytes_needed = sums_bytes(warps, rows) + row_bytes(width)
            self.device.launch("linear_normed", tiles, warps * 32, [*norm, weight, out, n], bytes_needed)
        return out

    def linear_partial(self, h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
        """A window's in parts [S, R, n] fp32."""
        norm = self._take_norm(h)
        if rows is None:
            if norm is not None:
                raise KernelError("a projection of KDA's window output was asked for without its rows")
            return reference.linear(h, weight)
        _check_window(h, rows)
        n, width = weight.shape
        _width("width of a projection", width)
        tiles = -(-n // 16)
        part = part_width(width, parts_for(tiles, width, self.device.properties.num_sms))
        parts = -(-width // part)
        out = torch.empty(parts, h.shape[0], n, dtype=torch.float32, device=h.device)
        name, args = "linear_part", []
        if norm is not None:
            if width % 128 or norm.sums.shape[2] != SLICES:
                text = f"KDA output of {width} values: the kernels need heads of 128, in {SLICES} slices"
                raise KernelError(text)
            name, args = "linear_part_normed", [norm.sums, float(norm.eps)]
        warps = min(PART_WARPS, part // (DEPTH * CHUNK))
        args = [h, weight, out, *args, h.shape[0], rows, n, width, part]
        self.device.launch(_named(name, rows), (tiles, parts), warps * 32, args, sums_bytes(warps, rows))
        return out

    def _take_norm(self, h: Tensor) -> Gated | None:
        """What the output of KDA that was made last still lacks, if that is h."""
        gated, self.gated = self.gated, None
        return gated if gated is not None and gated.o is h else None

    def mlp(self, h: Tensor, params: MlpParams, rows: int | None = None) -> Tensor:
        if rows is None:
            return prefill_mlp(self.device, h, params)
        inner, width = params.down.shape[1], params.gate_up.shape[1]
        mid = h.new_empty(h.shape[0], inner)
        args = [h, params.gate_up, mid, float(params.limit), rows, inner, width]
        self._stream_evenly("mlp_gate_up", -(-inner // 8), width, rows, args)
        return self.linear_partial(mid, params.down, rows)

    def head(self, h: Tensor, weight: Tensor, rows: int | None = None) -> Tensor:
        if rows is None:
            return reference.head(h, weight)
        n, width = weight.shape
        logits = torch.empty(h.shape[0], n, dtype=torch.float32, device=h.device)
        tiles = -(-n // 16)
        warps = warps_for(tiles, width, self.device.properties.num_sms)
        per = tiles_per_block(tiles, self._slots("head", warps, rows))  # alike, for the ranges of candidates
        blocks = -(-tiles // per)
        values = torch.empty(blocks, ROW_TILE, dtype=torch.float32, device=h.device)
        ids = torch.empty(blocks, ROW_TILE, dtype=torch.int32, device=h.device)
        args = [h, weight, logits, values, ids, rows, n, width, per]
        self._stream("head", width, rows, args, warps, blocks)
        self.candidates = Candidates(logits, values, ids, per * 16)
        return logits

    def route(self, h: Tensor, params: MoeParams, rows: int | None = None, lazy: bool = False) -> Routing:
        _check_router(params)
        if rows is None:
            gate = params.gate if self.gate_fp32 else self._gate(params.gate)
            return prefill_choose(self.device, reference.linear(h.float(), gate.float()), params)
        count = params.gate.shape[0]
        gate, width = self._gate(params.gate), h.shape[1]
        _check_window(h, rows)
        _width("hidden size", width)
        parts, warps = router_parts(gate.shape[1])
        logits = torch.empty(parts, ROW_TILE, count, dtype=torch.float32, device=h.device)
        tiles, bytes_needed = -(-count // 16), sums_bytes(warps, rows, 1)
        # a tile of the shared expert is one trip of weights, and a norm has eight values a thread
        fits = lazy and rows == 1 and warps * 256 >= width
        norm = self._take_unnormed(h, fits and parts == 1)
        asked = [params.bias, 4 * count]  # bytes of it
        if not fits:
            args = [h, gate, logits, rows, count, width, gate.shape[1], *asked]
            self.device.launch(_named("router", rows), (tiles, parts), warps * 32, args, bytes_needed)
            return self._select(logits, h, params, rows)
        routing, shared, more, _ = self._begin(h, params, rows)
        name, row = f"router_row_{parts}", [h, width]
        if norm is not None:
            name, row, bytes_needed = "router_normed", norm, bytes_needed + row_bytes(width)
        grid = tiles + -(-more // parts), parts
        args = [*row, gate, logits, count, gate.shape[1], *asked, routing.plan, *shared]
        self.device.launch(name, grid, warps * 32, args, bytes_needed)
        self.unselected = Unselected(routing, _selection(logits, params, routing))
        return routing

    def _select(self, logits: Tensor, h: Tensor, params: MoeParams, rows: int) -> Routing:
        """logits [parts, ROW_TILE, E] fp32, one or two parts that are to be added."""
        routing, *shared = self._begin(h, params, rows)
        least = rows * contest_bytes(logits.shape[2])
        self._launch_plan("route_select", _selection(logits, params, routing), h, rows, *shared, least=least)
        return routing

    def _plan(self, h: Tensor, routing: Routing, params: MoeParams, rows: int) -> Routing:
        """A routing that was made elsewhere with the device's plan, and its experts begun."""
        chosen = routing.experts.shape[1]
        if chosen > MAX_CHOSEN:
            raise KernelError(f"{chosen} experts for a token: at most {MAX_CHOSEN} are supported")
        made, *shared = self._begin(h, params, rows)
        self._launch_plan("route_plan", [routing.experts, routing.weights, made.plan, chosen], h, rows, *shared)
        return made._replace(experts=routing.experts, weights=routing.weights)

    def _launch_plan(
        self,
        name: str,
        args: list[Argument],
        h: Tensor,
        rows: int,
        shared: list[Argument],
        tiles: int,
        warps: int,
        least: int = 0,
    ) -> None:
        """One block makes a plan, a warp a row, in `least` bytes of shared memory; the others have the shared expert's
        tiles."""
        warps = max(rows, warps)
        args = [*args, h, rows, h.shape[1], *shared]
        bytes_needed = max(least, sums_bytes(warps, rows, 1))
        self.device.launch(_named(name, rows), 1 + tiles, warps * 32, args, bytes_needed)

    def _begin(self, h: Tensor, params: MoeParams, rows: int) -> tuple[Routing, list[Argument], int, int]:
        """What a kernel fills that makes a plan, with values [slots, ROW_TILE, pitch] that gate_up goes on with; how it
        is to make the first slot's, the shared expert's; in how many tiles, by how many warps each: the router's, at
        any number of rows."""
        width, inner, shared = h.shape[1], params.down.shape[2], params.shared.down.shape[1]
        for size in (width, inner, shared):
            _width("size of an expert", size)
        chosen, device, pitch = params.experts_per_token, h.device, max(inner, shared)
        routing = Routing(
            torch.empty(ROW_TILE, chosen, dtype=torch.int64, device=device),
            torch.empty(ROW_TILE, chosen, dtype=torch.float32, device=device),
            torch.empty(PLAN_WORDS, dtype=torch.int32, device=device),
            h.new_empty(1 + min(params.gate.shape[0], rows * chosen), ROW_TILE, pitch),
        )
        _, warps = router_parts(self._gate(params.gate).shape[1])
        args = [params.shared.gate_up, routing.begun, shared, pitch, float(params.shared.limit)]
        return routing, [*args, shared_chunks(width, warps)], -(-shared // 8), warps

    def experts(self, h: Tensor, routing: Routing, params: MoeParams, rows: int | None) -> Tensor:
        if rows is None:
            return prefill_experts(self.device, h, routing, params)
        _, _, plan, mid = routing if routing.plan is not None else self._plan(h, routing, params, rows)
        width, inner, shared, pitch = h.shape[1], params.down.shape[2], params.shared.down.shape[1], mid.shape[2]
        tiles = -(-inner // 8)
        # the fewest tiles that a step may have decide the warps: what one row asks for, at any width
        warps = warps_for(params.experts_per_token * tiles, width, self.device.properties.num_sms)
        name, args, bytes_needed = _named("experts_gate_up", rows), [plan], sums_bytes(warps, rows)
        unselected, self.unselected = self.unselected, None
        selects = unselected is not None and unselected.routing is routing
        if selects:
            quads = 1 if params.gate.shape[0] <= CHOOSING else 4
            name, args = f"experts_choose_gate_up_{quads}", unselected.args
        blocks = min((mid.shape[0] - 1) * tiles, self.device.resident(name, warps * 32, bytes_needed))
        args = [h, params.gate_up, *args, mid, inner, pitch, float(params.limit), *([] if selects else [rows]), width]
        self.device.launch(name, blocks, warps * 32, args, bytes_needed)
        each, parts = down_shape(pitch)
        tiles = -(-width // 16)
        together = 1 if rows <= 8 else tiles_together(tiles, parts, each, self.device.properties.num_sms)
        out = torch.empty(parts, h.shape[0], width, dtype=torch.float32, device=h.device)
        args = [mid, params.shared.down, params.down, plan, out, shared, inner, pitch, h.shape[0], rows, width, each]
        grid, warps = (-(-tiles // together), parts), together * each
        bytes_needed = sums_bytes(warps, rows, 1)
        name = self._down_name(rows, grid[0] * parts, warps, bytes_needed)
        self.device.launch(name, grid, warps * 32, args, bytes_needed)
        return out

    def _down_name(self, rows: int, blocks: int, warps: int, bytes_needed: int) -> str:
        """The form that asks for most experts at once of those that let all blocks be on the machine together."""
        forms = DOWN_FORMS[rows > 8].items()
        names = [f"{_named('experts_down', rows)}_{ahead}" for ahead, most in forms if warps <= most]
        fits = (name for name in names if self.device.resident(name, warps * 32, bytes_needed) >= blocks)
        return next(fits, names[-1])

    def _slots(self, name: str, warps: int, rows: int) -> int:
        """Blocks of one of the kernels that walk tiles of a matrix: as many as the machine holds, of one row no more
        than of sixteen (more were slower: a step of flash on a rank of two 1.87 ms instead of 1.86)."""
        held = self.device.resident(_named(name, rows), warps * 32, sums_bytes(warps, rows))
        return min(held, self.device.properties.num_sms * (WARPS_PER_SM // warps))

    def _stream(self, name: str, width: int, rows: int, args: list[Argument], warps: int, blocks: int) -> None:
        """Launch one of them; how its tiles are dealt out is its last arguments."""
        _check_window(args[0], rows)
        _width("width of a projection", width)
        self.device.launch(_named(name, rows), blocks, warps * 32, args, sums_bytes(warps, rows))

    def _stream_evenly(self, name: str, tiles: int, width: int, rows: int, args: list[Argument]) -> None:
        warps = warps_for(tiles, width, self.device.properties.num_sms)
        *deal, blocks = even_deal(tiles, self._slots(name, warps, rows))
        self._stream(name, width, rows, [*args, *deal], warps, blocks)

    def _gate(self, gate: Tensor) -> Tensor:
        """The router's weight as the kernel takes it, made at first use and kept: bf16 [E, D], or, for fp32, three bf16
        parts side by side whose sum is the fp32 value (each product of bf16 numbers is exact in the fp32 sum)."""
        key = gate.data_ptr()
        if key not in self._gates:
            made = _parts(gate.float()) if self.gate_fp32 else gate.bfloat16()
            self._gates[key] = (gate, made)  # with the original, so that its address is not given to another
        return self._gates[key][1]


def parts_of(partial: Tensor | None) -> tuple[Tensor | None, int, int]:
    """As exchange_norm takes it: bf16 [R, D], or fp32 parts [S, R, D] and how many values lie from one to the next."""
    if partial is None or partial.ndim == 2:
        return partial, 0, 0
    return partial, partial.shape[0], partial.stride(0)


def _check_window(x: Tensor, rows: int) -> None:
    if not 1 <= rows <= ROW_TILE:
        raise KernelError(f"{rows} rows: a window has 1 to {ROW_TILE}")
    if x.dtype != torch.bfloat16:
        raise KernelError(f"activations in {x.dtype}: the kernels compute in bfloat16")


def _parts(gate: Tensor) -> Tensor:
    """fp32 [E, D] as bf16 [E, 3 D'], D' rounded up to a chunk: high, middle and low 8 bits of each significand."""
    padded = torch.nn.functional.pad(gate, (0, -gate.shape[1] % 32))
    parts = []
    for _ in range(3):
        parts.append(padded.bfloat16())
        padded = padded - parts[-1].float()
    return torch.cat(parts, dim=1).contiguous()


def _check_router(params: MoeParams) -> None:
    count, groups = params.gate.shape[0], params.n_group
    if count > MAX_EXPERTS or count % (4 * groups) or groups & (groups - 1) or groups > 32:
        text = f"{count} experts in {groups} groups: at most {MAX_EXPERTS}, in 1, 2, 4 .. 32 groups of 4, 8, 12 .."
        raise KernelError(text)
    if params.bias.data_ptr() % 16:
        raise KernelError("the router's bias does not lie on a multiple of 16 bytes")
    if params.experts_per_token > MAX_CHOSEN:
        raise KernelError(f"{params.experts_per_token} experts for a token: at most {MAX_CHOSEN} are supported")
    if params.topk_group * count // groups < params.experts_per_token:
        raise KernelError(f"{params.topk_group} groups of {count // groups} experts: too few for a token's choices")


def _selection(logits: Tensor, params: MoeParams, to: Routing) -> list[Argument]:
    """Arguments of a selection from logits [parts, ROW_TILE, E]."""
    args = [logits, params.bias, to.experts, to.weights, to.plan, logits.shape[2], params.n_group, params.topk_group]
    return [*args, params.experts_per_token, float(params.scale), (logits.shape[0] - 1) * logits.stride(0)]


def _named(name: str, rows: int) -> str:
    """Kernels come for one and for two tiles of eight tokens; both give a row the same bits."""
    return f"{name}_{8 if rows <= 8 else 16}"


def _threads(width: int) -> int:
    return -(-width // 256) * 32


def _width(what: str, size: int, most: int = 1 << 30) -> int:
    if size % 8 or size > most:
        raise KernelError(
            f"{what} {size}: the kernels need a multiple of 8" + (f" up to {most}" if size > most else "")
        )
    return size
