"""A decode step of a dummy model op by op: `python -m ling_local.engine.breakdown JSON`, started by bench/breakdown.py.

One eager step is recorded: every op that it calls, with its arguments. Then each kind of op is captured in a graph,
once for each of its calls in the step, with the weights of all layers, and replayed. Bytes are what an op must read
and write at least, counted from its arguments and, for experts, from the routing that happened.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import ling_local.engine.timing as timing
from ling_kernels.ops import Ops
from ling_local.engine.memory import bytes_of
from ling_local.engine.native import NativeEngine
from ling_local.engine.protocol import Dummy, EngineSpec
from ling_local.engine.step import step
from ling_local.errors import LingError, UsageError
from ling_local.types import SamplingParams

ROOM = 4096  # tokens that the timed steps may append
SERIES = 10  # steps in one timed run
# what these read is in L2 in a real step too, or too little to matter
HOT = {"embed", "exchange_norm", "verdict", "pick", "window", "expect"}
# ops that may leave all their work to a later one (lazy, see `Ops`), and which that is
LEFT_TO = {"embed": ("exchange_norm",), "exchange_norm": ("linear", "route"), "kda_commit": ("advance",)}


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an op, and what the ops object held before it (a product may use what another op left)."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    held: dict[str, Any]
    launches: int
    result: Any


class Recorder:
    """The ops, with a record of their calls."""

    def __init__(self, ops: Ops) -> None:
        self.ops = ops
        self.calls: list[Call] = []
        self._launched = 0
        device = getattr(ops, "device", None)
        if device is not None:
            plain = device.launch
            device.launch = lambda *args, **kwargs: (self._count(), plain(*args, **kwargs))[1]
        self._device = device

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.ops, name)
        return self._recorded(name, found) if callable(found) and not name.startswith("_") else found

    def close(self) -> None:
        """Launches are counted no longer."""
        if self._device is not None:
            del self._device.launch

    def _count(self) -> None:
        self._launched += 1

    def _recorded(self, name: str, op: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            held, before = dict(vars(self.ops)), self._launched
            result = op(*args, **kwargs)
            launches = self._launched - before if self._device is not None else 1
            self.calls.append(Call(name, args, kwargs, held, launches, result))
            return result

        return call


@dataclass(slots=True)
class Row:
    """All calls of one kind of op in a step. share: of the copy bandwidth; cold: weights come from memory."""

    op: str
    calls: int = 0
    launches: int = 0
    bytes: float = 0.0
    microseconds: float = 0.0
    share: float = 0.0
    floor_us: float = 0.0
    cold: bool = False
    of: list[Call] = field(default_factory=list)

    def rated(self, bandwidth: float) -> dict[str, Any]:
        """As a document, with share and floor."""
        self.floor_us = 1e6 * self.bytes / bandwidth
        self.share = self.floor_us / self.microseconds if self.microseconds else 0.0
        document = {name: getattr(self, name) for name in self.__slots__}
        del document["of"]
        return document


def label(call: Call) -> str:
    """What the calls of one kind have in common."""
    if call.name in ("linear", "linear_partial", "head"):
        return f"{call.name} {call.args[1].shape[0]} x {call.args[1].shape[1]}"
    return call.name


def op_bytes(call: Call, context: int) -> float:
    """Least traffic of a call after `context` tokens: weights and state once, activations in and out."""
    args, size = call.args, 2.0
    tensors = [a for a in args if isinstance(a, Tensor) and a.is_floating_point()]
    if tensors:
        size = min(a.element_size() for a in tensors)
    match call.name:
        case "embed":
            return 2 * size * call.result.numel()
        case "exchange_norm":
            _, x, weight, _, rows = args
            return size * (4 * (rows or x.shape[0]) * x.shape[1] + weight.numel())
        case "linear" | "linear_partial" | "head":
            h, weight = args[:2]
            rows = (args[2] if len(args) > 2 else None) or h.shape[0]
            out = 4 if call.name == "head" else size
            return weight.nbytes + rows * (size * weight.shape[1] + out * weight.shape[0])
        case "kda_verify":
            proj, _, state, params, rows = args
            inner = params.num_heads * state.shape[1]
            states = 2 if call.result[1].advanced else 1  # written as well
            return states * state.nbytes + rows * (size * (proj.shape[1] + inner) + 4 * 4 * inner)
        case "kda_commit":
            if args[0] and args[0][0].advanced:
                return 2.0 * args[1].nbytes
            return 2 * args[2].nbytes + bytes_of(args[0]) / 2
        case "mla":
            _, cache, _, _, params, rows, _ = args
            weights = [params.w_uk, params.w_uv, params.q_b_proj]
            return sum(w.nbytes for w in weights if w is not None) + size * cache.shape[1] * (context + rows)
        case "mlp":
            return bytes_of(args[1]) + 2 * size * args[2] * args[0].shape[1]
        case "route":
            begun = args[1].shared.gate_up.nbytes if call.result.begun is not None else 0  # of the experts op
            return size * args[1].gate.numel() + begun + size * args[2] * args[0].shape[1]
        case "experts":
            h, routing, params, rows = args
            distinct = routing.experts[:rows].unique().numel()
            each = params.gate_up[0].nbytes + params.down[0].nbytes
            shared = bytes_of(params.shared) if routing.begun is None else params.shared.down.nbytes
            return distinct * each + shared + 2 * size * rows * h.shape[1]
        case "verdict":
            return 4.0 * args[5] * args[0].shape[1]
        case "draft_context":
            params, rows = args[1], args[5]
            kv = 2 * params.num_kv_heads * params.head_dim
            return params.fc.nbytes + sum(size * kv * layer.in_proj.shape[1] for layer in params.layers)
        case "draft_block":
            keys = args[2].nbytes * context / args[2].shape[2]
            return sum(bytes_of(layer) for layer in args[1].layers) + keys
        case "markov_pick":
            return args[0].shape[0] * args[3].markov_w2.nbytes + args[0].nbytes
        case _:
            return float(bytes_of([*args, call.result]))


def done_by(calls: list[Call], at: int) -> Call:
    """Which call does the work of one: itself, or, where it launched nothing, the later one that it was left to."""
    call = calls[at]
    if call.launches or call.name not in LEFT_TO:
        return call
    return next(later for later in calls[at + 1 :] if later.name in LEFT_TO[call.name])


def grouped(calls: list[Call], context: int) -> dict[str, Row]:
    """The calls of a step by kind, bytes where they are moved."""
    groups = {name: Row(name) for name in dict.fromkeys(map(label, calls))}
    for at, call in enumerate(calls):
        row = groups[label(call)]
        row.calls += 1
        row.launches += call.launches
        row.of.append(call)
        groups[label(done_by(calls, at))].bytes += op_bytes(call, context)
    return groups


def rows_of(calls: list[Call], ops: Ops, context: int, device: str, tell: Callable[[str], None]) -> list[Row]:
    """Group the calls of a step and time each group."""
    groups = grouped(calls, context)
    for row in groups.values():
        if not row.launches:
            continue
        tell(f"timing {row.op}")
        launches = [_again(ops, call) for call in row.of]
        if row.of[0].name in HOT:
            each = timing.launches_us(launches, device)
        elif row.bytes > timing.TIMES_L2 * timing.l2_bytes(device):
            each, row.cold = timing.launches_us(launches, device), True
        else:
            each, row.cold = timing.flushed_us(launches, device), True
        row.microseconds = each * len(launches)
    return list(groups.values())


def _again(ops: Ops, call: Call) -> Callable[[], object]:
    def run() -> object:
        vars(ops).update(call.held)
        return getattr(ops, call.name)(*call.args, **call.kwargs)

    return run


def time_step(
    engine: NativeEngine, rows: int, following: int, context: int, bandwidth: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The table of one kind of step, and the time of the step as a whole."""
    state, device = engine._state, engine.info.device

    def begin() -> None:
        state.reserve(context + ROOM)
        state.begin(context, 1, 1 << 40, [], SamplingParams(temperature=0.0))

    begin()
    tell(f"timing a step of {rows} rows")
    # without drafts the step is that of a model that has no drafter: nothing follows the kept tokens
    parts = (engine.weights, state, engine.drafter if following else None, rows, following)
    replays = timing.REPLAYS if device != "cpu" else 1
    num = SERIES if device != "cpu" else 1
    whole = timing.median_us(lambda: [engine.step(engine.ops, *parts) for _ in range(num)], device, replays) / num
    begin()
    recorder = Recorder(engine.ops)
    step(recorder, *parts)
    recorder.close()
    begin()
    found = rows_of(recorder.calls, engine.ops, context, device, tell)
    total = Row("all")
    for row in found:
        for name in ("calls", "launches", "bytes", "microseconds"):
            setattr(total, name, getattr(total, name) + getattr(row, name))
    ordered = sorted(found, key=lambda row: -row.microseconds)
    return {
        "rows": rows,
        "drafts": following,
        "step_us": whole,
        "ops": [row.rated(bandwidth) for row in ordered],
        "total": total.rated(bandwidth),
    }


