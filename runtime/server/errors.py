"""Every error a client can see, in one shape: {"error": {"message", "type", "param", "code"}}.

Owns status, type and code of each case. Messages never hold traces, class names or other requests' text.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from runtime.request import PromptTooLongError, QueueFullError, RefusedError, UnavailableError
from runtime.server.fields import RULE

RETRY_SECONDS = 5
"""How long a client is asked to wait for a server that loads, drains or has died: a restart, by a supervisor."""


class ApiError(Exception):
    """An error response; `retry_after` in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """Take the fields of the error object."""
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to the status."""
        headers: dict[str, str] = {}
        if self.retry_after is not None:
            headers["Retry-After"] = str(math.ceil(self.retry_after))
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request says something that cannot be."""
    return ApiError(400, message, param=param, code=code)


def too_long(message: str, param: str | None = None) -> ApiError:
    """400: the prompt does not fit."""
    return invalid(message, param, "context_length_exceeded")


def unavailable(message: str) -> ApiError:
    """503: the server loads, drains, or its engine has died."""
    return ApiError(503, message, kind="server_error", code="unavailable", retry_after=RETRY_SECONDS)


def timed_out(message: str) -> ApiError:
    """504: waiting or running took longer than the server allows."""
    return ApiError(504, message, kind="timeout", code="timeout")


def server_error(message: str = "the server failed on this request") -> ApiError:
    """500: our fault."""
    return ApiError(500, message, kind="server_error", code="server_error")


def too_large(message: str) -> ApiError:
    """413: the body has too many bytes."""
    return ApiError(413, message, code="request_too_large")


def from_engine(error: RefusedError) -> ApiError:
    """Translate what the engine says to a request that it does not take."""
    match error:
        case PromptTooLongError():
            return too_long(f"the prompt is too long: {error}")
        case QueueFullError(retry_after=seconds):
            return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", retry_after=seconds)
        case UnavailableError():
            return unavailable(str(error))
        case _:
            return invalid(str(error))


def from_validation(error: ValidationError) -> ApiError:
    """Translate pydantic's errors: the first is told, and `param` is where it is."""
    details = error.errors(include_url=False, include_input=False)
    first = min(details, key=_depth_first)
    if first["type"] == "json_invalid":
        return invalid(
            f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json"
        )
    if first["type"] == RULE:
        return invalid(first["msg"], first.get("ctx", {}).get("param"))
    where = ".".join(str(part) for part in first["loc"] if not _is_tag(part))
    message = first["msg"].removeprefix("Value error, ")
    return invalid(f"{where}: {message}" if where else message, where or None)


def _depth_first(detail: ErrorDetails) -> int:
    """Prefer the deepest error: of a union's branches it is the one that was meant."""
    return -len(detail["loc"])


def _is_tag(part: int | str) -> bool:
    """Whether a part of a location names a branch of a union, as in `list[...]` or `function-...`, and no key."""
    return isinstance(part, str) and (any(mark in part for mark in "[(") or part in ("str", "int", "float", "bool"))
