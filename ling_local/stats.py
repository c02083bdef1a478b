"""Figures of one generation, folded step by step from the engine's results. Counts come from ids, times from
the engine's clock; neither from text or from drawing.

TPOT leaves out the tokens of the first step: they came together at t_first, before any interval was measured.
What follows came in t_last - t_first. With one token in the first step this is the usual (t_last - t_first) /
(n - 1); with four tokens every 20 ms it is 5 ms at every length, where dividing by n - 1 would read less.

Identities: tokens = steps x accept_length; tok_s x tpot_s = 1; accepted = sum(accepted_by_position);
accept_length = 1 + sum(accepted_by_position) / steps (the last token of a cut step counts as its bonus token).
"""

from __future__ import annotations

from ling_local.types import Stats, StepResult


class Tally:
    """The figures so far. `taken_s` is the `time.monotonic()` at which the request was taken."""

    def __init__(self, taken_s: float, prompt_tokens: int, context_limit: int) -> None:
        self._taken_s = taken_s
        self._prompt_tokens = prompt_tokens
        self._context_limit = context_limit
        self._cached = 0
        self._prefill_s: float | None = None
        self._tokens = self._thinking = self._steps = self._drafted = 0
        self._first_tokens = 0
        self._gpu_s = 0.0  # of all steps but the first
        self._by_position: list[int] = []
        self._first_s: float | None = None
        self._answer_s: float | None = None
        self._last_s = taken_s
        self._seen_s = taken_s

    def add(
        self, step: StepResult, num_ids: int | None = None, *, num_thinking: int = 0, has_answer: bool = False
    ) -> None:
        """Take in one step, of which the first num_ids ids count (None: all; fewer where a stop was found).

        num_thinking of them are thinking; has_answer: text of the answer came with it.
        """
        num_ids = len(step.ids) if num_ids is None else num_ids
        if self._prefill_s is None:
            self._cached, self._prefill_s = step.cached, step.prefill_s
        self._seen_s = step.time_s
        if not num_ids:
            return  # a last step without tokens (cancelled) verified nothing
        accepted = min(step.accepted, num_ids - 1)
        self._by_position.extend([0] * (accepted - len(self._by_position)))
        for position in range(accepted):
            self._by_position[position] += 1
        if self._first_s is None:
            self._first_s, self._first_tokens = step.time_s, num_ids
        else:
            self._gpu_s += step.gpu_s
        if has_answer and self._answer_s is None:
            self._answer_s = step.time_s
        self._last_s = step.time_s
        self._tokens += num_ids
        self._thinking += num_thinking
        self._drafted += step.drafted
        self._steps += 1

    def stats(self) -> Stats:
        """The figures up to the last step taken in."""
        later = self._tokens - self._first_tokens
        span_s = self._last_s - self._first_s if self._first_s is not None else 0.0
        return Stats(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached,
            tokens=self._tokens,
            thinking_tokens=self._thinking,
            steps=self._steps,
            drafted=self._drafted,
            accepted=sum(self._by_position),
            accepted_by_position=tuple(self._by_position),
            ttft_s=self._since_taken(self._first_s),
            ttfa_s=self._since_taken(self._answer_s),
            tpot_s=span_s / later if later else None,
            step_s=span_s / (self._steps - 1) if self._steps > 1 else None,
            gpu_step_s=self._gpu_s / (self._steps - 1) if self._gpu_s else None,
            prefill_s=self._prefill_s,
            wall_s=self._seen_s - self._taken_s,
            context_limit=self._context_limit,
        )

    def _since_taken(self, time_s: float | None) -> float | None:
        return None if time_s is None else time_s - self._taken_s
