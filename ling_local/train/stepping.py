"""What both training loops do alike: a step in a CUDA graph, learning rate, pace, saved state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from ling_local.errors import EngineError
from ling_local.train.optim import Optimizer


def check_device(device: str) -> None:
    """Raises EngineError for a device that is not there."""
    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError("torch finds no CUDA device", "give --device cpu, or run on a machine with a GPU")


def compiler() -> Callable[[Callable], Callable]:
    """Compiles each region once: its callers then share the code."""
    return functools.cache(lambda function: torch.compile(function, dynamic=False))


class Schedule(Protocol):
    """The part of a plan that the rate follows from: rate at its peak, steps of warm-up, share that stays flat."""

    rate: float
    warmup: int
    flat: float


def schedule(plan: Schedule, step: int, done: float) -> float:
    """Learning rate: warm-up by step, flat, then linear to zero as `done` goes to 1."""
    fall = min(1.0, (1.0 - done) / (1.0 - plan.flat))
    return plan.rate * min(1.0, (step + 1) / plan.warmup) * max(fall, 0.0)


class Pace:
    """Keeps the host at most one step ahead of the device, so that clock and schedule mean something."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def mark(self) -> None:
        if self.event is not None:
            self.event.record()


class Trained(Protocol):
    """What a step trains."""

    params: Mapping[str, Tensor]
    optimizer: Optimizer


def save_state(trained: Trained, plan: Any, folder: Path, number: int, spent: float, **more: Any) -> None:
    """Write folder/state.pt, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "plan": asdict(plan),
        "step": number,
        "spent_s": spent,
        "params": {name: value.detach() for name, value in trained.params.items()},
        "optimizer": trained.optimizer.state(),
        **more,
    }
    torch.save(state, folder / "state.tmp")
    (folder / "state.tmp").replace(folder / "state.pt")


def load_state(
    trained: Trained, plan: Any, folder: Path, same: tuple[str, ...], device: torch.device
) -> dict[str, Any]:
    """Take in what save_state wrote, and return it. Raises EngineError if there is none, or it is of a plan that
    differs in one of the names of `same`."""
    path = folder / "state.pt"
    if not path.exists():
        raise EngineError(f"{path}: nothing to resume from", "start without --resume")
    state = torch.load(path, map_location=device, weights_only=True)
    if any(state["plan"][name] != getattr(plan, name) for name in same):
        raise EngineError(f"{path} is of another plan: {state['plan']}", "give the same flags as for the first start")
    with torch.no_grad():
        for name, value in trained.params.items():
            value.copy_(state["params"][name])
    trained.optimizer.load_state(state["optimizer"])
    return state


class Replayed:
    """A body without arguments or result: it reads and writes tensors that stay where they are.

    On CUDA the first calls run eagerly on a side stream, so that libraries set themselves up and memory is there;
    then it is captured once and replayed. Every call does the work once.
    """

    WARM_CALLS = 3

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
