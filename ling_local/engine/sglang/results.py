"""What SGLang is asked and what it sends, as plain dicts: sampling parameters, streamed chunks, finish reasons."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ling_local.errors import EngineError, NonFinite, OutOfMemory, UsageError
from ling_local.types import FinishReason, StepResult, TokenRequest

_NOT_A_NUMBER = "NaN happened"  # what SGLang says it has matched when ids come out of range
_NO_MEMORY_WORDS = ("out of memory", "not enough memory", "kv cache pool is full")


def sampling_params(request: TokenRequest, room: int) -> dict[str, Any]:
    """The request's sampling and ends in SGLang's words. room: new tokens that the context holds.

    With ignore_eos SGLang looks at no stop id at all, so it is set only where there are none.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": min(request.max_tokens, room),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1.0,
        "top_k": (1 if sampling.top_p == 0 else sampling.top_k) or -1,
        "ignore_eos": not request.stop_ids,
    }
    if request.stop_ids:
        params["stop_token_ids"] = sorted(request.stop_ids)
    if sampling.temperature > 0:
        params["sampling_seed"] = sampling.seed  # heeded only with --enable-deterministic-inference
    return params


class ChunkReader:
    """Turns the chunks of one request into steps. `block` is the drafts of a verify step, 0 without a drafter.

    The prefill's token is a step of its own without drafts. Each chunk after it is one verify step, unless SGLang
    joined several that its front found waiting: those are cut into the fewest steps that they can be.
    """

    def __init__(self, num_prompt: int, block: int, started_s: float) -> None:
        self._num_prompt = num_prompt
        self._block = block
        self._started_s = started_s
        self._seen = 0

    def steps(self, chunk: Mapping[str, Any], time_s: float) -> Iterator[StepResult]:
        """The steps of a chunk; the last has `finish` set where the chunk ends the request. Raises EngineError."""
        meta = chunk["meta_info"]
        finish = finish_of(meta.get("finish_reason"))
        ids = self._new_ids(chunk["output_ids"], meta["completion_tokens"], finish is FinishReason.CANCELLED)
        first = self._seen == 0
        self._seen += len(ids)
        cuts = list(self._cut(ids, first))
        if not cuts and finish is None:
            return
        for number, (part, drafted) in enumerate(cuts or [((), 0)], 1):
            cached = meta.get("cached_tokens", 0) if first else 0
            yield StepResult(
                part,
                drafted=drafted,
                accepted=max(len(part) - 1, 0),
                time_s=time_s,
                finish=finish if number >= len(cuts) else None,
                cached=cached,
                prefilled=self._num_prompt - cached if first else 0,
                prefill_s=time_s - self._started_s if first else 0.0,
            )
            first = False

    def _new_ids(self, ids: Sequence[int], made: int, cancelled: bool) -> tuple[int, ...]:
        """Those that no chunk before held. made: SGLang's count of all so far; a request that it ended before it ran
        again repeats its last id."""
        new = made - self._seen
        if new != len(ids) and not (cancelled and 0 <= new < len(ids)):
            raise EngineError(f"SGLang counts {made} tokens, and {self._seen + len(ids)} have come", "Try again.")
        return tuple(ids[:new])

    def _cut(self, ids: tuple[int, ...], first: bool) -> Iterator[tuple[tuple[int, ...], int]]:
        if first and ids:
            yield ids[:1], 0
            ids = ids[1:]
        width = self._block + 1
        for start in range(0, len(ids), width):
            yield ids[start : start + width], self._block


def finish_of(reason: Mapping[str, Any] | None) -> FinishReason | None:
    """Our word for SGLang's finish reason. Raises what it stands for where the request failed."""
    if reason is None:
        return None
    kind = reason["type"]
    if kind == "length":
        return FinishReason.LENGTH
    if kind == "stop" and reason.get("matched") == _NOT_A_NUMBER:
        raise NonFinite("SGLang drew an id that is none: the logits hold NaN or Inf", "Start the answer again.")
    if kind == "stop":
        return FinishReason.EOS
    if kind == "abort" and reason.get("status_code") is None:
        return FinishReason.CANCELLED
    raise _failure(str(reason.get("message") or kind), reason.get("status_code"))


def _failure(message: str, status: int | None) -> EngineError | UsageError:
    if any(words in message.lower() for words in _NO_MEMORY_WORDS):
        return OutOfMemory(f"SGLang: {message}", "Try a smaller --ctx, or more GPUs.")
    if status == 400:
        return UsageError(f"SGLang refuses the request: {message}")
    return EngineError(f"SGLang ended the request: {message}", "Try again; with --debug its last output is shown.")
