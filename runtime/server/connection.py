"""One client's connection: uvicorn's, whose requests must begin in time and within a size, and errors have our shape.

Owns what happens before there is a request: a head that does not end, and bytes that are no HTTP.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runtime.server.errors import ApiError, invalid

if TYPE_CHECKING:
    from asyncio import TimerHandle

HEAD_BYTES = 2**16
HEAD_SECONDS = 30.0
_LINGER_SECONDS = 0.5


class Connection(HttpToolsProtocol):
    """Closes a connection whose request line and headers are larger than `HEAD_BYTES` or take over `HEAD_SECONDS`."""

    _head_bytes = 0
    _in_head = True
    _is_refused = False
    _timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Wait for the first request; what is written leaves at once."""
        super().connection_made(transport)
        bound = transport.get_extra_info("socket")
        if bound is not None and bound.family in (socket.AF_INET, socket.AF_INET6):
            # asyncio does so only for sockets made for TCP by name. Without it, on a connection that is used again, the
            # tokens of 40 ms wait for the client to acknowledge the first one.
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless a head grows too large."""
        if self._is_refused:
            return
        self._head_bytes += len(data) if self._in_head else 0
        super().data_received(data)
        if self._in_head and self._head_bytes > HEAD_BYTES and not self._is_refused:
            message = f"the request's line and headers have more than {HEAD_BYTES} bytes"
            self._refuse(ApiError(431, message, code="headers_too_large"))

    def on_message_begin(self) -> None:
        """A request begins; on a connection that is kept, only now."""
        super().on_message_begin()
        if not self._in_head:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is there; what follows is the body's business."""
        self._in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(invalid(msg, code="invalid_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: the request is answered as if it had not asked, which HTTP allows."""

    def _await_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse(self, error: ApiError) -> None:
        body = to_json(error.body())
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nx-request-id: {secrets.token_hex(12)}\r\nconnection: close\r\n\r\n"
        )
        self._is_refused = True
        self._stop_timer()
        self.transport.write(head.encode() + body)
        # closed at once, with bytes unread, the connection would be reset and the answer lost
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()


def http_settings() -> dict[str, Any]:
    """Return how uvicorn is to run."""
    return {
        "http": Connection,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "timeout_keep_alive": 65,
        "server_header": False,
    }
