"""An engine that plays a script: tokens, block sizes, delays and failures on demand; no model, no torch.

``EngineSpec(engine="scripted", model="script.json")`` opens it, behind a worker process as every engine. The
real program then runs against it: terminals, pipes, stop rules, figures and faults become plain tests.

The file is a JSON object; a bare list stands for one turn::

    {"turns": [["Hel", "lo", ["\\n", " wor", "ld"], {"control": "<|role_end|>"}]], "block": 3}

Top level, all but "turns" optional:

    turns        what each request plays, in order; after the last the first again
    model        the name in EngineInfo                            default: the file's name
    context      tokens that prompt and answer may fill together   default 8192 (--ctx may lower it)
    block        drafts per step; 0: no drafter                    default 0
    clock        "real", or "virtual": delays are not waited for, but stand in the figures to the digit
    eos          the control token that ends a turn                default "<|role_end|>"
    prefill_ms   time of a prefill                                 default 0
    load         {"delay_ms": 0, "fail": failure}                  loading takes a while, or fails
    stderr       what the engine process writes to stderr while it loads
    template     chat template file, beside the script             default: that of the demo model

A turn is a list of steps, or {"steps": [...], "loop": true, "prefill_ms": 5}. When its steps run out the
end-of-turn token follows and then the steps again, as from a model whose end of turn is ignored; with "loop"
the steps start over without one.

A step is what one verify step commits, accepted drafts first, then the bonus token:

    "text"  {"control": "..."}   one token
    ["a", "b", "c"]              one step of three tokens
    {"tokens": ["a", "b"]}       the same, with room for the keys below
    {"text": "long text", "cut": 3, "per_step": 4}    text as tokens of 3 characters, 4 tokens to a step
    {"hex": "f09f8c8d", "cut": 1}                     bytes as tokens of 1 byte, 1 token to a step
    {"fail": "nan"}              logits with NaN; or a kind of error: "OutOfMemory", "RuntimeError", ...
    {"fail": {"kind": "EngineError", "message": "...", "hint": "..."}}
    {"exit": 3}  {"kill": "SIGKILL"}    the engine process ends there
    {"hang": true}               nothing comes any more, and a cancel is not heard

and, beside them: "drafted" (default: the block), "delay_ms" before the step, "repeat" (times), "stderr".

A token is a string (its UTF-8 bytes; it may spell a control token and stays text), {"hex": "f09f"},
{"control": "</think>"}, or {"id": 7}. Ids 0-255 are bytes, the control tokens follow, then the other pieces
in the order in which the file first names them. Prompts are encoded a byte an id.

A stop id, the length limit and the end of the context cut a step as in a real engine; a stop id that is the
last token allowed still ends with EOS. Without drafting each token is a step of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from ling_local.engine.protocol import EngineInfo, EngineSpec, Progress, ProgressFn
from ling_local.engine.script import Script, ScriptedTokens, Step, Turn, read_script
from ling_local.errors import EngineBusy, EngineError, UsageError, context_too_long
from ling_local.types import FinishReason, StepResult, TokenRequest

__all__ = ["ScriptedEngine", "ScriptedTokens", "cut_block"]

_LOAD_STAGES = 10
_LATE_S = 0.05


def cut_block(ids: tuple[int, ...], stop_ids: frozenset[int], room: int) -> tuple[tuple[int, ...], FinishReason | None]:
    """What of a block may be committed when `room` >= 1 tokens are left, and why it ends there, if it does.

    A stop id within the room wins over the limit, also as the very last token.
    """
    for index, token_id in enumerate(ids[:room]):
        if token_id in stop_ids:
            return ids[: index + 1], FinishReason.EOS
    return ids[:room], FinishReason.LENGTH if len(ids) >= room else None


class ScriptedEngine:
    """Plays one turn of its script a request, in this process and in the thread that iterates."""

    def __init__(self, script: Script, context: int = 0) -> None:
        self._script = script
        self._limit = min(context, script.context) if context else script.context
        self._num_requests = 0
        self._state: list[int] = []  # ids that a real engine would hold in its caches
        self._current: weakref.ref[ScriptedGeneration] | None = None
        self._closed = False

    @classmethod
    def load(cls, spec: EngineSpec, progress: ProgressFn | None = None) -> ScriptedEngine:
        """Read spec.model. Raises ModelError, or what the script's "load" asks for."""
        script = read_script(Path(spec.model))
        if script.stderr:
            print(script.stderr, file=sys.stderr, flush=True)
        for stage in range(_LOAD_STAGES if script.load_s else 1):
            if progress:
                progress(Progress("script", stage, _LOAD_STAGES))
            time.sleep(script.load_s / _LOAD_STAGES)
        if script.load_failure:
            raise script.load_failure.exception(0, 0)
        if progress:
            progress(Progress("script", _LOAD_STAGES, _LOAD_STAGES))
        return cls(script, spec.context)

    @property
    def info(self) -> EngineInfo:
        script = self._script
        return EngineInfo(
            model=script.model,
            dtype="script",
            device="script",
            context_limit=self._limit,
            vocab_size=script.vocab_size,
            drafter="dspark" if script.block else "off",
            block=script.block,
            engine="scripted",
        )

    def generate(self, request: TokenRequest) -> ScriptedGeneration:
        """Check the request and start it; the next turn is used up only where the request is good."""
        if self._closed:
            raise EngineError("the engine is closed", "Open it again.")
        current = self._current() if self._current else None
        if current is not None and not current.over:
            raise EngineBusy("the engine is busy with another request", "Wait for it to end, or cancel it.")
        if not request.ids or request.max_tokens < 1:
            raise UsageError("a request needs at least one id and a positive max_tokens")
        if len(request.ids) >= self._limit:
            raise context_too_long(len(request.ids), self._limit)
        turn = self._script.turns[self._num_requests % len(self._script.turns)]
        self._num_requests += 1
        generation = ScriptedGeneration(self, request, turn)
        self._current = weakref.ref(generation)
        return generation

    def close(self) -> None:
        """Running generations end as cancelled."""
        self._closed = True
        current = self._current() if self._current else None
        if current is not None:
            current.cancel()
        self._state = []

    def _play(self, request: TokenRequest, turn: Turn, cancelled: threading.Event) -> Iterator[StepResult]:
        clock = _Clock(self._script.virtual, cancelled)
        begun = clock.time()
        ids = request.ids
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ids, self._state, strict=False)))
        cached = min(same, len(ids) - 1)  # the last id is always computed: its logits are wanted
        clock.wait(turn.prefill_s)
        self._state = state = list(ids)
        head = StepResult((), cached=cached, prefilled=len(ids) - cached, prefill_s=clock.time() - begun)
        room = min(request.max_tokens, self._limit - len(ids))
        newest: tuple[int, ...] = ()
        for number, step in enumerate(self._steps(turn, request.draft), 1):
            clock.wait(step.delay_s)
            if cancelled.is_set():
                yield replace(head, time_s=clock.time(), finish=FinishReason.CANCELLED)
                return
            if not step.ids or step.stderr:
                self._act(step, number, len(state) + len(newest))
            kept, finish = cut_block(step.ids, request.stop_ids, room)
            room -= len(kept)
            # The newest id of all has not been through the model yet; it joins with the next step.
            state.extend((newest + kept)[:-1])
            newest = kept[-1:]
            accepted = max(len(kept) - 1, 0)
            yield replace(head, ids=kept, drafted=step.drafted, accepted=accepted, time_s=clock.time(), finish=finish)
            if finish is not None:
                return
            head = StepResult(())

    def _steps(self, turn: Turn, draft: bool) -> Iterator[Step]:
        eos = Step((self._script.eos,), self._script.block)
        ended = turn.loop or (turn.steps and turn.steps[-1].ids[-1:] == eos.ids)
        steps = turn.steps if ended else (*turn.steps, eos)
        while True:
            for step in steps:
                for _ in range(step.repeat):
                    if draft or not step.ids:
                        yield step
                    else:
                        yield from (replace(step, ids=(token_id,), drafted=0) for token_id in step.ids)

    def _act(self, step: Step, number: int, position: int) -> None:
        if step.stderr:
            print(step.stderr, file=sys.stderr, flush=True)
        if step.fail is not None:
            self._state = []
            raise step.fail.exception(number, position)
        if step.exit is not None:
            os._exit(step.exit)
        if step.kill is not None:
            os.kill(os.getpid(), signal.Signals[step.kill])
        if step.hang:
            threading.Event().wait()


