"""The way of every generated response: on the engine, as one JSON or as a stream, off the engine again.

Owns what is true of both routes: how many requests a key has running, which ids can be aborted, usage, one log line a
request. A reply knows how its route writes things.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from fastapi import Request, Response

from runtime.request import RefusedError
from runtime.server.choices import Choice, Run, Step
from runtime.server.errors import ApiError, from_engine
from runtime.server.protocol import Sampling
from runtime.server.replies import Json
from runtime.server.requests import Identity
from runtime.server.service import Service
from runtime.server.stream import DONE, EventStream, event, unless_gone

log = logging.getLogger(__name__)


class Reply(Protocol):
    """How a route writes its response."""

    def chunks(self, step: Step) -> list[dict[str, Any]]:
        """Return the stream's chunks for a step."""
        ...

    def add(self, step: Step) -> None:
        """Take a step of a response that is sent whole."""
        ...

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the whole response."""
        ...

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Return the stream's last chunk."""
        ...


class Ticket:
    """A response's place on the server; `close` gives it back, however the response ended."""

    def __init__(self, service: Service, identity: Identity, key: str | None, prompts: Sequence[int]) -> None:
        """Take a place; 429 when the key has none left. `prompts`: tokens of each."""
        self._service, self._identity, self._key, self._prompts = service, identity, key, prompts
        self.waits = service.config.waits
        self._began = time.monotonic()
        self._run: Run | None = None
        self._error: ApiError | None = None
        limit = service.config.limits.requests_per_key
        running = service.per_key.get(key or "", 0)
        if limit is not None and running >= limit:
            message = f"this key has {running} requests running; the limit is {limit}"
            raise ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", retry_after=1)
        service.per_key[key or ""] = running + 1

    def start(self, choices: list[Choice]) -> Run:
        """Put the choices on the engine; ApiError when it refuses them."""
        service = self._service
        try:
            self._run = Run(
                service.ready_engine(),
                choices,
                first_token_s=service.config.waits.first_token_s,
                on_tokens=service.metrics.on_tokens,
            )
        except RefusedError as error:
            raise from_engine(error) from None
        service.live |= {choice.request.id: self._identity.id for choice in choices}
        return self._run

    def refused(self, error: ApiError) -> None:
        """Note an error that is the response."""
        self._error = error

    def failed(self, error: ApiError) -> None:
        """Note and count an error that ends a stream."""
        self._error = error
        self._service.metrics.stream_errors.inc()

    def usage(self) -> dict[str, Any]:
        """Tokens so far. A prompt counts once, whatever its choices."""
        assert self._run is not None
        choices, each = self._run.choices, len(self._run.choices) // len(self._prompts)
        prompts, completion = sum(self._prompts), sum(choice.tokens for choice in choices)
        cached = sum(
            max(choice.cached_tokens for choice in choices[begin : begin + each])
            for begin in range(0, len(choices), each)
        )
        return {
            "prompt_tokens": prompts,
            "completion_tokens": completion,
            "total_tokens": prompts + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
        }

    def close(self) -> None:
        """End what still runs and say in the log what became of the request."""
        service = self._service
        left = service.per_key.pop(self._key or "") - 1
        if left:
            service.per_key[self._key or ""] = left
        if self._run is None:
            return
        self._run.close()
        choices = self._run.choices
        for choice in choices:
            service.live.pop(choice.request.id, None)
        log.info(
            "generated",
            extra={
                "id": self._identity.id,
                "key": self._key,
                "prompt_tokens": sum(self._prompts),
                "cached_tokens": max(choice.cached_tokens for choice in choices),
                "completion_tokens": sum(choice.tokens for choice in choices),
                "finish": [choice.finish or "cancelled" for choice in choices],
                "error": self._error and self._error.code,
                "seconds": round(time.monotonic() - self._began, 4),
            },
        )


async def answer(request: Request, ticket: Ticket, body: Sampling, choices: list[Choice], reply: Reply) -> Response:
    """Run the choices and return the response; the ticket is closed when it has been sent."""
    waits = ticket.waits
    try:
        run = ticket.start(choices)
        if body.stream:
            events = _events(run, ticket, body, reply)
            return EventStream(events, ticket, keep_alive_s=waits.keep_alive_s, stalled_s=waits.stalled_s)
        await unless_gone(request.receive, _collect(run, reply))
        whole = Json(reply.whole(ticket.usage()))
    except BaseException as error:
        if isinstance(error, ApiError):
            ticket.refused(error)
        ticket.close()
        raise
    ticket.close()
    return whole


async def _collect(run: Run, reply: Reply) -> None:
    async for step in run.steps():
        reply.add(step)


async def _events(run: Run, ticket: Ticket, body: Sampling, reply: Reply) -> AsyncGenerator[bytes, None]:
    options = body.stream_options
    continuous = options is not None and options.include_usage and options.continuous_usage_stats
    async for step in run.steps():
        for chunk in reply.chunks(step):
            yield event({**chunk, "usage": ticket.usage()} if continuous else chunk)
    if options is not None and options.include_usage:
        yield event(reply.usage_chunk(ticket.usage()))
    yield DONE
