"""Exceptions that a person may see, and the one table of exit codes (used by cli/main.py only)."""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class LingError(Exception):
    """message says what and where; hint is the next step, a command where possible."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)  # both are args, so that pickling keeps them
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message


# what may end a run of which something is known by then
STOPS = (KeyboardInterrupt, SystemExit, LingError)


class UsageError(LingError):
    """The program was used wrongly: flags, input."""

    exit_code = EXIT_USAGE


class ConfigError(UsageError):
    """A setting, its file or its variable is wrong."""


class ContextTooLong(UsageError):
    """The prompt does not fit the context."""


class ModelError(LingError):
    """A model is not here, incomplete, damaged or unsupported."""


class DownloadError(LingError):
    """A transfer failed: network, disk."""


class EngineError(LingError):
    """The engine failed while it ran."""


class OutOfMemory(EngineError):
    """Host or device memory is short."""


class EngineDied(EngineError):
    """The engine process ended without a word."""


class ExchangeTimeout(EngineError):
    """A rank did not answer its peers in time."""


class NonFinite(EngineError):
    """Logits held NaN or Inf."""


class EngineBusy(EngineError):
    """A generation is under way already; there is one at a time."""


def context_too_long(num_prompt: int, limit: int, *, counted: bool = True) -> ContextTooLong:
    """The one wording for every route: a prompt must leave room for one token more, num_prompt < limit.

    counted False: it is at least so long, and nobody counted on.
    """
    at_least = "" if counted else "more than "
    return ContextTooLong(
        f"the prompt is {at_least}{num_prompt} tokens long; the context holds {limit}, at least one of them new",
        "Shorten the prompt, or raise the limit with --ctx where the model allows it.",
    )
