"""Router and experts (ling3-model.md sections 4.3 to 4.6)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ling_kernels.ops import MoeParams, Routing
from ling_kernels.reference.dense import by_pieces, linear, mlp, swiglu

# Up to this many experts all of them are computed for every row and the unchosen dropped: on a CPU that costs less
# than gathering weights. It depends on the model only, never on the rows, so it cannot change a row's bits.
ALL_EXPERTS = 32


def route(h: Tensor, params: MoeParams, rows: int | None = None, lazy: bool = False) -> Routing:
    num, experts = h.shape[0], params.gate.shape[0]
    scores = torch.sigmoid(linear(h.float(), params.gate, rows))
    choice = scores + params.bias
    group_score = choice.view(num, params.n_group, -1).topk(2, dim=-1).values.sum(-1)
    best = _first(group_score, params.topk_group)
    allowed = torch.zeros_like(group_score, dtype=torch.bool).scatter_(1, best, True)
    allowed = allowed.repeat_interleave(experts // params.n_group, dim=1)
    chosen = _first(choice.masked_fill(~allowed, -torch.inf), params.experts_per_token)
    weights = scores.gather(1, chosen)
    return Routing(chosen, weights / (weights.sum(-1, keepdim=True) + 1e-20) * params.scale)


def _first(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of each row; equal values: the lower index first (topk promises no order)."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def experts(h: Tensor, routing: Routing, params: MoeParams, rows: int | None) -> Tensor:
    if params.gate.shape[0] <= ALL_EXPERTS:
        routed = _all(h, routing, params, rows)
    elif rows is None:
        routed = _grouped(h, routing, params)
    else:
        routed = _gathered(h, routing, params, rows)
    return (routed + mlp(h, params.shared, rows).float()).to(h.dtype)


def _all(h: Tensor, routing: Routing, params: MoeParams, rows: int | None) -> Tensor:
    """Every expert for every row, the unchosen dropped by selection: a product with zero would keep a NaN."""
    num, (count, width, _) = h.shape[0], params.gate_up.shape
    table = torch.zeros(num, count, 1, device=h.device)
    table.scatter_(1, routing.experts.unsqueeze(-1), routing.weights.unsqueeze(-1))
    inner = swiglu(linear(h, params.gate_up.flatten(0, 1), rows).view(num, count, width), params.limit)
    inner = torch.where(table != 0, inner * table, 0.0).to(h.dtype)
    return by_pieces(lambda part: torch.bmm(part.transpose(0, 1), params.down.mT).float().sum(0), inner, rows)


def _gathered(h: Tensor, routing: Routing, params: MoeParams, rows: int) -> Tensor:
    """The chosen experts' weights, copied row by row; the shapes are those of one row whatever the window."""
    out = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
    for row in range(rows):
        chosen = routing.experts[row]
        gate_up = params.gate_up.index_select(0, chosen)
        inner = swiglu((gate_up @ h[row]), params.limit) * routing.weights[row].unsqueeze(-1)
        down = params.down.index_select(0, chosen)
        out[row] = torch.bmm(down, inner.to(h.dtype).unsqueeze(-1)).float().sum(0)[:, 0]
    return out


def _grouped(h: Tensor, routing: Routing, params: MoeParams) -> Tensor:
    """Expert by expert over the rows that chose it. Reads the routing on the host: prefill only."""
    out = torch.zeros(h.shape, dtype=torch.float32, device=h.device)
    for expert in routing.experts.unique().tolist():
        row, slot = (routing.experts == expert).nonzero(as_tuple=True)
        inner = swiglu(F.linear(h[row], params.gate_up[expert]), params.limit)
        inner = inner * routing.weights[row, slot].unsqueeze(-1)
        out.index_add_(0, row, F.linear(inner.to(h.dtype), params.down[expert]).float())
    return out
