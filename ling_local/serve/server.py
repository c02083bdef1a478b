"""The server: a port that is taken before weights are loaded, uvicorn on it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ling_local.engine.protocol import EngineInfo
from ling_local.errors import LingError, UsageError
from ling_local.serve.service import Service

_END_S = 3  # for the last bytes of cancelled answers


def bind(host: str, port: int) -> socket.socket:
    """A socket that holds the port; who comes waits. Raises UsageError, or LingError where it is not to be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {host}: {reason}", "Give an address of this machine, such as 127.0.0.1.") from None
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen()  # until then another server could bind the same port
    except OSError as error:
        bound.close()
        raise _not_bound(host, port, error) from None
    return bound


def _not_bound(host: str, port: int, error: OSError) -> LingError:
    if error.errno == errno.EADDRINUSE:
        hint = "Stop that program, or choose another with --port; --port 0 takes a free one."
        return LingError(f"port {port} is in use by another program", hint)
    if error.errno == errno.EACCES:
        return LingError(f"port {port} is for administrators only", "Choose one from 1024 up with --port.")
    if error.errno == errno.EADDRNOTAVAIL:
        return UsageError(f"--host {host} is no address of this machine", "127.0.0.1 always is one.")
    return LingError(f"port {port} of {host} cannot be opened: {error.strerror}")


def is_local(bound: socket.socket) -> bool:
    """Only programs on this machine can reach it."""
    return ipaddress.ip_address(bound.getsockname()[0].partition("%")[0]).is_loopback


def address_of(bound: socket.socket) -> str:
    """`http://127.0.0.1:5464`, with the port that it really has."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    """Tells us of the signal that ends it as soon as it comes."""

    def __init__(self, config: uvicorn.Config, on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_end = on_end

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        self._on_end()


class _Log(logging.Handler):
    """Uvicorn's own warnings, as lines of ours, with the trace of what nobody foresaw."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        is_upgrade = record.getMessage().startswith(("Unsupported upgrade", "No supported WebSocket"))
        if not is_upgrade and not isinstance(error, asyncio.CancelledError):  # cancelled: its time was up at the end
            self._say(f"ling: {self.format(record).rstrip()}")


class Host:
    """Runs the application until a signal or a failure ends it."""

    def __init__(self, service: Service, app: ASGIApp, bound: socket.socket) -> None:
        self._service = service
        self._bound = bound
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        config = uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_END_S,
        )
        self._server = _Server(config, self._wind_down)
        service.on_fatal = self._fail

    def run(self, load: Callable[[], EngineInfo], on_ready: Callable[[EngineInfo], None]) -> None:
        """Serve until Ctrl-C, with which it comes back. load waits for the weights; on_ready is told when it has.

        Raises what load raises, and what ends the engine. SIGTERM goes on to its own handler at the end.
        """
        log, handler = logging.getLogger("uvicorn"), _Log(self._service.say)
        log.addHandler(handler)
        try:
            asyncio.run(self._serve(load, on_ready))
        except KeyboardInterrupt:
            pass
        finally:
            log.removeHandler(handler)
        if self._failure is not None:
            raise self._failure

    async def _serve(self, load: Callable[[], EngineInfo], on_ready: Callable[[EngineInfo], None]) -> None:
        self._loop = asyncio.get_running_loop()

        def wait() -> None:
            try:
                info = load()
            except BaseException as error:
                self._fail(error)
            else:
                self._call(self._ready, info, on_ready)

        threading.Thread(target=wait, name="load", daemon=True).start()
        await self._server.serve([self._bound])

    def _ready(self, info: EngineInfo, on_ready: Callable[[EngineInfo], None]) -> None:
        if not self._service.slot.is_closed:
            self._service.loaded(info)
            on_ready(info)

    def _fail(self, error: BaseException) -> None:
        """From any thread: the first failure ends the server."""
        self._failure = self._failure or error
        self._server.should_exit = True
        self._wind_down()

    def _wind_down(self) -> None:
        """From any thread and from a signal handler."""
        self._call(self._service.slot.close)

    def _call(self, action: Callable[..., None], *args: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: there is nothing left to wind down
                self._loop.call_soon_threadsafe(action, *args)
