"""What stands before every request: the Host header, the key, the size of the body, and a line in the log."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ling_local.serve.answer import FIGURES, LEFT, error_response
from ling_local.serve.errors import ApiError
from ling_local.types import Stats

MAX_BODY_BYTES = 16 * 2**20
BODY_S = 30.0
OPEN_PATHS = frozenset({"/health"})
_PATH_CHARS = 200  # of a path in the log


@dataclass(frozen=True, slots=True)
class Gate:
    """Who may come in.

    hosts     names that a Host header may hold besides localhost and addresses
    is_local  bound to this machine only: then a Host that is an address has to be one of the loopback
    key       what a client has to show, None: nothing
    """

    hosts: tuple[str, ...] = ()
    is_local: bool = True
    key: str | None = None

    def check(self, path: str, headers: Headers) -> None:
        """Raises ApiError."""
        host = headers.get("host", "")
        if not self._knows(host):
            hint = "; allow a name with --allow-host" if host else ""
            raise ApiError(403, f"this server does not answer to the host {host!r}{hint}", "foreign_host")
        if self.key is None or path in OPEN_PATHS:
            return
        kind, _, given = headers.get("authorization", "").partition(" ")
        key = self.key.strip().encode("utf-8", "surrogateescape")
        if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), key):
            message = "the API key is wrong" if given else "an API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _knows(self, host: str) -> bool:
        """A web page can make a browser send anything to us, but not with a Host that is no name of its own: under
        another name than ours, its own name has been pointed at this machine."""
        name = _name_of(host).lower().rstrip(".")
        if name == "localhost" or {name, host.lower()} & {known.lower() for known in self.hosts}:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return address.is_loopback or not self.is_local


def _name_of(host: str) -> str:
    """The Host header without its port, and without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


class Guard:
    """ASGI middleware: refuses what the gate does not let in, and says a line about each request."""

    def __init__(self, app: ASGIApp, gate: Gate, say: Callable[[str], None]) -> None:
        self._app = app
        self._gate = gate
        self._say = say

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun_s = time.monotonic()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            self._gate.check(scope["path"], Headers(scope=scope))
        except ApiError as error:
            await error_response(error)(scope, receive, watched)
        else:
            await self._app(scope, receive, watched)
        if scope["path"] not in OPEN_PATHS:
            self._say(log_line(scope, status, time.monotonic() - begun_s))


def log_line(scope: Scope, status: int, took_s: float) -> str:
    """`14:03:59 POST /v1/chat/completions 200 0.41 s · 512 in (490 cached) · 64 out · TTFT 21 ms · accept 2.31`."""
    ended = "left" if scope.get(LEFT) else str(status)
    parts = [f"{time.strftime('%H:%M:%S')} {scope['method']} {scope['path'][:_PATH_CHARS]} {ended} {took_s:.2f} s"]
    stats = scope.get(FIGURES)
    if isinstance(stats, Stats):
        parts += [f"{stats.prompt_tokens} in ({stats.cached_tokens} cached)", f"{stats.tokens} out"]
        if stats.ttft_s is not None:
            parts.append(f"TTFT {stats.ttft_s * 1000:.0f} ms")
        if stats.drafted and stats.accept_length is not None:
            parts.append(f"accept {stats.accept_length:.2f}")
    return " · ".join(parts)


async def read_body(request: Request) -> bytes:
    """The JSON text of a request. Raises ApiError: another type, too large, or too slow to come."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # a form or plain text is what a foreign web page can send without being asked
        raise ApiError(415, "the body has to be of type application/json", "unsupported_media_type")
    length = request.headers.get("content-length", "0")
    too_large = ApiError(413, f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB", "body_too_large")
    if length.isdigit() and int(length) > MAX_BODY_BYTES:
        raise too_large
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                num_bytes += len(part)
                if num_bytes > MAX_BODY_BYTES:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY_S:.0f} s", "timeout") from None
    return b"".join(parts)


def with_origins(app: ASGIApp, origins: Sequence[str]) -> Any:
    """Let web pages of these origins read the answers; without any, no page of another origin can."""
    if not origins:
        return app
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(
        app,
        allow_origins=[origin.rstrip("/") for origin in origins],
        allow_methods=["GET", "POST"],
        allow_headers=["*"],  # the openai client has a dozen of its own
        expose_headers=["Retry-After"],
    )
