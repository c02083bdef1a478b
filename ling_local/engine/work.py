"""What each rank does to its states when rank 0 decides so: the deeds of an engine, without a decision among them.

All ranks call these methods alike and in the same order. With one rank they are simply the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ling_kernels.ops import Ops
from ling_local.engine.drafter import Drafter
from ling_local.engine.follow import told
from ling_local.engine.forced import Forced
from ling_local.engine.gpu import HostRing
from ling_local.engine.model import forward
from ling_local.engine.protocol import EngineInfo
from ling_local.engine.shard import rank_config
from ling_local.engine.state import SequenceState, Snapshot
from ling_local.engine.weights import Weights
from ling_local.types import SamplingParams

KEPT_SNAPSHOTS = 8


class RankWork:
    """A rank's weights and ops, and the state of the one sequence."""

    weights: Weights
    drafter: Drafter | None
    ops: Ops
    vocab: int
    step: Callable[..., None]
    _info: EngineInfo
    _state: SequenceState | None
    _host_ring: HostRing | None
    _snapshots: list[Snapshot]

    def new_state(self, context: int) -> SequenceState:
        """An empty state for `context` tokens."""
        config = rank_config(self.weights.config, self.weights.shard.size)
        state = SequenceState(config, context, self.weights.dtype, self._info.device, self.vocab)
        if self.drafter:
            self.drafter.attach(state, self.weights)
        return state

    def check_peers(self) -> None:
        """Raise ExchangeTimeout where a step of this rank has waited for another in vain."""
        if self._info.ranks > 1:
            with told():
                self.ops.exchange.check()

    @torch.inference_mode()
    def _score(self, ids: Sequence[int], chunk: int, window: int) -> Tensor:
        """See `NativeEngine.score`."""
        state = self.new_state(len(ids))
        logits = []
        for start in range(0, len(ids), window or chunk):
            part = ids[start : start + (window or chunk)]
            if window:
                logits.append(self._verify_all(state, start, part))
            else:
                following = ids[start + 1 : start + len(part) + 1] or [0]
                hidden = self._prefill(state, start, part, (*following, 0)[: len(part)])
                logits.append(self._whole(self.ops.head(hidden, self.weights.lm_head)))
        return torch.cat(logits)

    def _verify_all(self, state: SequenceState, start: int, ids: Sequence[int]) -> Tensor:
        """Logits of a window of known tokens, then commit them all."""
        rows = len(ids)
        state.reserve(start + rows)
        known = self._tensor(ids)
        state.anchor.copy_(known[0])
        state.drafts[: rows - 1].copy_(known[1:])
        state.stand_at(start)
        window = state.window(rows)
        hidden = forward(self.ops, self.weights, state, window.ids, window.positions, rows)
        self.ops.kda_commit(hidden.staged, state.conv, state.recurrent, torch.full_like(state.length, rows))
        return self._whole(self.ops.head(hidden.last, self.weights.lm_head, rows)[:rows])

    def _whole(self, logits: Tensor) -> Tensor:
        """Logits of the whole vocabulary from this rank's."""
        return self.ops.whole(logits) if self._info.ranks > 1 else logits

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._info.device)

    def _prefill(self, state: SequenceState, start: int, ids: Sequence[int], following: Sequence[int]) -> Tensor:
        """Put ids into the state at positions start.. and return their final hidden rows [n, D].

        following: the token after each of them.
        """
        state.reserve(start + len(ids))
        positions = torch.arange(start, start + len(ids), device=self._info.device)
        taps = self.drafter.taps if self.drafter else ()
        hidden = forward(self.ops, self.weights, state, self._tensor(ids), positions, None, taps)
        if self.drafter:
            self.drafter.absorb(self.ops, self.weights, state, hidden, self._tensor(following), positions, None)
        return hidden.last

    def _feed(self, start: int, ids: Sequence[int], following: Sequence[int]) -> None:
        """Prefill a chunk into the state of the sequence."""
        with torch.inference_mode():
            self._prefill(self._state, start, ids, following)

    def _return_to(self, best: int | None, kept: list[int]) -> None:
        """The state back to a snapshot, -1: to nothing, None: it stays; then keep those snapshots alone."""
        if best is not None:
            self._state.rewind() if best < 0 else self._state.restore(self._snapshots[best])
        self._snapshots = [self._snapshots[i] for i in kept]

    def _snapshot(self, ids: list[int]) -> None:
        """Keep the state as it stands, after `ids`."""
        self._snapshots = [*self._snapshots, self._state.snapshot(ids)][-KEPT_SNAPSHOTS:]

    def _begin(self, length: int, anchor: int, remaining: int, stop_ids: list[int], params: SamplingParams) -> None:
        """Set the state's words for a request."""
        self._state.begin(length, anchor, remaining, stop_ids, params)

    def _clear(self) -> None:
        """Empty state, no snapshots."""
        self._state.clear()
        self._snapshots.clear()

    def _learn(self, ids: Sequence[int]) -> None:
        """Tell a drafter of forced accept counts what the target says."""
        if isinstance(self.drafter, Forced):
            self.drafter.learn(self._state, ids)

    def _launch(self, number: int, width: int, following: int, reach: int) -> None:
        """Launch step `number`; on a GPU its ring entry is sent to the host behind it. reach: as `reserve` takes it."""
        self._state.reserve(reach)
        if self._host_ring:
            self._host_ring.begin(number)
        with torch.inference_mode():
            self.step(self.ops, self.weights, self._state, self.drafter, width, following)
        if self._host_ring:
            self._host_ring.send(self._state.ring, number)
