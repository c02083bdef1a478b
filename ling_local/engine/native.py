"""NativeEngine: loads a checkpoint, prefills, grants steps and reads their ring entries. It owns time."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ling_kernels
from ling_kernels.exchange import Board
from ling_kernels.ops import MAX_STOP_IDS, RING_HEADER, ROW_TILE, Ops
from ling_local.engine.capture import CapturedStep
from ling_local.engine.drafter import Drafter
from ling_local.engine.follow import Peers, told
from ling_local.engine.forced import Forced, force
from ling_local.engine.generation import CHUNK, NativeGeneration, RingEntry
from ling_local.engine.gpu import PREFILL_CHUNK, GpuOptions, HostRing, errors_in_words, open_gpu_ops
from ling_local.engine.layout import memory_bytes, model_layout, parameter_count
from ling_local.engine.memory import MemoryPlan, free_bytes, plan_cpu, plan_gpu
from ling_local.engine.protocol import Dummy, EngineInfo, Progress, ProgressFn
from ling_local.engine.shard import WHOLE, Shard
from ling_local.engine.source import Source, open_source
from ling_local.engine.state import RING_SLOTS, SequenceState, Snapshot
from ling_local.engine.step import step
from ling_local.engine.threads import ThreadRule
from ling_local.engine.weights import DTYPES, Weights
from ling_local.engine.width import PIECE, PLAIN_FIRST, StepTimes
from ling_local.engine.work import RankWork
from ling_local.errors import ContextTooLong, EngineBusy, EngineError, UsageError
from ling_local.types import SamplingParams, TokenRequest

SMALL_BYTES = 2**28  # weights below this leave more than two threads nothing to do


class NativeEngine(RankWork):
    """A loaded model with the state of one sequence. Build it with `load`.

    With several ranks each process has one, over its part of the weights. Rank 0 decides; what touches a state it calls
    through `_everywhere`, which tells the other ranks first (work.py, follow.py).
    """

    def __init__(
        self,
        weights: Weights,
        info: EngineInfo,
        vocab: int,
        drafter: Drafter | None,
        ops: Ops,
        gpu: GpuOptions | None = None,
    ) -> None:
        self.weights = weights
        self.drafter = drafter
        self.ops = ops
        self.vocab = vocab
        self.peers: Peers | None = None  # on rank 0 of several
        self.run_ahead = gpu.run_ahead if gpu else 1
        self.chunk = PREFILL_CHUNK if gpu else CHUNK
        self.step = CapturedStep(step) if gpu and gpu.capture else step
        self.step_times = {greedy: StepTimes() for greedy in (True, False)}  # drawing costs time too
        self.threads: ThreadRule | None = None
        self._info = info
        self._state: SequenceState | None = self.new_state(info.context_limit)
        self._host_ring = HostRing(self._state) if gpu else None
        self._ids: list[int] = []  # what is in the state
        self._snapshots: list[Snapshot] = []
        self._running: weakref.ref[NativeGeneration] | None = None  # weak: an abandoned one frees the engine

    @classmethod
    def load(
        cls,
        path: str | Path,
        device: str = "cpu",
        dtype: str = "float32",
        draft: str = "off",
        *,
        block: int = 0,
        context: int = 0,
        threads: int = 0,
        progress: ProgressFn | None = None,
        gpu: GpuOptions | None = None,
        dummy: Dummy | None = None,
        accept: Sequence[int] = (),
        board: Board | None = None,
    ) -> NativeEngine:
        """Check and load the checkpoint folder `path`, or one rank's part of it, or make the `dummy` in its place.

        context: tokens to hold at most, 0 for the model's limit, or on a GPU for what fits; threads: torch's, 0 for a
        fitting number; accept: accept counts to force (engine/forced.py); board: what the ranks share, where there are
        several: all of them load at about the same time.
        Raises ModelError, UsageError or OutOfMemory; nothing is mapped before all files were checked.
        """
        source = open_source(path, dummy, draft, Shard(board.rank, board.size) if board else WHOLE)
        config = source.config
        if dtype not in DTYPES:
            raise UsageError(f"no dtype '{dtype}'", f"use one of: {', '.join(DTYPES)}")
        if not 0 <= context <= config.max_position_embeddings:
            raise UsageError(
                f"a context of {context} tokens is not possible: the model's limit is {config.max_position_embeddings}",
                f"give --ctx a number from 1 to {config.max_position_embeddings}",
            )
        gpu = None if device == "cpu" else gpu or GpuOptions()
        most = _few_threads(source, dtype, threads) if not gpu else 0
        with errors_in_words("to load the model", device):
            source.check()
            ops = open_gpu_ops(device, dtype, gpu, progress, board) if gpu else ling_kernels.load(device, board=board)
            ghost = source.ghost(DTYPES[dtype])
            plan = _plan(source, ghost, source.drafter(ghost, draft, block), device, context)
            gpus = (f"GPU-{torch.cuda.get_device_properties(device).uuid}",) if gpu else ()
            if board:
                plan, gpus = _agree(board, plan, gpus)
            plan.tell(progress)
            weights = source.weights(DTYPES[dtype], device, progress)
            drafter = force(source.drafter(weights, draft, block), accept, device)
            info = replace(_info(source, weights, drafter, device, plan, accept), device_ids=gpus)
            engine = cls(weights, info, source.vocab, drafter, ops, gpu)
            if board:
                board.share()  # before the first steps: in them a rank waits for the others only so long
            if gpu:
                engine.capture_steps(progress)
        if most:
            engine.threads = ThreadRule(most)
            engine.time_steps()
        return engine

    @property
    def info(self) -> EngineInfo:
        return self._info

    @torch.inference_mode()
    def time_steps(self) -> None:
        """Run each kind of step a few times on a state of its own: code and weights get warm, and the width rule
        knows from the first token on what a step costs here. A tenth of a second for a small model."""
        block = self._info.block
        widths = sorted({1, min(PIECE, block + 1), block + 1}) if block else []
        kinds = [(1, 0)] * (PLAIN_FIRST + 1) + [(width, block) for width in widths for _ in range(2)]
        state = self.new_state(len(kinds) * ROW_TILE)
        state.reserve(len(kinds) * ROW_TILE)
        state.begin(0, 0, len(kinds) * ROW_TILE, [], SamplingParams())
        for number, (width, following) in enumerate(kinds):
            started = time.monotonic()
            step(self.ops, self.weights, state, self.drafter, width, following)
            state.ring[number % RING_SLOTS].tolist()
            self.step_times[True].note(width, following > 0, time.monotonic() - started)

    @torch.inference_mode()
    def capture_steps(self, progress: ProgressFn | None = None) -> None:
        """Capture the graphs that a request will want, so that no first step pays for one and memory that is short is
        said at the load. `done` is set in a new state, so the steps change nothing that a request reads."""
        block, state = self._info.block, self._state
        kinds = [(1, 0), (1, block), (block + 1, block)] if block else [(1, 0)]
        sampling = state.sampling
        steps = [(greedy, *kind) for greedy in (True, False) for kind in kinds]
        for number, (greedy, width, following) in enumerate(steps):
            if progress:
                progress(Progress("capturing steps", number, len(steps), "graphs"))
            state.sampling = sampling._replace(greedy=greedy)
            self.step(self.ops, self.weights, state, self.drafter, width, following)
        state.sampling = sampling
        state.clear()

    def score(self, ids: Sequence[int], *, chunk: int = CHUNK, window: int = 0) -> Tensor:
        """Logits of every position, [n, V] fp32, on a state of its own.

        By prefill in chunks of `chunk`, or, with window 1..16, by verify steps of that many rows, all committed.
        """
        self._check_ids(ids)
        return self._everywhere("_score", tuple(ids), chunk, window)

    def generate(self, request: TokenRequest) -> NativeGeneration:
        """Start a request. Raises UsageError, ContextTooLong or EngineBusy before any work."""
        if self._state is None:
            raise EngineError("the engine is closed", "open it again")
        if self.running is not None:
            raise EngineBusy("a generation is under way", "end or cancel it first")
        self._check_ids(request.ids)
        limit = self._info.context_limit
        if len(request.ids) >= limit:
            raise ContextTooLong(
                f"the prompt has {len(request.ids)} tokens; the context holds {limit}, one of them for the answer",
                "shorten the prompt, or give a larger --ctx if the model allows it",
            )
        if request.max_tokens < 1:
            raise UsageError(f"max_tokens is {request.max_tokens}", "ask for one token or more")
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise UsageError(f"{len(request.stop_ids)} stop ids", f"give at most {MAX_STOP_IDS}")
        generation = NativeGeneration(self, request)
        self._running = weakref.ref(generation)
        return generation

    @property
    def running(self) -> NativeGeneration | None:
        """The generation under way."""
        return self._running() if self._running else None

    def close(self) -> None:
        """Drop weights and state. Idempotent."""
        if self.peers:
            self.peers.close()
            self.peers = None
        self._running = None
        self._state = None
        self._snapshots.clear()
        self.weights = None  # type: ignore[assignment]
        if self._host_ring is not None:
            self._host_ring = None
            self.step = self.ops = None  # type: ignore[assignment]
            torch.cuda.empty_cache()

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise UsageError("the prompt is empty", "give at least one token of text")
        if min(ids) < 0 or max(ids) >= self._info.vocab_size:
            raise UsageError(f"token ids must lie in 0..{self._info.vocab_size - 1}", "use this model's tokenizer")

    def _everywhere(self, name: str, *args: object) -> Any:
        """Call method `name` on every rank, here last; its result here."""
        if self.peers:
            self.peers.send(name, args)
        with told():
            return getattr(self, name)(*args)

    def _resume(self, ids: list[int]) -> int:
        """Bring the state to the longest prefix of ids[:-1] that it or a snapshot holds; how many tokens that is."""
        usable = len(ids) - 1  # the last id is the anchor: it goes through the first step
        held, best = len(self._ids), None
        if held <= usable and ids[:held] == self._ids:
            base = held
        else:
            fitting = [i for i, s in enumerate(self._snapshots) if len(s.ids) <= usable and ids[: len(s.ids)] == s.ids]
            best = max(fitting, key=lambda i: len(self._snapshots[i].ids), default=-1)
            base = 0 if best < 0 else len(self._snapshots[best].ids)
        self._ids = ids[:base]
        # rows past the base are about to be overwritten, so longer snapshots lose their latent rows
        kept = [i for i, s in enumerate(self._snapshots) if self._ids[: len(s.ids)] == s.ids]
        self._everywhere("_return_to", best, kept)
        return base

    def _remember(self) -> None:
        """Snapshot the state as it stands, unless that prefix is kept already."""
        if self._ids and all(s.ids != self._ids for s in self._snapshots):
            self._everywhere("_snapshot", list(self._ids))

    def _forget(self) -> None:
        """Empty state: after an error nothing of it can be trusted."""
        self._everywhere("_clear")
        self._ids = []

    def learn(self, ids: Sequence[int]) -> None:
        """Note what a generation said, from the first prompt token on, where accept counts are forced."""
        if isinstance(self.drafter, Forced):
            self._everywhere("_learn", tuple(ids))

    def _read(self, number: int) -> RingEntry:
        """Wait for step `number` and read its entry: the only place where a device value reaches the host."""
        ring, host = self._state.ring, self._host_ring
        values, gpu_s = host.wait(number) if host else (ring[number % RING_SLOTS].tolist(), 0.0)
        self.check_peers()  # a step that gave up on a peer ends with an entry, and no sense in it
        ids = values[RING_HEADER : RING_HEADER + values[1]]
        sure = [v / 1e6 for v in values[RING_HEADER + ROW_TILE :]]
        return RingEntry(*values[:RING_HEADER], tuple(ids), tuple(sure), gpu_s)


def _few_threads(source: Source, dtype: str, threads: int) -> int:
    """Set torch's threads for a load on a CPU: `threads`, or one for a small model, whose tensors are read in less time
    than other threads need to wake. The most that its steps may try then; 0 where the number stays."""
    size = source.shard.size
    if threads:
        torch.set_num_threads(threads)
    elif memory_bytes(model_layout(source.config, size), DTYPES[dtype].itemsize, size) < SMALL_BYTES:
        most = min(torch.get_num_threads(), 2)
        torch.set_num_threads(1)
        return most
    return 0


def _plan(source: Source, ghost: Weights, drafter: Drafter | None, device: str, context: int) -> MemoryPlan:
    """What goes where, before it is loaded. Raises OutOfMemory where a GPU cannot hold it."""
    wanted, free = context or source.config.max_position_embeddings, free_bytes(device)
    if device == "cpu":
        return plan_cpu(ghost, drafter, wanted, free)
    return plan_gpu(source.name, ghost, drafter, wanted, free, asked=context > 0)


def _agree(board: Board, plan: MemoryPlan, gpus: tuple[str, ...]) -> tuple[MemoryPlan, tuple[str, ...]]:
    """The plan that fits the fullest of all ranks' GPUs, and what each is known by."""
    answers = [json.loads(answer) for answer in board.share(json.dumps([plan.context, plan.free, *gpus]).encode())]
    context, free = (min(answer[which] for answer in answers) for which in (0, 1))
    return replace(plan, context=context, free=free), tuple(name for answer in answers for name in answer[2:])


def _info(
    source: Source, weights: Weights, drafter: Drafter | None, device: str, plan: MemoryPlan, accept: Sequence[int]
) -> EngineInfo:
    size = source.shard.size
    specs = model_layout(source.config, size)
    forced = tuple(accept) if drafter else ()
    marks = source.marks
    if forced:
        marks += (f"FORCED: accept counts {','.join(map(str, forced))} by decree, not by the drafts",)
    gpu = torch.cuda.get_device_properties(device) if device != "cpu" else None
    return EngineInfo(
        model=source.name,
        dtype=str(weights.dtype).removeprefix("torch."),
        device=device,
        context_limit=plan.context,
        vocab_size=source.config.vocab_size,
        parameters=parameter_count(specs),
        weight_bytes=memory_bytes(specs, weights.dtype.itemsize, size),
        ranks=size,
        drafter=drafter.name if drafter else "off",
        block=drafter.block if drafter else 0,
        torch=str(torch.__version__),  # a class of torch's own would make whoever receives it import torch
        state_bytes=plan.state,
        free_bytes=plan.free if device != "cpu" else 0,
        marks=marks,
        forced=forced,
        device_name=gpu.name if gpu else "",
    )
