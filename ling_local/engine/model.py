"""One walk over the layers, for prefill and verify alike (ling3-model.md section 4)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ling_kernels.ops import KdaParams, KdaStaged, Limits, MoeParams, Ops
from ling_local.engine.state import SequenceState
from ling_local.engine.weights import LayerWeights, Weights


class Hidden(NamedTuple):
    """last [R, D]: after the final norm, the head's input; staged: per KDA layer, empty after a prefill; taps: the
    residual stream [R, D] after each layer that was asked for."""

    last: Tensor
    staged: list[KdaStaged]
    taps: list[Tensor]


def forward(
    ops: Ops,
    weights: Weights,
    state: SequenceState,
    ids: Tensor,
    positions: Tensor,
    rows: int | None,
    tapped: tuple[int, ...] = (),
    limits: Limits | None = None,
) -> Hidden:
    """Run ids [R] at positions [R] through the model.

    rows None: a prefill chunk; KDA states and conv history advance by all R rows. Otherwise a window with `rows`
    live rows: they stay as they are, but for what `limits` of a step permit (see `Ops.kda_verify`), and what a commit
    needs is returned. Latent rows are written either way. tapped: layers whose output is wanted, -1 for the embedding.
    """
    eps = weights.config.rms_norm_eps
    staged: list[KdaStaged] = []
    taps: list[Tensor] = []
    kda = mla = 0
    partial, x = None, ops.embed(ids, weights.embedding, lazy=True)
    for number, layer in enumerate(weights.layers):
        x, h = ops.exchange_norm(partial, x, layer.attention_norm, eps, rows, lazy=True)
        if number - 1 in tapped:
            taps.append(x)
        proj = ops.linear(h, layer.attention.in_proj, rows)
        if isinstance(layer.attention, KdaParams):
            o = _kda(ops, proj, state, layer, kda, rows, staged, limits)
            kda += 1
        else:
            live = ids.shape[0] if rows is None else rows
            o = ops.mla(proj, state.latent[mla], state.rope, positions, layer.attention, live, state.extent)
            mla += 1
        partial = ops.linear_partial(o, layer.attention.out_proj, rows)
        x, partial = feed_forward(ops, partial, x, layer, eps, rows)
    x, last = ops.exchange_norm(partial, x, weights.norm, eps, rows)
    if len(weights.layers) - 1 in tapped:
        taps.append(x)
    return Hidden(last, staged, taps)


def _kda(
    ops: Ops,
    proj: Tensor,
    state: SequenceState,
    layer: LayerWeights,
    index: int,
    rows: int | None,
    staged: list[KdaStaged],
    limits: Limits | None,
) -> Tensor:
    conv, recurrent = state.conv[index], state.recurrent[index]
    if rows is None:
        return ops.kda_prefill(proj, conv, recurrent, layer.attention)
    o, kept = ops.kda_verify(proj, conv, recurrent, layer.attention, rows, limits=limits)
    staged.append(kept)
    return o


def feed_forward(
    ops: Ops, partial: Tensor, x: Tensor, layer: LayerWeights, eps: float, rows: int | None
) -> tuple[Tensor, Tensor]:
    """Norm, and dense MLP or experts, after attention's partial: the residual stream [R, D] and the next partial."""
    routed = isinstance(layer.mlp, MoeParams)
    x, h = ops.exchange_norm(partial, x, layer.mlp_norm, eps, rows, lazy=routed)
    if routed:
        return x, ops.experts(h, ops.route(h, layer.mlp, rows, lazy=True), layer.mlp, rows)
    return x, ops.mlp(h, layer.mlp, rows)
