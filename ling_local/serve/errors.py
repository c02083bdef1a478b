"""Errors in OpenAI's shape, with the status code that clients act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ling_local.errors import ContextTooLong, LingError, UsageError

INVALID, RATE, SERVER = "invalid_request_error", "rate_limit_error", "server_error"


class ApiError(Exception):
    """An answer that is an error. param names the field of the request that is meant."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """What OpenAI calls the type."""
        if self.status == 429:
            return RATE
        return SERVER if self.status >= 500 else INVALID

    def body(self) -> dict[str, Any]:
        """The JSON document of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The request itself is wrong: sending it again changes nothing."""
    return ApiError(400, message, code, param)


def retry_later(message: str, code: str, seconds: int, status: int = 503) -> ApiError:
    """The same request may succeed after some seconds."""
    return ApiError(status, message, code, headers={"Retry-After": str(seconds)})


def stopping() -> ApiError:
    """The server is on its way out."""
    return ApiError(503, "the server is stopping", "stopping")


def from_exception(error: BaseException) -> ApiError:
    """What a client is told of any failure. Where it is none of ours: its kind only, the rest is for the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextTooLong):
        return bad_request(_sentence(error), None, "context_length_exceeded")
    if isinstance(error, UsageError):
        return bad_request(_sentence(error))
    if isinstance(error, LingError):
        return ApiError(500, _sentence(error), "engine_error")
    return ApiError(500, f"something unforeseen went wrong: {type(error).__name__}", "internal_error")


def _sentence(error: LingError) -> str:
    return f"{error.message}. {error.hint}" if error.hint else error.message
