"""Router and experts of a window on a GPU."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ling_kernels.cuda.ahead import AheadOps
from ling_kernels.cuda.checks import check_rows, check_width, named
from ling_kernels.cuda.driver import Ahead, Argument, Device
from ling_kernels.cuda.prefill import prefill_experts
from ling_kernels.cuda.tiles import (
    PAIRS,
    ROUTER_PARTS,
    expert_memory,
    rows_of_down,
    sums_bytes,
    warps_for_router,
    warps_of,
)
from ling_kernels.ops import ROW_TILE, KernelError, MoeParams, Routing
from ling_kernels.reference import moe as reference

MAX_EXPERTS, MAX_CHOSEN = 512, 8  # as in select.cuh
LIST_WORDS = 2 * ROW_TILE * MAX_CHOSEN
SELECT_THREADS = 32 * ROW_TILE


class WindowRouting:
    """What `route` leaves for a window: router logits, from which the experts' kernels choose by themselves.

    `experts`, `weights` as in `Routing`, made by a kernel when one of them is first read. logits fp32 [ROUTER_PARTS,
    ROW_TILE, E], to be added over parts. lists: what was chosen in the kernels' form, once it has been asked for.
    """

    def __init__(self, ops: ExpertOps, logits: Tensor, params: MoeParams, rows: int) -> None:
        self.ops, self.logits, self.params, self.rows = ops, logits, params, rows
        self.lists: Tensor | None = None
        self._chosen: tuple[Tensor, Tensor] | None = None

    @property
    def experts(self) -> Tensor:
        return self.select()[0]

    @property
    def weights(self) -> Tensor:
        return self.select()[1]

    def select(self) -> tuple[Tensor, Tensor]:
        """Experts and weights; launches the kernel the first time."""
        if self._chosen is None:
            device, chosen = self.logits.device, self.params.experts_per_token
            experts = torch.empty(ROW_TILE, chosen, dtype=torch.int64, device=device)
            weights = torch.empty(ROW_TILE, chosen, dtype=torch.float32, device=device)
            lists = torch.empty(LIST_WORDS, dtype=torch.int32, device=device)
            args = [self.logits, self.params.bias, experts, weights, lists, *self._numbers()]
            self.ops.device.launch("route_select", 1, SELECT_THREADS, args)
            self._chosen, self.lists = (experts, weights), lists
        return self._chosen

    def arguments(self) -> list[Argument]:
        """Of the experts' kernels."""
        return [self.logits, self.params.bias, self.lists, *self._numbers()]

    def _numbers(self) -> list[int | float]:
        params = self.params
        sizes = [params.gate.shape[0], params.n_group, params.topk_group]
        return [*sizes, params.experts_per_token, float(params.scale), self.rows]


