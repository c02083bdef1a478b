"""NativeEngine: loads a checkpoint, prefills, grants steps and reads their ring entries. It owns time."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import ling_kernels
from ling_kernels.ops import (
    ERROR_NON_FINITE,
    MAX_STOP_IDS,
    RING_HEADER,
    ROW_TILE,
    STOPPED_EOS,
    STOPPED_LENGTH,
    KernelError,
)
from ling_local.engine.config import load_model_config
from ling_local.engine.layout import memory_bytes, model_layout, parameter_count
from ling_local.engine.model import forward
from ling_local.engine.protocol import EngineInfo, ProgressFn
from ling_local.engine.state import RING_SLOTS, SequenceState, Snapshot
from ling_local.engine.step import step
from ling_local.engine.weights import DTYPES, Weights, load_weights
from ling_local.errors import ContextTooLong, EngineBusy, EngineError, ModelError, NonFinite, UsageError
from ling_local.types import FinishReason, StepResult, TokenRequest

CHUNK = 256  # prompt tokens per prefill pass; a cancel waits for one
KEPT_SNAPSHOTS = 8
FINISH = {0: None, STOPPED_EOS: FinishReason.EOS, STOPPED_LENGTH: FinishReason.LENGTH}


class RingEntry(NamedTuple):
    """One step's line of the ring, on the host."""

    step: int
    count: int
    drafted: int
    accepted: int
    finish: int
    error: int
    ids: tuple[int, ...]


