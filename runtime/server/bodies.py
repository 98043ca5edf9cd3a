"""Reads request bodies: in time, within the operator's limits, into what the protocol says.

Owns that no body costs more than its bytes suggest: objects and lists are counted before anything is made of them,
since each costs a hundred times what a character does, and large bodies are read on a thread.
"""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from runtime.server.config import Limits
from runtime.server.errors import from_validation, invalid, timed_out, too_large
from runtime.server.stream import ClientGoneError

_BODY_SECONDS = 60.0
_INLINE_BYTES = 2**16
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string, or the beginning of one at the end; it never looks at a byte twice."""

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, model: type[Body], limits: Limits) -> Body:
    """Read and validate a body; ApiError says what is wrong with it."""
    raw = await _receive(request, limits.body_bytes)
    if len(raw) > _INLINE_BYTES:
        return await asyncio.to_thread(_validated, raw, model, limits)
    return _validated(raw, model, limits)


async def _receive(request: Request, limit: int) -> bytes:
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > limit:
        raise too_large(f"the body has {length[:20]} bytes; the limit is {limit}")
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > limit:
                    raise too_large(f"the body has more than {limit} bytes, which is the limit")
    except TimeoutError:
        raise timed_out(f"the body did not arrive within {_BODY_SECONDS:g} s") from None
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(body)


def _validated(raw: bytes, model: type[Body], limits: Limits) -> Body:
    found = count_containers(raw, limits.body_objects)
    if found > limits.body_objects:
        raise invalid(f"the body has {found} objects and lists; the limit is {limits.body_objects}")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def count_containers(raw: bytes, enough: int) -> int:
    """Count the objects and lists of a JSON text; no more than `enough` where strings need not be told apart for it."""
    most = raw.count(b"{") + raw.count(b"[")
    if most <= enough:
        return most
    bare = _STRING.sub(b"", raw)
    return bare.count(b"{") + bare.count(b"[")
