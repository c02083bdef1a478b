"""The decode step behind CUDA graphs: the same function, launched as a whole. Knows nothing of layers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ling_kernels.ops import Ops
from ling_local.engine.drafter import Drafter
from ling_local.engine.state import SequenceState
from ling_local.engine.weights import Weights

StepFn = Callable[[Ops, Weights, SequenceState, Drafter | None, int, int], None]


class CapturedStep:
    """`step` with the signature of `step`: one graph for each (width, following, greedy), captured at first use.

    Bound to the state, weights and drafter that it first sees, whose tensors never move; others get graphs of their own
    in place of these. The graphs share one memory pool: no replay reads what another left there.
    """

    def __init__(self, step: StepFn) -> None:
        self._step = step
        self._graphs: dict[tuple[int, int, bool], torch.cuda.CUDAGraph] = {}
        self._bound: tuple[object, ...] = ()
        self._pool: object = None

    def __call__(
        self, ops: Ops, weights: Weights, state: SequenceState, drafter: Drafter | None, width: int, following: int
    ) -> None:
        bound = (ops, weights, state, drafter)
        if len(self._bound) != len(bound) or any(a is not b for a, b in zip(self._bound, bound, strict=True)):
            self.close()
            self._bound = bound
        key = (width, following, state.sampling.greedy)
        if key not in self._graphs:
            self._graphs[key] = self._capture(lambda: self._step(*bound, width, following), state)
        self._graphs[key].replay()

    def _capture(self, run: Callable[[], None], state: SequenceState) -> torch.cuda.CUDAGraph:
        """One warm-up, which compiles, allocates scratch and leaves the state as it was; then the capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # once done, a step changes only these and rows past the end, which are written again before they are read
            words = (state.done, state.step, state.ring, state.drafts)
            kept = [word.clone() for word in words]
            state.done.fill_(True)
            run()
            for word, value in zip(words, kept, strict=True):
                word.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # other threads (NCCL's, where ranks exchange over it) may ask CUDA things meanwhile
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph

    def close(self) -> None:
        """Drop the graphs and their memory."""
        self._graphs.clear()
        self._bound = ()
        self._pool = None
