"""What the router's and selection's kernels take, and what they can."""

from __future__ import annotations

import torch
from torch import Tensor

from ling_kernels.cuda.driver import Argument
from ling_kernels.ops import ROW_TILE, KernelError, MoeParams, Routing

MAX_EXPERTS, MAX_CHOSEN = 512, 8  # as in select.cuh
MAX_SLOTS = ROW_TILE * MAX_CHOSEN + 1
CHOOSING = 128  # experts of which a lane has four where gate_up chooses; of more it has sixteen
PLAN_IDS, PLAN_MASKS, PLAN_WEIGHTS = 4, 4 + MAX_SLOTS, 4 + 2 * MAX_SLOTS + 2
PLAN_WORDS = PLAN_WEIGHTS + MAX_SLOTS * ROW_TILE


def gate_parts(gate: Tensor) -> Tensor:
    """fp32 [E, D] as bf16 [E, 3 D'], D' rounded up to a chunk: high, middle and low 8 bits of each significand."""
    padded = torch.nn.functional.pad(gate, (0, -gate.shape[1] % 32))
    parts = []
    for _ in range(3):
        parts.append(padded.bfloat16())
        padded = padded - parts[-1].float()
    return torch.cat(parts, dim=1).contiguous()


def check_router(params: MoeParams) -> None:
    """KernelError where the kernels do not know such a router."""
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


def selection(logits: Tensor, params: MoeParams, to: Routing) -> list[Argument]:
    """Arguments of a selection from logits [parts, ROW_TILE, E]."""
    args = [logits, params.bias, to.experts, to.weights, to.plan, logits.shape[2], params.n_group, params.topk_group]
    return [*args, params.experts_per_token, float(params.scale), (logits.shape[0] - 1) * logits.stride(0)]
