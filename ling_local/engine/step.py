"""The one decode step. Touches device tensors only; `width` and `following` are the numbers that the host gives."""

from __future__ import annotations

from ling_kernels.ops import Ops, Verdict
from ling_local.engine.drafter import Drafter
from ling_local.engine.model import Hidden, forward
from ling_local.engine.state import SequenceState, Window
from ling_local.engine.weights import Weights


def step(ops: Ops, weights: Weights, state: SequenceState, drafter: Drafter | None, width: int, following: int) -> None:
    """Verify the anchor and width - 1 drafts, commit 1..width tokens, write them to state.ring, and propose
    `following` drafts for the next window. After `done` nothing changes but the step number.

    Plain decode is width 1: the target's token after the anchor is the bonus token. Drafts are proposed at the end
    of a step, not at the head of the next, so that the ring entry tells how sure they are before the host grants
    the window that verifies them.
    """
    window = state.window(width)
    taps = drafter.taps if drafter else ()
    hidden = forward(ops, weights, state, window.ids, window.positions, width, taps, state.limits)
    logits = ops.head(hidden.last, weights.lm_head, width)
    verdict = ops.verdict(logits, window.drafts, window.positions, state.sampling, state.limits, width)
    commit(ops, weights, state, drafter, window, hidden, verdict)
    if drafter and following:
        state.expect(ops, drafter.propose(ops, weights, state, following))


def commit(
    ops: Ops,
    weights: Weights,
    state: SequenceState,
    drafter: Drafter | None,
    window: Window,
    hidden: Hidden,
    verdict: Verdict,
) -> None:
    """Advance everything by the rows that the verdict kept: exactly what one-row steps would have left."""
    ops.kda_commit(hidden.staged, state.conv, state.recurrent, verdict.count, lazy=True)
    if drafter:
        drafter.absorb(ops, weights, state, hidden, verdict.following, window.positions, window.rows)
        drafter.settle(state, verdict.count)
    state.advance(ops, verdict)
