"""Runs a function on static tensors, from a CUDA graph where there is a GPU and eagerly elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Replayed:
    """A body without arguments or result: it reads and writes tensors that stay where they are.

    On CUDA the first calls run eagerly on a side stream, so that libraries set themselves up and memory is there;
    then it is captured once and replayed. Every call does the work once.
    """

    WARM_CALLS = 2

    def __init__(self, body: Callable[[], None], device: torch.device, graph: bool = True) -> None:
        self.body = body
        self.graph = graph and device.type == "cuda"
        self.calls = 0
        self.captured: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if not self.graph:
            self.body()
        elif self.captured is not None:
            self.captured.replay()
        elif self.calls < self.WARM_CALLS:
            self._run_aside()
        else:
            torch.cuda.synchronize()
            self.captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.captured):
                self.body()
            self.captured.replay()
        self.calls += 1

    def _run_aside(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.body()
        torch.cuda.current_stream().wait_stream(side)
