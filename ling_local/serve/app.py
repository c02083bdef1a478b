"""The routes of the API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ling_local.errors import LingError
from ling_local.serve import shapes
from ling_local.serve.answer import LEFT, Answer, Document, error_response
from ling_local.serve.errors import ApiError
from ling_local.serve.guard import Gate, Guard, read_body, with_origins
from ling_local.serve.service import Service, fresh_seed
from ling_local.serve.wire import Call, check_model, read_chat, read_completion, read_json
from ling_local.settings import Settings

Reader = Callable[[Mapping[str, Any], Settings, int], Call]


def make_app(service: Service, gate: Gate, origins: tuple[str, ...] = ()) -> ASGIApp:
    """The whole application, guarded. origins: of web pages that may read the answers."""
    routes = [
        Route("/health", _health(service), methods=["GET"]),
        Route("/v1/models", _models(service), methods=["GET"]),
        Route("/v1/models/{name:path}", _model(service), methods=["GET"]),
        Route("/v1/chat/completions", _asked(service, read_chat), methods=["POST"]),
        Route("/v1/completions", _asked(service, read_completion), methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {ApiError: _told, LingError: _told, HTTPException: _http_error, Exception: _told}
    app = Starlette(routes=routes, exception_handlers=handlers)
    return with_origins(Guard(app, gate, service.say), origins)


def _asked(service: Service, read: Reader) -> Callable[[Request], Any]:
    async def answer(request: Request) -> Any:
        try:
            service.ready()
            body = read_json(await read_body(request))
            check_model(body, service.names)
            call = read(body, service.settings, fresh_seed())
            return Answer(service, *await service.prepare(call))
        except ClientDisconnect:
            request.scope[LEFT] = True
            return Response(status_code=400)  # nobody reads it
        except Exception as error:
            service.failed(error)
            return error_response(error)

    return answer


def _health(service: Service) -> Callable[[Request], Any]:
    async def health(request: Request) -> Document:
        slot, status = service.slot, "ok"
        try:
            service.ready()
        except ApiError as error:
            status = str(error.code)  # loading, stopping
        except LingError as error:
            service.failed(error)
            status = "failed"
        document = {"status": status, "model": service.names[0], "busy": slot.is_busy, "waiting": slot.num_waiting}
        return Document(document, 200 if status == "ok" else 503)

    return health


def _entry(service: Service) -> dict[str, Any]:
    return shapes.model_entry(service.names[0], service.created, service.ready().context_limit)


def _models(service: Service) -> Callable[[Request], Any]:
    async def models(request: Request) -> Document:
        return Document({"object": "list", "data": [_entry(service)]})

    return models


def _model(service: Service) -> Callable[[Request], Any]:
    async def model(request: Request) -> Document:
        check_model({"model": request.path_params["name"]}, service.names)
        return Document(_entry(service))

    return model


async def _told(request: Request, error: Exception) -> Document:
    return error_response(error)


async def _http_error(request: Request, error: HTTPException) -> Document:
    """No such path, or not by this method."""
    if error.status_code == 404:
        message = (
            f"nothing is at {request.url.path}; there are /v1/chat/completions, /v1/completions, /v1/models, /health"
        )
    else:
        message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))
