"""The pump: a Request in, Events out. The only place where ids and text meet.

Events of one generation, in this order: after each step its TokenEvents, then a StatsEvent; last one Finish.
Every id that counts stands in exactly one TokenEvent, also an end-of-turn id, which has no text. Text that
waits (for the rest of a rune, for what could become a stop string or a tag) comes with a later step, at the
latest with the last one. After a stop nothing more is shown or counted: `Stats.tokens` and `Finish.ids` go up
to the id that completed it. If the engine fails, or Ctrl-C comes while it is waited for, text that waited is yielded
before the exception is raised.

A thinking budget is kept by asking the engine for that many tokens first: it stops at exactly that point, so its
state is what the rest goes on from, with a </think> put in where the thought is still open.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ling_local.engine.protocol import Engine, EngineSpec, Generation
from ling_local.errors import EngineError, ModelError, UsageError, context_too_long
from ling_local.stats import Tally
from ling_local.text.channels import Channels
from ling_local.text.readers import ChatText, RawText
from ling_local.types import (
    Channel,
    Event,
    Finish,
    FinishReason,
    Request,
    StatsEvent,
    StepResult,
    TokenEvent,
    TokenRequest,
)

if TYPE_CHECKING:  # jinja2 and tokenizers cost time, and a raw completion needs no template
    from ling_local.text.template import ChatTemplate
    from ling_local.text.tokenizer import Tokens

_END_TOKENS = ("<|role_end|>", "<|endoftext|>")
_FAR_TOO_LONG = 8  # characters for every token that the context holds: with so many a count by pieces is worth it
_PIECE = 1 << 18
_NO_ID = 2**31  # and above
_DEMO = Path(__file__).parent / "data" / "demo"


@dataclass(frozen=True)
class TextModel:
    """What is needed to turn text into ids and back. folder holds the chat template."""

    tokens: Tokens
    stop_ids: frozenset[int]
    folder: Path

    @classmethod
    def load(cls, spec: EngineSpec) -> TextModel:
        """From a checkpoint folder, or from a script. Raises ModelError."""
        if spec.engine == "scripted":
            from ling_local.engine.script import ScriptedTokens, read_script

            script = read_script(Path(spec.model))
            folder = Path(spec.model).parent / script.template if script.template else _DEMO
            return cls(ScriptedTokens(script.pieces), frozenset({script.eos}), folder)
        if spec.dummy:
            from ling_local.engine.shapes import dummy_config
            from ling_local.text.numbered import NumberedTokens

            return cls(NumberedTokens(dummy_config(spec.dummy).vocab_size), frozenset(), _DEMO)
        from ling_local.text.tokenizer import Tokenizer

        folder = Path(spec.model)
        tokens = Tokenizer.load(folder)
        ends = {tokens.control[name] for name in _END_TOKENS if name in tokens.control}
        return cls(tokens, frozenset(ends | _eos_ids(folder)), folder)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template, read when it is first wanted. Raises ModelError."""
        from ling_local.text.template import ChatTemplate

        return ChatTemplate.load(self.folder)

    def encode(self, request: Request) -> list[int]:
        """The prompt's ids: raw text as it is, messages through the template. UsageError, ModelError."""
        if isinstance(request.prompt, str):
            return self.tokens.encode(request.prompt)
        return self.template.encode(self.tokens, request.prompt, thinking=request.thinking, tools=request.tools)

    def prompt_ids(self, request: Request, limit: int) -> tuple[int, ...]:
        """`encode` for a context of `limit` ids: UsageError too where there are none, ContextTooLong."""
        self._check_size(request, limit)
        return _fitting(self.encode(request), limit)

    def _check_size(self, request: Request, limit: int) -> None:
        """Refuse a text that is many times too long before all of it is encoded: a log of gigabytes, say.

        Raises ContextTooLong. A count by pieces may be off by a few tokens, so only twice too much is too much here.
        """
        prompt = request.prompt
        texts = [prompt] if isinstance(prompt, str) else [message.content for message in prompt]
        if sum(map(len, texts)) <= _FAR_TOO_LONG * limit:
            return
        num = 0
        for text in texts:
            for start in range(0, len(text), _PIECE):
                num += len(self.tokens.encode(text[start : start + _PIECE]))
                if num > 2 * limit:
                    raise context_too_long(2 * limit, limit, counted=False)


