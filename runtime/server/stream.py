"""Server-sent events over ASGI, and noticing that a client has gone.

Owns when the first byte leaves: with the first event, so that whatever fails before it keeps its HTTP status, or after
one keep-alive interval, when a comment says that the request still waits. An error after that is one event with the
error object, and the end; a stream without an error ends with [DONE].
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fastapi import Response
from pydantic_core import to_json

from runtime.server.errors import ApiError, server_error
from runtime.server.logs import trace
from runtime.server.replies import respond

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_COMMENT = b": waiting\n\n"
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


def event(data: Any) -> bytes:  # noqa: ANN401 - whatever JSON can hold
    """Return one event; JSON holds no raw line break, so it is one line."""
    return b"data: " + to_json(data) + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], *signs: Coroutine[Any, Any, None]) -> T:
    """Return what `work` returns, but cancel it as soon as the client is gone; ClientGoneError then.

    The client is gone when it closes the connection, or when one of `signs` returns.
    """
    working = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(sign) for sign in (_wait_for_close(receive), *signs)]
    try:
        await asyncio.wait({working, *others}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, *others):
            task.cancel()
        await asyncio.gather(working, *others, return_exceptions=True)


async def _wait_for_close(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class StreamListener(Protocol):
    """Hears how a stream goes on."""

    def refused(self, error: ApiError) -> None:
        """An error came in time to be the response's status."""
        ...

    def failed(self, error: ApiError) -> None:
        """An error came after the first byte."""
        ...

    def close(self) -> None:
        """The stream has ended, however; called once it was sent at all."""
        ...


class EventStream(Response):
    """Sends what `events` yields. A client that takes nothing for `stalled_s` is given up."""

    def __init__(
        self, events: AsyncGenerator[bytes, None], listener: StreamListener, *, keep_alive_s: float, stalled_s: float
    ) -> None:
        """Send nothing yet."""
        super().__init__(status_code=200, headers=_HEADERS)
        del self.headers["content-length"]
        self._events, self._listener = events, listener
        self._keep_alive_s, self._stalled_s = keep_alive_s, stalled_s
        self._sending = asyncio.Lock()
        self._is_started = False
        self._last = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream until it ends or the client is gone; either way the generator is closed."""
        self._last = time.monotonic()
        try:
            await unless_gone(receive, self._send_all(send), self._tick(send))
        except ClientGoneError:
            log.debug("the client is gone")
        except ApiError as error:
            self._listener.refused(error)
            await respond(error)(scope, receive, send)
        finally:
            self._listener.close()

    async def _send_all(self, send: Send) -> None:
        """Send all events and the end; an error that can still be a status passes through."""
        try:
            async with aclosing(self._events) as events:
                async for each in events:
                    await self._send(send, each)
        except Exception as error:  # noqa: BLE001 - sent as an event, its place logged
            shown = error if isinstance(error, ApiError) else server_error()
            if shown is not error:
                log.error("a stream failed", extra=trace(error))  # noqa: TRY400 - no texts
            if not self._is_started:
                raise shown from None
            self._listener.failed(shown)
            await self._send(send, event(shown.body()))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, send: Send, body: bytes) -> None:
        async with self._sending:
            if not self._is_started:
                self._is_started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": body, "more_body": True})
            self._last = time.monotonic()

    async def _tick(self, send: Send) -> None:
        """Send a comment when nothing was sent for a while; return when nothing can be sent any more."""
        while True:
            wait = self._last + self._keep_alive_s - time.monotonic()
            if wait > 0:
                await asyncio.sleep(wait)
                continue
            try:
                async with asyncio.timeout(self._stalled_s):
                    await self._send(send, _COMMENT)
            except TimeoutError:
                log.warning("a client stopped reading its stream")
                return
