"""The engine door. Front ends know ids and events, never tensors; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ling_local.types import StepResult, TokenRequest


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a loaded engine is. drafter is "off", "mtp" or "dspark"; block is its drafts per step (0: none).

    device_name  a GPU's own name, "" for a CPU; device_ids: what the driver's tools know it by, and other ranks' GPUs
    torch    version of the torch that computes, "" where there is none
    state_bytes  what the state for `context_limit` tokens takes; free_bytes: what was free before the load on
             a GPU, the fullest of several
    marks    what makes this no ordinary run of an ordinary model, for every report: dummy weights, forced accepts
    forced   accept counts that are forced, step by step and again; () where the drafts decide
    engine   "native", or another engine with its version, as "sglang 0.5.23"
    """

    model: str
    dtype: str
    device: str
    context_limit: int
    vocab_size: int
    ranks: int = 1
    drafter: str = "off"
    block: int = 0
    parameters: int = 0
    weight_bytes: int = 0
    torch: str = ""
    state_bytes: int = 0
    free_bytes: int = 0
    marks: tuple[str, ...] = ()
    forced: tuple[int, ...] = ()
    device_name: str = ""
    device_ids: tuple[str, ...] = ()
    engine: str = "native"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a load is. done and total are bytes, or pieces of work where `unit` names them.

    say  "note" or "warning": `stage` is a sentence that stays on the screen, and there is no share
    """

    stage: str
    done: int = 0
    total: int = 0
    unit: str = "bytes"
    say: str = ""


ProgressFn = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Dummy:
    """A published shape with random weights in place of a checkpoint, for measurements.

    shape    "tiny" or "flash"
    layers   cut to so many, 0 for all
    shard    one rank's part of so many, nothing exchanged
    settled  every token goes to the same experts, so that another rounding stays a small change: with random routing it
             changes who computes what, and 24 layers later the logits have nothing in common
    """

    shape: str
    layers: int = 0
    shard: int = 1
    settled: bool = False


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What to open. Complete: defaults are resolved before it is made.

    model    a checkpoint folder; for engine "scripted", the script file
    engine   "native", "sglang", or "scripted" (tests)
    device   "cpu" or "cuda"; dtype "float32" or "bfloat16"
    draft    "off", "auto", "mtp" or "dspark"; block: drafts per step, 0 for the drafter's own
    context  tokens to hold at most, 0 for the model's own limit, or on a GPU for what fits
    gpus     numbers of the GPUs to use, a rank each; (): as many as the model needs
    ranks    ranks on a CPU, 0 for one: what several GPUs do, to try it where there are none
    dummy    random weights in place of `model`, which is then only a name
    accept   accept counts to force, step by step and again (measurements); () lets the drafts decide
    passed   for engine "sglang": its own flags as KEY=VALUE
    """

    model: str
    engine: str = "native"
    device: str = "cpu"
    dtype: str = "float32"
    draft: str = "auto"
    block: int = 0
    context: int = 0
    threads: int = 0
    gpus: tuple[int, ...] = ()
    ranks: int = 0
    dummy: Dummy | None = None
    accept: tuple[int, ...] = ()
    passed: tuple[str, ...] = ()


class Generation(Protocol):
    """One running request. Iterating yields a StepResult a step; the last one has `finish` set."""

    def __iter__(self) -> Iterator[StepResult]: ...

    def cancel(self) -> None:
        """End within a step. From any thread, any time, any number of times."""


class Engine(Protocol):
    """Something that continues ids. One generation at a time; EngineBusy otherwise."""

    @property
    def info(self) -> EngineInfo: ...

    def generate(self, request: TokenRequest) -> Generation:
        """Check the request and start it. Raises UsageError, ContextTooLong or EngineBusy before work."""
        ...

    def close(self) -> None:
        """Release everything. Idempotent; memory is free when it returns."""