class CancelToken:
    """Ends a running `generate` from another thread or a signal handler; it then ends with CANCELLED."""

    def __init__(self) -> None:
        self._asked = False
        self._generation: Generation | None = None

    def cancel(self) -> None:
        """Any number of times; before the start too."""
        self._asked = True  # written first, and read last in attach: one of the two sees the other
        if self._generation is not None:
            self._generation.cancel()

    def attach(self, generation: Generation) -> None:
        self._generation = generation
        if self._asked:
            generation.cancel()


def generate(
    engine: Engine,
    text_model: TextModel,
    request: Request,
    cancel: CancelToken | None = None,
    *,
    ids: Sequence[int] | None = None,
) -> Iterator[Event]:
    """Run a request. Closing the iterator cancels it, and so does an exception inside of it (Ctrl-C).

    ids: those of the prompt, where `text_model.prompt_ids` has made them before.

    Waits for an engine that still loads; figures start after that. Raises before work: ContextTooLong,
    UsageError (no prompt, a negative max_tokens), EngineBusy; and whatever the engine fails with.
    """
    limit = engine.info.context_limit
    taken_s = time.monotonic()
    ids = text_model.prompt_ids(request, limit) if ids is None else _fitting(ids, limit)
    max_tokens = limit - len(ids) if request.max_tokens is None else request.max_tokens
    if max_tokens < 0:
        raise UsageError(f"max_tokens is {max_tokens}", "Give 0 or more.")
    tally = Tally(taken_s, len(ids), limit)
    if max_tokens == 0:
        yield Finish(FinishReason.LENGTH, tally.stats())
        return
    stop_ids = frozenset() if request.ignore_eos else text_model.stop_ids
    asked = TokenRequest(
        ids,
        request.sampling,
        min(max_tokens, limit - len(ids)),
        stop_ids,
        request.draft,
        request.full_width,
    )
    reader = _reader(text_model, request)
    yield from _events(engine, asked, _budget(text_model, request, reader), reader, tally, cancel)


def _fitting(ids: Sequence[int], limit: int) -> tuple[int, ...]:
    if not ids:
        raise UsageError("the prompt is empty", "Give some text to go on from.")
    if len(ids) >= limit:
        raise context_too_long(len(ids), limit)
    return tuple(ids)


@dataclass(frozen=True, slots=True)
class _Budget:
    """Thinking ends after num_tokens with the id close_id, unless it has ended by then."""

    num_tokens: int
    close_id: int


def _budget(text_model: TextModel, request: Request, reader: RawText | ChatText) -> _Budget | None:
    """None where nothing is to be limited: no budget, no thinking, or no token that ends it."""
    close_id = text_model.tokens.control.get("</think>")
    if request.think_budget is None or close_id is None or reader.channel is not Channel.THINKING:
        return None
    return _Budget(max(request.think_budget, 0), close_id)


def _events(
    engine: Engine,
    asked: TokenRequest,
    budget: _Budget | None,
    reader: RawText | ChatText,
    tally: Tally,
    cancel: CancelToken | None,
) -> Iterator[Event]:
    """All events of a request: one generation, or two where the thinking has a budget within its limit."""
    made: list[int] = []
    reason: FinishReason | None = None
    if budget is not None and budget.num_tokens < asked.max_tokens:
        reason = None if budget.num_tokens else FinishReason.LENGTH
        if budget.num_tokens:
            thought = replace(asked, max_tokens=budget.num_tokens)
            reason = yield from _run(engine, thought, made, reader, tally, cancel, last=False)
        if reason is FinishReason.LENGTH:
            if reader.channel is Channel.THINKING:
                made.append(budget.close_id)
                yield from _joined((channel, text, ()) for channel, text in reader.push(budget.close_id))
                yield TokenEvent("", (budget.close_id,))  # of the answer: nobody thought it
            rest = asked.max_tokens - len(made)
            asked = replace(asked, ids=(*asked.ids, *made), max_tokens=rest)
            reason = None if rest > 0 else FinishReason.LENGTH
            if rest <= 0:
                yield from _joined((channel, text, ()) for channel, text in reader.close())
    if reason is None:
        reason = yield from _run(engine, asked, made, reader, tally, cancel)
    yield Finish(reason, tally.stats(), tuple(made))