class NativeEngine:
    """A loaded model with the state of one sequence. Build it with `load`."""

    def __init__(self, weights: Weights, info: EngineInfo, vocab: int, run_ahead: int = 1) -> None:
        self.weights = weights
        self.ops = ling_kernels.load(info.device)
        self.vocab = vocab
        self.run_ahead = run_ahead
        self._info = info
        self._state: SequenceState | None = self.new_state(info.context_limit)
        self._ids: list[int] = []  # what is in the state
        self._snapshots: list[Snapshot] = []
        self._running: weakref.ref[_Generation] | None = None  # weak: an abandoned one frees the engine

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
    ) -> NativeEngine:
        """Check and load the checkpoint folder `path`.

        context: tokens to hold at most, 0 for the model's limit; threads: torch's, 0 for a fitting number.
        Raises ModelError, UsageError or OutOfMemory; nothing is mapped before all files were checked.
        """
        folder = Path(path)
        config = load_model_config(folder)
        if dtype not in DTYPES:
            raise UsageError(f"no dtype '{dtype}'", f"use one of: {', '.join(DTYPES)}")
        if draft not in ("off", "auto"):
            raise ModelError(f"{folder}: no drafter '{draft}' for this model", "use --speculation off")
        if not 0 <= context <= config.max_position_embeddings:
            raise UsageError(
                f"a context of {context} tokens is not possible: the model's limit is {config.max_position_embeddings}",
                f"give --ctx a number from 1 to {config.max_position_embeddings}",
            )
        try:
            ling_kernels.load(device)
        except KernelError as error:
            raise UsageError(str(error), "use --device cpu") from None
        specs = model_layout(config)
        weights = load_weights(folder, config, DTYPES[dtype], device, progress)
        info = EngineInfo(
            model=folder.resolve().name,
            dtype=dtype,
            device=device,
            context_limit=context or config.max_position_embeddings,
            vocab_size=config.vocab_size,
            parameters=parameter_count(specs),
            weight_bytes=memory_bytes(specs, DTYPES[dtype].itemsize),
        )
        if device == "cpu":
            torch.set_num_threads(threads or fitting_threads(info.weight_bytes))
        return cls(weights, info, tokenizer_size(folder, config.vocab_size))

    @property
    def info(self) -> EngineInfo:
        return self._info

    def new_state(self, context: int) -> SequenceState:
        """An empty state for `context` tokens."""
        return SequenceState(self.weights.config, context, self.weights.dtype, self._info.device, self.vocab)

    @torch.inference_mode()
    def score(self, ids: Sequence[int], *, chunk: int = CHUNK, window: int = 0) -> Tensor:
        """Logits of every position, [n, V] fp32, on a state of its own.

        By prefill in chunks of `chunk`, or, with window 1..16, by verify steps of that many rows, all committed.
        """
        self._check_ids(ids)
        state = self.new_state(len(ids))
        logits = []
        for start in range(0, len(ids), window or chunk):
            part = ids[start : start + (window or chunk)]
            if window:
                logits.append(self._verify_all(state, start, part))
            else:
                logits.append(self.ops.head(self._prefill(state, start, part), self.weights.lm_head))
        return torch.cat(logits)

    def _verify_all(self, state: SequenceState, start: int, ids: Sequence[int]) -> Tensor:
        """Logits of a window of known tokens, then commit them all."""
        rows = len(ids)
        state.reserve(start + rows)
        known = self._tensor(ids)
        state.anchor.copy_(known[0])
        state.length.fill_(start)
        window = state.window(known[1:] if rows > 1 else None, rows)
        hidden = forward(self.ops, self.weights, state, window.ids, window.positions, rows)
        logits = self.ops.head(hidden.last, self.weights.lm_head)[:rows]
        self.ops.kda_commit(hidden.staged, state.conv, state.recurrent, torch.full_like(state.length, rows))
        return logits

    def generate(self, request: TokenRequest) -> _Generation:
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
        generation = _Generation(self, request)
        self._running = weakref.ref(generation)
        return generation

    @property
    def running(self) -> _Generation | None:
        """The generation under way."""
        return self._running() if self._running else None

    def close(self) -> None:
        """Drop weights and state. Idempotent."""
        self._running = None
        self._state = None
        self._snapshots.clear()
        self.weights = None  # type: ignore[assignment]

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not ids:
            raise UsageError("the prompt is empty", "give at least one token of text")
        if min(ids) < 0 or max(ids) >= self._info.vocab_size:
            raise UsageError(f"token ids must lie in 0..{self._info.vocab_size - 1}", "use this model's tokenizer")

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(ids, dtype=torch.int64, device=self._info.device)

    def _prefill(self, state: SequenceState, start: int, ids: Sequence[int]) -> Tensor:
        """Put ids into the state at positions start.. and return their final hidden rows [n, D]."""
        state.reserve(start + len(ids))
        positions = torch.arange(start, start + len(ids), device=self._info.device)
        return forward(self.ops, self.weights, state, self._tensor(ids), positions, None).last

    def _resume(self, ids: list[int]) -> int:
        """Bring the state to the longest prefix of ids[:-1] that it or a snapshot holds; how many tokens that is."""
        usable = len(ids) - 1  # the last id is the anchor: it goes through the first step
        held = len(self._ids)
        if held <= usable and ids[:held] == self._ids:
            base = held
        else:
            fitting = [s for s in self._snapshots if len(s.ids) <= usable and ids[: len(s.ids)] == s.ids]
            best = max(fitting, key=lambda s: len(s.ids), default=None)
            base = 0 if best is None else len(best.ids)
            self._state.rewind() if best is None else self._state.restore(best)
        self._ids = ids[:base]
        # rows past the base are about to be overwritten, so longer snapshots lose their latent rows
        self._snapshots = [s for s in self._snapshots if self._ids[: len(s.ids)] == s.ids]
        return base

    def _remember(self) -> None:
        """Snapshot the state as it stands, unless that prefix is kept already."""
        if self._ids and all(s.ids != self._ids for s in self._snapshots):
            self._snapshots = [*self._snapshots, self._state.snapshot(list(self._ids))][-KEPT_SNAPSHOTS:]

    def _forget(self) -> None:
        """Empty state: after an error nothing of it can be trusted."""
        self._state.clear()
        self._snapshots.clear()
        self._ids = []

    def _read(self, number: int) -> RingEntry:
        """Wait for step `number` and read its entry: the only place where a device value reaches the host."""
        values = self._state.ring[number % RING_SLOTS].tolist()
        return RingEntry(*values[:RING_HEADER], tuple(values[RING_HEADER : RING_HEADER + values[1]]))


