"""Who may come in: API keys and admin keys, from flags, environment and files that may change while the server runs.

Owns comparing, in constant time, and reloading. Keeps digests only, and names a key by four digits of its digest; keys
themselves are never logged.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel.config import ConfigError
from runtime.server.errors import ApiError
from runtime.server.replies import respond

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/ready"})
ADMIN_PATHS = frozenset({"/abort", "/reset_prefix_cache"})
_RELOAD_SECONDS = 1.0


class KeyRing:
    """Keys of one kind: some fixed, others one a line in a file, where lines that begin with # are comments.

    A key that nobody could send would leave its owner outside, or the server open, so it is refused.
    """

    def __init__(self, fixed: Iterable[str], path: str | None) -> None:
        """Read the file, if there is one; ConfigError when it cannot be read, holds no key, or one that is none."""
        self._fixed = {_digest(_checked(key, "an API key")) for key in fixed}
        self._path = None if path is None else Path(path)
        self._from_file: set[bytes] = set()
        self._stamp: tuple[int, int] | None = None
        self._checked = 0.0
        if self._path is not None:
            self._read(self._path, must=True)

    @property
    def is_empty(self) -> bool:
        """Whether no key was ever asked for."""
        return not self._fixed and self._path is None

    def name_of(self, key: str) -> str | None:
        """Return a short name for a valid key, None for any other; compares with every key whatever it finds."""
        self._refresh()
        given, found = _digest(key), None
        for each in sorted(self._fixed | self._from_file):
            if hmac.compare_digest(given, each):
                found = each.hex()[:4]
        return found

    def _refresh(self) -> None:
        if self._path is None or time.monotonic() - self._checked < _RELOAD_SECONDS:
            return
        self._checked = time.monotonic()
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_size) != self._stamp:
                self._read(self._path)
                log.info("keys reloaded", extra={"keys": len(self._from_file)})
        except (OSError, ConfigError):
            log.exception("the key file cannot be read; the keys read before stay valid")

    def _read(self, path: Path, *, must: bool = False) -> None:
        try:
            stat = path.stat()
            lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}: the key file cannot be read: {error}") from None
        keys = {
            _checked(line, f"{path}, line {number}")
            for number, line in enumerate(lines, 1)
            if line and not line.startswith("#")
        }
        if must and not keys:
            raise ConfigError(f"{path}: holds no key; needed: one a line")
        self._from_file = {_digest(key) for key in keys}
        self._stamp = (stat.st_mtime_ns, stat.st_size)


def _checked(key: str, where: str) -> str:
    """Return a key as it is; the message of the ConfigError does not repeat it."""
    if not key:
        raise ConfigError(f"{where} is empty; needed: a key, or none at all")
    if not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where} cannot be sent in a header; needed: printable ASCII without spaces")
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Gate:
    """ASGI middleware: without a valid key only liveness and readiness answer, and `open_paths`.

    Puts the key's name into the request's state. Admin routes need an admin key; where there are API keys but no admin
    key, nobody has it.
    """

    def __init__(
        self, app: ASGIApp, keys: KeyRing, admin_keys: KeyRing, open_paths: frozenset[str] = OPEN_PATHS
    ) -> None:
        """Guard `app`."""
        self._app, self._keys, self._admin_keys, self._open_paths = app, keys, admin_keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request pass or answer it."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                scope.setdefault("state", {})["key"] = self._admit(scope)
            except ApiError as error:
                await respond(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _admit(self, scope: Scope) -> str | None:
        """Return the key's name, None where no keys are in use."""
        if self._keys.is_empty and self._admin_keys.is_empty:
            return None
        given = _bearer(scope)
        admin = self._admin_keys.name_of(given) if given else None
        if scope["path"] in ADMIN_PATHS:
            if admin is None:
                raise _refusal("this route needs an admin key")
            return admin
        if self._keys.is_empty:
            return admin
        name = self._keys.name_of(given) if given else None
        if name is None and admin is None:
            raise _refusal("the API key is not valid" if given else "an API key is needed: Authorization: Bearer KEY")
        return name or admin


def _bearer(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name.lower() == b"authorization":
            scheme, _, key = value.decode("latin-1").partition(" ")
            return key.strip() if scheme.lower() == "bearer" else None
    return None


def _refusal(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")
