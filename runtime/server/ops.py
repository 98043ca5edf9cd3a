"""Routes for operators and routers: what is served, whether it lives, what it does, and stopping a request."""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from runtime.constraints.grammar import version as grammar_version
from runtime.server.errors import ApiError, unavailable
from runtime.server.plan import describe
from runtime.server.protocol import AbortRequest
from runtime.server.replies import Json
from runtime.server.service import Service
from runtime.server.version import version


def models(service: Service) -> Response:
    """List the names under which the model is served."""
    return Json({"object": "list", "data": [_card(service, name) for name in service.text.names]})


def model(service: Service, name: str) -> Response:
    """Describe the model under one of its names."""
    return Json(_card(service, service.check_model(name)))


def _card(service: Service, name: str) -> dict[str, Any]:
    root = service.text.names[0]
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "counterpoint",
        "root": root,
        "parent": None if name == root else root,
        "max_model_len": service.text.max_model_len,
    }


def health(service: Service) -> Response:
    """Say whether the process lives: loading and draining are alive, a dead engine is not."""
    if service.engine is not None and service.engine.error is not None:
        raise unavailable("the engine has failed")
    return Json({"status": "alive"})


def ready(service: Service) -> Response:
    """Say whether new work is taken."""
    service.ready_engine()
    if not service.is_ready:
        raise unavailable("the engine takes no work")
    return Json({"status": "ready"})


def metrics(service: Service) -> Response:
    """Return Prometheus' text format."""
    return Response(service.metrics.expose(), media_type=CONTENT_TYPE_LATEST)


def show_version(_service: Service) -> Response:
    """Return the server's version."""
    return Json({"version": version()})


def server_info(service: Service) -> Response:
    """Return what is served and within which limits."""
    text, config = service.text, service.config
    engine = service.engine
    info: dict[str, Any] = {
        "version": version(),
        "models": list(text.names),
        "max_model_len": text.max_model_len,
        "vocab_size": text.vocab_size,
        "parser": text.dialect.name,
        "chat_template": text.template.origin if text.template else None,
        "tokenizer_digest": text.tokenizer.digest,
        "grammars": grammar_version(),
        "limits": config.limits.model_dump(),
        "waits": config.waits.model_dump(),
        "plan": describe(service.plan, str(config.plan)) if service.plan else None,
        "device": config.device,
        "card": service.card,
        "rows": engine.stats().rows if engine else None,
        "is_ready": service.is_ready,
    }
    return Json(info)


async def abort(service: Service, _request: Request, body: AbortRequest) -> Response:
    """End a response's choices, by the id of the response or of its request."""
    names = {body.request_id, f"chatcmpl-{body.request_id}", f"cmpl-{body.request_id}"}
    found = {choice: response for choice, response in service.live.items() if response in names}
    if not found:
        raise ApiError(404, f"no request {body.request_id!r} is running", code="not_found", param="request_id")
    engine = service.engine
    assert engine is not None, "what runs has an engine"
    for choice in found:
        engine.abort(choice)
    return Json({"aborted": sorted(set(found.values()))})


def reset_prefix_cache(service: Service) -> Response:
    """Forget all cached prefixes."""
    service.ready_engine().reset_prefix_cache()
    return Json({"status": "reset"})