@torch.inference_mode()
def breakdown(spec: EngineSpec, context: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Tables of a plain step and, with a drafter, of one that verifies and makes a whole block."""
    engine = NativeEngine.load(
        spec.model,
        spec.device,
        spec.dtype,
        spec.draft,
        block=spec.block,
        context=context + ROOM,
        threads=spec.threads,
        progress=lambda progress: tell(progress.stage),
        dummy=spec.dummy,
    )
    info = engine.info
    name = torch.cuda.get_device_name(spec.device) if spec.device != "cpu" else "CPU"
    bandwidth = timing.copy_bandwidth(spec.device)
    kinds = [(1, 0), *([(info.block + 1, info.block)] if info.block else [])]
    steps = [time_step(engine, rows, following, context, bandwidth, tell) for rows, following in kinds]
    engine.close()
    return {
        "model": info.model,
        "marks": list(info.marks),
        "device": name,
        "dtype": info.dtype,
        "torch": info.torch,
        "context": context,
        "drafter": info.drafter,
        "copy_bandwidth": bandwidth,
        "steps": steps,
    }


def main(text: str) -> None:
    """Print one JSON object a line: progress, then the document or the error."""

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    asked = json.loads(text)
    fields = asked["spec"]
    spec = EngineSpec(**{**fields, "dummy": Dummy(**fields["dummy"]), "accept": ()})
    try:
        say(breakdown(spec, asked["context"], lambda line: say({"progress": line})))
    except LingError as error:
        kind = "UsageError" if isinstance(error, UsageError) else type(error).__name__
        say({"error": {"kind": kind, "message": error.message, "hint": error.hint}})


if __name__ == "__main__":
    main(sys.argv[1])
