"""The one decode step. Touches device tensors only; the window's width is the one number the host gives."""

from __future__ import annotations

from ling_kernels.ops import KdaStaged, Ops, Verdict
from ling_local.engine.model import forward
from ling_local.engine.state import SequenceState
from ling_local.engine.weights import Weights


def step(ops: Ops, weights: Weights, state: SequenceState, width: int) -> None:
    """Commit 1..width tokens and write them to state.ring. After `done` nothing changes but the step number.

    Plain decode is width 1: the anchor alone is verified and the target's token after it is the bonus token.
    """
    window = state.window(None, width)
    hidden = forward(ops, weights, state, window.ids, window.positions, window.rows)
    logits = ops.head(hidden.last, weights.lm_head)
    verdict = ops.verdict(logits, window.drafts, window.positions, state.sampling, state.limits, width)
    commit(ops, state, hidden.staged, verdict)


def commit(ops: Ops, state: SequenceState, staged: list[KdaStaged], verdict: Verdict) -> None:
    """Advance the state by the rows that the verdict kept: exactly what one-row steps would have left."""
    ops.kda_commit(staged, state.conv, state.recurrent, verdict.count)
    state.advance(verdict)