def _run(
    engine: Engine,
    asked: TokenRequest,
    made: list[int],
    reader: RawText | ChatText,
    tally: Tally,
    cancel: CancelToken | None,
    last: bool = True,
) -> Generator[Event, None, FinishReason]:
    """The events of one generation, and why it ended. Adds its ids to made.

    last: it ends the request whatever its reason; else a LENGTH leaves the reader open.
    """
    generation = engine.generate(asked)
    if cancel is not None:
        cancel.attach(generation)
    steps = iter(generation)
    reason: FinishReason | None = None
    try:
        if isinstance(reader, RawText):
            reader.read_prompt()  # while the engine does
        while reason is None:
            try:
                step = next(steps, None)
                if step is None:
                    raise EngineError("the engine stopped without a reason", "Try again.")
            except (Exception, KeyboardInterrupt):
                yield from _joined((channel, text, ()) for channel, text in reader.close())
                raise
            pieces = list(_take(step, reader, asked.stop_ids))
            num_ids = sum(len(ids) for _, _, ids in pieces)
            made += step.ids[:num_ids]
            reason = FinishReason.STOP if reader.hit else step.finish
            if reason is not None and (last or reason is not FinishReason.LENGTH):
                pieces += [(channel, text, ()) for channel, text in reader.close()]
            tally.add(
                step,
                num_ids,
                num_thinking=sum(len(ids) for channel, _, ids in pieces if channel is Channel.THINKING),
                has_answer=any(c is Channel.ANSWER and (text or {*ids} - asked.stop_ids) for c, text, ids in pieces),
            )
            yield from _joined(pieces)
            yield StatsEvent(tally.stats())
    finally:
        generation.cancel()  # after a stop: what the engine has run ahead is dropped
        if isinstance(steps, Generator):
            steps.close()
    return reason


def _take(
    step: StepResult, reader: RawText | ChatText, stop_ids: frozenset[int]
) -> Iterator[tuple[Channel, str, tuple[int, ...]]]:
    """Pieces of a step up to a stop: text as it comes loose, each id with the first piece that it led to."""
    for token_id in step.ids:
        before = reader.channel  # a tag belongs to what it ends
        pieces = [] if token_id in stop_ids else reader.push(token_id)
        ids = (token_id,)
        for channel, text in pieces or [(before, "")]:
            yield channel, text, ids
            ids = ()
        if reader.hit:
            return


def _joined(pieces: Iterable[tuple[Channel, str, tuple[int, ...]]]) -> Iterator[TokenEvent]:
    """One event for each run of pieces in the same channel; none for nothing."""
    for channel, run in groupby(pieces, key=lambda piece: piece[0]):
        texts, ids = [], []
        for _, text, some in run:
            texts.append(text)
            ids += some
        if ids or any(texts):
            yield TokenEvent("".join(texts), tuple(ids), channel)


def _reader(text_model: TextModel, request: Request) -> RawText | ChatText:
    if isinstance(request.prompt, str):
        return RawText(text_model.tokens, request.stop, request.prompt if request.code_stop else None)
    first = text_model.template.first_channel(request.thinking)
    return ChatText(text_model.tokens, request.stop, Channels(first, has_calls=bool(request.tools)))


def _eos_ids(folder: Path) -> set[int]:
    """Ids that the checkpoint's own files name as ends; one that no vocabulary has ends nothing. ModelError."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        try:
            data: Any = json.loads((folder / name).read_text(encoding="utf-8-sig"))
            value = data.get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise ModelError(f"{folder / name}: {error}", "Get the model's files again.") from error
        values = value if isinstance(value, list) else [value]
        ids.update(token_id for token_id in values if isinstance(token_id, int) and 0 <= token_id < _NO_ID)
    return ids
