"""JSON responses: compact, UTF-8, and one shape of error."""

from __future__ import annotations

from typing import Any

from fastapi import Response
from pydantic_core import to_json

from runtime.server.errors import ApiError


class Json(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401 - whatever JSON can hold
        """Encode the body."""
        return to_json(content)


def respond(error: ApiError) -> Json:
    """Return the response of an error."""
    return Json(error.body(), error.status, error.headers())
