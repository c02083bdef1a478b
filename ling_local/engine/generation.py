"""One request under way on the native engine: prefill, grant steps ahead, read the ring late."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from ling_kernels.ops import ERROR_NON_FINITE, ROW_TILE, STOPPED_EOS, STOPPED_LENGTH
from ling_local.engine.gpu import errors_in_words
from ling_local.engine.pinning import no_collection
from ling_local.engine.state import is_greedy
from ling_local.engine.width import WidthRule
from ling_local.errors import NonFinite
from ling_local.types import FinishReason, StepResult, TokenRequest

if TYPE_CHECKING:
    from ling_local.engine.native import NativeEngine

CHUNK = 256  # prompt tokens per prefill pass on a CPU; a cancel waits for one
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
    confidence: tuple[float, ...]  # of the drafts made at the step's end
    gpu_s: float = 0.0  # that the step took by the GPU's clock


class NativeGeneration:
    """One request under way. Iterate it once; `cancel` from any thread."""

    def __init__(self, engine: NativeEngine, request: TokenRequest) -> None:
        self.engine = engine
        self.request = request
        self.cancelled = False
        self.granted = self.read = 0  # steps
        self.drafts = 0  # made by the last granted step
        self.made: deque[int] = deque()  # by each step that is granted and not read
        self.sure: tuple[float, ...] = ()  # confidence of the drafts of the last step read
        times = engine.step_times[is_greedy(request.sampling)]
        self.rule = WidthRule(engine.info.block if request.draft else 0, times, request.full_width)
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
            if engine.running is not self:  # closed, or iterated before
                return
            with errors_in_words("for this request", engine.info.device), no_collection():
                with torch.inference_mode():
                    first = self._prefill()
                if first is None:
                    yield StepResult((), time_s=time.monotonic(), finish=FinishReason.CANCELLED)
                    return
                yield from self._steps(first)
                engine.learn(self.known)
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
        for start in range(cached, len(prompt), engine.chunk):
            if self.cancelled:
                return None
            part = prompt[start : start + engine.chunk]
            engine._everywhere("_feed", start, part, self.known[start + 1 : start + len(part) + 1])
            engine._ids += part
        engine._remember()
        remaining = min(request.max_tokens, engine.info.context_limit - len(request.ids))
        stop_ids = sorted(request.stop_ids)
        engine._everywhere("_begin", len(prompt), request.ids[-1], remaining, stop_ids, request.sampling)
        return StepResult((), cached=cached, prefilled=len(prompt) - cached, prefill_s=time.monotonic() - started)

    def _steps(self, first: StepResult) -> Iterator[StepResult]:
        """Grant steps ahead, read the oldest, until the device or a cancel says that it is over."""
        engine, rule = self.engine, self.rule
        prefill = (first.cached, first.prefilled, first.prefill_s)
        clock = time.monotonic()
        while True:
            while self.granted - self.read < engine.run_ahead and engine.running is self and not self.cancelled:
                self._grant()
            if self.read == self.granted:
                yield StepResult((), time_s=time.monotonic(), finish=FinishReason.CANCELLED)
                return
            entry = self._take()
            if entry.error == ERROR_NON_FINITE:
                raise NonFinite(
                    f"step {entry.step}, position {len(self.known) - 1}: the logits hold NaN or Inf",
                    "start the answer again; if it comes back, check the weights or use --dtype float32",
                )
            now = time.monotonic()
            made = self.made.popleft()
            # ahead of a slow reader a step seems to take no time: a GPU's own clock knows better
            rule.note(entry.drafted + 1, made, entry.count, entry.gpu_s or now - clock)
            if engine.threads:
                engine.threads.note((entry.drafted, made > 0, rule.times), now - clock)
            finish = FINISH[entry.finish]
            yield StepResult(entry.ids, entry.drafted, entry.accepted, now, finish, *prefill, entry.gpu_s)
            prefill = (0, 0, 0.0)
            clock = time.monotonic()
            if finish is not None:
                return

    def _grant(self) -> None:
        """Launch one step. How many drafts it verifies is what the step before it made, cut by the width rule where
        their confidence is known already."""
        engine = self.engine
        following = self.rule.following()
        width = self.drafts + 1
        if self.drafts and self.read == self.granted:
            width = self.rule.width(self.sure[: self.drafts], following)
        reach = len(self.known) + (self.granted - self.read + 1) * ROW_TILE
        if engine.threads:
            torch.set_num_threads(engine.threads.now)
        engine._everywhere("_launch", self.granted, width, following, reach)
        self.granted += 1
        self.drafts = following
        self.made.append(following)

    def _take(self) -> RingEntry:
        """Wait for the oldest granted step and note its tokens."""
        entry = self.engine._read(self.read)
        self.read += 1
        self.known += entry.ids
        self.sure = entry.confidence
        self.engine._ids += self.known[len(self.engine._ids) : -1]
        return entry