class _Generation:
    """One request under way. Iterate it once; `cancel` from any thread."""

    def __init__(self, engine: NativeEngine, request: TokenRequest) -> None:
        self.engine = engine
        self.request = request
        self.cancelled = False
        self.granted = self.read = 0  # steps
        self.known = list(request.ids)  # tokens known so far; all but the last are in the state

    def cancel(self) -> None:
        self.cancelled = True

    def close(self) -> None:
        """Free the engine at once; what an abandoned iterator does too."""
        self.cancelled = True
        if self.engine.running is not self:
            return
        while self.read < self.granted:  # granted but never asked for: the state holds their tokens
            self._take()
        self.engine._running = None

    def __iter__(self) -> Iterator[StepResult]:
        engine = self.engine
        try:
            if engine.running is not self:  # closed before it began, or iterated before
                yield StepResult((), time_s=time.monotonic(), finish=FinishReason.CANCELLED)
                return
            with torch.inference_mode():
                first = self._prefill()
            if first is None:
                yield StepResult((), time_s=time.monotonic(), finish=FinishReason.CANCELLED)
                return
            yield from self._steps(first)
            if engine.running is self:
                engine._remember()
        except (Exception, KeyboardInterrupt):
            engine._forget()  # the state may stand between two tokens
            raise
        finally:
            self.close()

    def _prefill(self) -> StepResult | None:
        """Bring everything but the last id into the state. The figures of it, or None if cancelled meanwhile."""
        engine, request = self.engine, self.request
        started = time.monotonic()
        prompt = self.known[:-1]
        cached = engine._resume(self.known)
        for start in range(cached, len(prompt), CHUNK):
            if self.cancelled:
                return None
            engine._prefill(engine._state, start, prompt[start : start + CHUNK])
            engine._ids += prompt[start : start + CHUNK]
        engine._remember()
        remaining = min(request.max_tokens, engine.info.context_limit - len(request.ids))
        engine._state.begin(len(prompt), request.ids[-1], remaining, sorted(request.stop_ids), request.sampling)
        return StepResult((), cached=cached, prefilled=len(prompt) - cached, prefill_s=time.monotonic() - started)

    def _steps(self, first: StepResult) -> Iterator[StepResult]:
        """Grant steps ahead, read the oldest, until the device or a cancel says that it is over."""
        engine = self.engine
        prefill = (first.cached, first.prefilled, first.prefill_s)
        while True:
            while self.granted - self.read < engine.run_ahead and engine.running is self and not self.cancelled:
                engine._state.reserve(len(self.known) + (self.granted - self.read + 1) * ROW_TILE)
                with torch.inference_mode():
                    step(engine.ops, engine.weights, engine._state, 1)
                self.granted += 1
            if self.read == self.granted:
                yield StepResult((), time_s=time.monotonic(), finish=FinishReason.CANCELLED)
                return
            entry = self._take()
            if entry.error == ERROR_NON_FINITE:
                raise NonFinite(
                    f"step {entry.step}, position {len(self.known) - 1}: the logits hold NaN or Inf",
                    "start the answer again; if it comes back, check the weights or use --dtype float32",
                )
            finish = FINISH[entry.finish]
            yield StepResult(entry.ids, entry.drafted, entry.accepted, time.monotonic(), finish, *prefill)
            prefill = (0, 0, 0.0)
            if finish is not None:
                return

    def _take(self) -> RingEntry:
        """Wait for the oldest granted step and note its tokens."""
        entry = self.engine._read(self.read)
        self.read += 1
        self.known += entry.ids
        self.engine._ids += self.known[len(self.engine._ids) : -1]
        return entry


def fitting_threads(weight_bytes: int) -> int:
    """Threads for the CPU engine: a small model is all latency, a large one needs every memory channel."""
    cores = torch.get_num_threads()
    return min(cores, 2) if weight_bytes < 2**28 else cores


def tokenizer_size(folder: Path, vocab_size: int) -> int:
    """Ids that the tokenizer defines; logits past it are padding. The whole vocabulary without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return vocab_size
    from tokenizers import Tokenizer

    try:
        highest = max(Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True).values())
    except Exception as error:  # the library raises plain Exception for a broken file
        raise ModelError(f"{path}: cannot be read as a tokenizer: {error}", "download this file again") from None
    return min(highest + 1, vocab_size)
