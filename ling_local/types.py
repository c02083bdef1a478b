"""The values that travel between rooms. All frozen; no torch, no terminal, no files.

The line is ``Request -> TokenRequest -> StepResult* -> Event*``: text and limits go in, ids and counts cross
the engine door, text and figures come out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Channel(StrEnum):
    """Where a piece of generated text belongs."""

    ANSWER = "answer"
    THINKING = "thinking"
    TOOL = "tool"


class FinishReason(StrEnum):
    """Why a generation ended."""

    EOS = "eos"  # the model ended the turn (an id of TokenRequest.stop_ids)
    STOP = "stop"  # a stop string, a finished code block, or a complete tool call
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"  # Ctrl-C, a reader that left


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model makes; arguments is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation. role is system, user, assistant or tool; content is plain text.

    ids: what the model generated for this turn, from after the generation prompt. Where their text is what the
    template would write, they stand in the next prompt as they are, so that the engine's state can be reused.
    """

    role: str
    content: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen. temperature 0 is greedy; top_k 0 and top_p 1.0 switch those filters off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What a front end asks for, complete: defaults are resolved before it is made.

    prompt      raw text to continue, or the messages of a conversation (chat template applied)
    max_tokens  None: as many as the context holds
    stop        stop strings; the text ends before the one that completes first
    thinking    the template's switch; ignored for raw text
    code_stop   raw text only: end when the open code block ends (text/code_stop.py)
    draft       speculate if the engine has a drafter
    full_width  verify every draft of every step, also where plain steps would be faster (bench)
    tools       JSON schemas as text, one object each, for the template
    ignore_eos  make exactly max_tokens tokens (bench)
    think_budget  conversations only: thinking that has taken this many tokens is closed, and the answer begins
    """

    prompt: str | tuple[Message, ...]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    thinking: bool = True
    code_stop: bool = False
    draft: bool = True
    tools: tuple[str, ...] = ()
    ignore_eos: bool = False
    full_width: bool = False
    think_budget: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """What crosses the engine door. ids is always the full prefix, at least one id.

    max_tokens is positive; the engine ends with LENGTH there, or earlier where the context is full.
    stop_ids end the generation with EOS; the stop id itself is the last id of the last step.
    full_width: draft at every step and verify all of it, whatever that costs.
    """

    ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 256
    stop_ids: frozenset[int] = frozenset()
    draft: bool = True
    full_width: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one verify step committed.

    ids       committed tokens, accepted drafts first, then the bonus token; cut at a stop id or limit
    drafted   drafts that this step verified
    accepted  ids beyond one: the last id of a step, cut or not, counts as its bonus token
    time_s    `time.monotonic()` of the engine when the step's tokens were known
    finish    set on the last step only; a last step may carry no ids (cancelled)
    cached, prefilled   set on the first step: prompt tokens found in the state, and computed
    prefill_s time spent on the prefill, on the first step
    gpu_s     what the step took on a GPU by its own clock, 0 on a CPU
    """

    ids: tuple[int, ...]
    drafted: int = 0
    accepted: int = 0
    time_s: float = 0.0
    finish: FinishReason | None = None
    cached: int = 0
    prefilled: int = 0
    prefill_s: float = 0.0
    gpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of one generation, from token ids and the engine's clock. Times in seconds, None if undefined.

    ttft_s   request taken to the first token of any kind; ttfa_s: to the first token of the answer
    tpot_s   (t_last - t_first) / (tokens after the first step), None if there are none: with one token in the
             first step this is (t_last - t_first) / (n - 1); with four tokens every 20 ms it is 5 ms
    step_s   time between steps as the caller sees it, mean of all but the first; gpu_step_s: of the same steps on the
             GPU by its own clock, None on a CPU. What the one exceeds the other is the host's share.
    accepted_by_position   entry j: steps in which at least j+1 drafts were accepted
    accept_length          emitted tokens / verify steps, bonus counted, 1.0 with no drafts
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    thinking_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_position: tuple[int, ...] = ()
    ttft_s: float | None = None
    ttfa_s: float | None = None
    tpot_s: float | None = None
    step_s: float | None = None
    gpu_step_s: float | None = None
    prefill_s: float | None = None
    wall_s: float = 0.0
    context_limit: int = 0

    @property
    def tok_s(self) -> float | None:
        """Decode speed, 1 / TPOT."""
        return 1.0 / self.tpot_s if self.tpot_s else None

    @property
    def accept_length(self) -> float | None:
        """Emitted tokens per verify step; None before the first step."""
        return self.tokens / self.steps if self.steps else None

    @property
    def rate(self) -> float | None:
        """Share of the verified drafts that were accepted; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def rate_by_position(self) -> tuple[float, ...]:
        """Entry j: share of all steps in which at least j+1 drafts were accepted. 1 + their sum is accept_length."""
        return tuple(count / self.steps for count in self.accepted_by_position)

    @property
    def rate_given_previous(self) -> tuple[float, ...]:
        """Entry j: of the steps that accepted j drafts, the share that accepted one more."""
        counts = (self.steps, *self.accepted_by_position)
        return tuple(later / sooner for sooner, later in pairwise(counts))


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Text that may be shown, with the ids that were committed since the last one (may be empty)."""

    text: str
    ids: tuple[int, ...] = ()
    channel: Channel = Channel.ANSWER


@dataclass(frozen=True, slots=True)
class StatsEvent:
    """Figures so far, after a step."""

    stats: Stats


@dataclass(frozen=True, slots=True)
class Finish:
    """The last event of a generation.

    ids: all that it made, up to the one that completed a stop; a </think> that a thinking budget put in is there
    too, though the model did not make it and the figures do not count it.
    """

    reason: FinishReason
    stats: Stats
    ids: tuple[int, ...] = ()


Event = TokenEvent | StatsEvent | Finish
