"""The HTTP application: routes, the order of what surrounds them, and every error in one shape.

Owns the OpenAPI description. What routes do is in their own modules.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from runtime.server import ops
from runtime.server.auth import OPEN_PATHS, Gate, KeyRing
from runtime.server.bodies import Body, read_body
from runtime.server.chat import create_chat
from runtime.server.completions import create_completion
from runtime.server.errors import ApiError, invalid, server_error
from runtime.server.logs import trace
from runtime.server.protocol import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from runtime.server.replies import Json, respond
from runtime.server.service import Service
from runtime.server.stream import ClientGoneError
from runtime.server.texts import detokenize, render_chat_prompt, render_completion_prompts, tokenize
from runtime.server.version import version

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]

_POSTS: dict[str, tuple[type[BaseModel], Callable[[Service, Request, Any], Awaitable[Response]]]] = {
    "/v1/chat/completions": (ChatRequest, create_chat),
    "/v1/completions": (CompletionRequest, create_completion),
    "/v1/chat/completions/render": (ChatRequest, render_chat_prompt),
    "/v1/completions/render": (CompletionRequest, render_completion_prompts),
    "/tokenize": (TokenizeRequest, tokenize),
    "/detokenize": (DetokenizeRequest, detokenize),
    "/abort": (AbortRequest, ops.abort),
}
_GETS: dict[str, Callable[[Service], Response]] = {
    "/v1/models": ops.models,
    "/health": ops.health,
    "/ready": ops.ready,
    "/metrics": ops.metrics,
    "/version": ops.show_version,
    "/server_info": ops.server_info,
}


def make_app(service: Service, keys: KeyRing, admin_keys: KeyRing, lifespan: Lifespan | None = None) -> ASGIApp:
    """Return the application of a service."""
    app = FastAPI(
        title="Counterpoint",
        version=version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    for path, (model, handler) in _POSTS.items():
        app.add_api_route(path, _posting(service, model, handler), methods=["POST"], openapi_extra=_body_of(model))
    for path, answer in _GETS.items():
        app.add_api_route(path, _getting(service, answer), methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", partial(ops.model, service), methods=["GET"], name="model")
    app.add_api_route("/reset_prefix_cache", _getting(service, ops.reset_prefix_cache), methods=["POST"])
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientGoneError, _on_client_gone)
    app.add_exception_handler(Exception, _on_failure)  # the framework answers with it, then raises what failed
    app.openapi = lambda: _describe(app)
    open_paths = OPEN_PATHS | ({"/metrics"} if service.config.open_metrics else set())
    gated = Gate(app, keys, admin_keys, open_paths)
    origins = list(service.config.allowed_origins)
    outer = gated
    if origins:
        outer = CORSMiddleware(
            gated,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id"],
        )
    routes = frozenset((*_POSTS, *_GETS, "/reset_prefix_cache", "/openapi.json"))
    return Envelope(outer, service, routes)


class Envelope:
    """The outermost layer: request ids in and out, one log line and one count a response, no error without a body."""

    def __init__(self, app: ASGIApp, service: Service, routes: frozenset[str]) -> None:
        """Wrap `app`; `routes` are the paths that logs and metrics name."""
        self._app, self._service, self._routes = app, service, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope["path"] = scope["path"].rstrip("/") or "/"
        scope.setdefault("state", {}).update(request_id=request_id, key=None)
        began, status = time.monotonic(), 0

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode("latin-1"))]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # extension modules panic with what is no Exception
            log.error("a request failed", extra={"request_id": request_id, **trace(error)})  # noqa: TRY400 - no texts
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            if not status:
                await respond(server_error())(scope, receive, sending)
        finally:
            route = scope["path"] if scope["path"] in self._routes else "other"
            self._service.metrics.http_requests.labels(route, str(status)).inc()
            extra = {"request_id": request_id, "method": scope["method"], "route": route, "status": status}
            level = logging.DEBUG if route in ("/health", "/ready", "/metrics") else logging.INFO
            log.log(level, "request", extra={**extra, "seconds": round(time.monotonic() - began, 4)})


def _request_id(scope: Scope) -> str:
    """The client's id for the request, if it is one that headers and logs can carry, else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            given = value.decode("latin-1")
            if given.isascii() and given.isprintable() and 0 < len(given) <= 128 and " " not in given:
                return given
    return secrets.token_hex(12)


def _posting(
    service: Service, model: type[Body], handler: Callable[[Service, Request, Body], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def post(request: Request) -> Response:
        return await handler(service, request, await read_body(request, model, service.config.limits))

    return post


def _getting(service: Service, answer: Callable[[Service], Response]) -> Callable[[], Awaitable[Response]]:
    async def get() -> Response:
        return answer(service)

    return get


async def _on_api_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return respond(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Routes and methods that are not there."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return respond(ApiError(404, f"there is no route {request.url.path[:200]}", code="not_found"))
    if error.status_code == 405:
        message = f"{request.url.path[:200]} does not take {request.method}"
        response = respond(ApiError(405, message, code="method_not_allowed"))
        response.headers.update(error.headers or {})
        return response
    return respond(invalid(str(error.detail)) if error.status_code < 500 else server_error())


async def _on_failure(_request: Request, _error: Exception) -> Response:
    """What nobody foresaw; the envelope logs it."""
    return respond(server_error())


async def _on_client_gone(_request: Request, _error: Exception) -> Response:
    """Nobody reads this; the log and the metrics say 499, as proxies do."""
    return Json({}, 499)


def _body_of(model: type[BaseModel]) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _describe(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document, bodies included: they are read by hand, so the framework does not know them."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
        for model, _ in _POSTS.values():
            schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[model.__name__] = schema
        app.openapi_schema = document
    return app.openapi_schema