class ExpertOps(AheadOps):
    """Contracts in `ling_kernels.ops.Ops`. gate_fp32: keep the router's weights in fp32 instead of bf16.

    Switches for measurements, none of which changes a bit: select_apart: choose experts in a kernel of its own, not in
    each block of gate_up and down; first_to_go: experts' weights leave L2 before everything else; ahead_in_down: which
    kernel asks for what comes after, gate_up while it waits for the router, or down at the end of its stream;
    gate_depth, down_depth: batches of chunks that a warp has on its way, at most.
    """

    device: Device
    select_apart = False
    first_to_go = False
    ahead_in_down = True
    gate_depth = 4
    down_depth = 10

    def __init__(self, device: Device, gate_fp32: bool = False) -> None:
        self.device = device
        self.gate_fp32 = gate_fp32
        self._gates: dict[int, tuple[Tensor, Tensor]] = {}

    def ahead(self, *tensors: Tensor | None) -> None:
        """A router's weight stands for the form of it that the kernel reads, if there is one yet."""
        known = [self._gates.get(t.data_ptr(), (t, t))[1] for t in tensors if t is not None]
        super().ahead(*known)

    def route(self, h: Tensor, params: MoeParams, rows: int | None = None) -> Routing | WindowRouting:
        if rows is None:
            gate = params.gate if self.gate_fp32 else params.gate.bfloat16().float()
            return reference.route(h, replace(params, gate=gate))
        check_rows(h, rows)
        _check_router(params)
        gate, count, width = self._gate(params.gate), params.gate.shape[0], h.shape[1]
        check_width("width of a router", width)
        wide = gate.shape[1]
        warps = warps_for_router(wide)
        logits = torch.empty(ROUTER_PARTS, ROW_TILE, count, dtype=torch.float32, device=h.device)
        args = [h, gate, logits, rows, count, width, wide]
        blocks = -(-count // 16) * ROUTER_PARTS
        self.device.launch(named("router", rows), blocks, warps * 32, args, sums_bytes(warps, rows, 1))
        routing = WindowRouting(self, logits, params, rows)
        if self.select_apart:
            routing.select()
        return routing

    def experts(self, h: Tensor, routing: Routing | WindowRouting, params: MoeParams, rows: int | None) -> Tensor:
        if rows is None:
            return prefill_experts(self.device, h, routing, params)
        check_rows(h, rows)
        ours = routing if isinstance(routing, WindowRouting) else self._listed(routing, params, rows)
        width, inner, shared = h.shape[1], params.down.shape[2], params.shared.down.shape[1]
        for size in (width, inner, shared):
            check_width("size of an expert", size)
        pitch = max(inner, shared)
        most = min(params.gate.shape[0], rows * params.experts_per_token)
        mid = h.new_empty(most + 1, ROW_TILE, pitch)
        out = torch.empty_like(h)
        properties = self.device.properties
        per = rows_of_down(width, properties.num_sms)
        gate_warps, down_warps = warps_of((width,)), warps_of((shared, inner))
        memory = expert_memory(properties, gate_warps, down_warps, width, per, rows, (self.gate_depth, self.down_depth))
        asked, nothing = self.hint(), Ahead()
        args = [h, params.shared.gate_up, params.gate_up, *ours.arguments(), mid, shared, inner, pitch]
        args += [float(params.limit), float(params.shared.limit), width, memory.gate_depth, memory.local]
        args += [self.first_to_go, nothing if self.ahead_in_down else asked]
        blocks = max(properties.num_sms, -(-shared // PAIRS))
        self.device.launch(named("experts_gate_up", rows), blocks, gate_warps * 32, args, memory.gate_bytes)
        args = [mid, params.shared.down, params.down, *ours.arguments(), out, shared, inner, pitch, width, per]
        args += [memory.down_depth, self.first_to_go, asked if self.ahead_in_down else nothing]
        blocks = -(-width // per)
        self.device.launch(named("experts_down", rows), blocks, down_warps * 32, args, memory.down_bytes)
        return out

    def _listed(self, routing: Routing, params: MoeParams, rows: int) -> WindowRouting:
        """A routing that was made elsewhere. Its kernel also stands between gate_up, which reads rows before it waits,
        and whoever wrote them."""
        chosen = routing.experts.shape[1]
        if chosen > MAX_CHOSEN:
            raise KernelError(f"{chosen} experts for a token: at most {MAX_CHOSEN} are supported")
        device = routing.experts.device
        made = WindowRouting(self, torch.empty(1, device=device), params, rows)
        made.lists = torch.empty(LIST_WORDS, dtype=torch.int32, device=device)
        self.device.launch(
            "route_lists", 1, SELECT_THREADS, [routing.experts, routing.weights, made.lists, chosen, rows]
        )
        return made

    def _gate(self, gate: Tensor) -> Tensor:
        """The router's weight as the kernel takes it, made at first use and kept: bf16 [E, D], or, for fp32, three bf16
        parts side by side whose sum is the fp32 value (each product of bf16 numbers is exact in the fp32 sum)."""
        key = gate.data_ptr()
        if key not in self._gates:
            made = _parts(gate.float()) if self.gate_fp32 else gate.bfloat16()
            self._gates[key] = (gate, made)  # with the original, so that its address is not given to another
        return self._gates[key][1]


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
    if count > MAX_EXPERTS or count % groups or groups & (groups - 1) or groups > 32:
        raise KernelError(f"{count} experts in {groups} groups: at most {MAX_EXPERTS}, in 1, 2, 4 .. 32 equal groups")
    if params.experts_per_token > MAX_CHOSEN:
        raise KernelError(f"{params.experts_per_token} experts for a token: at most {MAX_CHOSEN} are supported")