class ScriptedGeneration:
    """One running turn. It can be iterated once."""

    def __init__(self, engine: ScriptedEngine, request: TokenRequest, turn: Turn) -> None:
        self._cancelled = threading.Event()
        self._steps: Iterator[StepResult] | None = engine._play(request, turn, self._cancelled)
        self._over = False

    @property
    def over(self) -> bool:
        """No longer in the way of another request."""
        return self._over or self._cancelled.is_set()

    def __iter__(self) -> Iterator[StepResult]:
        steps, self._steps = self._steps, None
        if steps is None:
            return
        try:
            for step in steps:
                self._over = step.finish is not None
                yield step
        finally:
            self._over = True

    def cancel(self) -> None:
        self._cancelled.set()


class _Clock:
    """Waits for scripted delays on one schedule, so that rounding of sleeps does not add up."""

    def __init__(self, virtual: bool, cancelled: threading.Event) -> None:
        self._virtual = virtual
        self._cancelled = cancelled
        self._due = time.monotonic()

    def wait(self, seconds: float) -> None:
        """Return at once when cancelled."""
        self._due += seconds
        if self._virtual:
            return
        late = time.monotonic() - self._due
        if late < 0:
            self._cancelled.wait(-late)
        elif late > _LATE_S:  # the reader was away for long: no burst to catch up
            self._due += late

    def time(self) -> float:
        return self._due if self._virtual else time.monotonic()
