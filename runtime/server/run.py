"""Runs a server from its start to its end: loading, signals, draining, and what the process exits with.

Owns the life of the process. The socket is open while the model loads, so that probes see a server that is alive and
not ready. SIGTERM or Ctrl-C drains: nothing new is taken, what runs may end within the limit, then streams get an error
event; a second signal ends at once. Both exit 0. A failed step of the engine fails what is pending, and exits 1.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType

import uvicorn

from megakernel.config import ConfigError
from runtime.engine import AsyncEngine
from runtime.engine.async_engine import ENGINE_THREAD
from runtime.server.app import make_app
from runtime.server.auth import KeyRing
from runtime.server.checkpoint import load_text
from runtime.server.config import ServeConfig
from runtime.server.connection import http_settings
from runtime.server.loading import load_engine, place
from runtime.server.logs import start_logging
from runtime.server.metrics import Metrics
from runtime.server.plan import under_plan
from runtime.server.service import Service

log = logging.getLogger(__name__)

API_KEYS, ADMIN_KEYS = "COUNTERPOINT_API_KEY", "COUNTERPOINT_ADMIN_KEY"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_WATCH_SECONDS = 0.1
_LOADER = "load"
TEXT_THREADS = 4
"""Threads for texts too long for the loop: encoding the longest body takes half a gigabyte, some of which stays."""
_LAST_WORDS_SECONDS = 2.0
"""How long responses may take to leave once there is nothing left to generate."""


def serve(config: ServeConfig, say: Callable[[str], None]) -> int:
    """Serve until a signal or the engine's end; the exit code. `say` tells a person where the server listens."""
    start_logging()
    os.environ.setdefault("RAYON_NUM_THREADS", str(TEXT_THREADS))  # tokenizers would take a thread a core
    keys, admin_keys = key_rings(config)
    with tempfile.TemporaryDirectory(prefix="counterpoint-demo-") as scratch:
        folder = checkpoint_folder(config, Path(scratch))
        if config.model is None and not config.served_model_name:
            config = config.model_copy(update={"served_model_name": ("demo",)})
        config, plan = under_plan(config, folder)
        config = place(config, folder)
        text = load_text(folder, config)
        metrics = Metrics(text.names[0])
        service = Service(config, text, metrics, plan=plan)
        if keys.is_empty and config.host not in _LOOPBACK:
            log.warning("clients beyond this machine need no key", extra={"host": config.host})
        bound = _bind(config.host, config.port)
        port = bound.getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        say(f"serving {text.names[0]} at http://{host}:{port}")
        application = uvicorn.Config(
            make_app(service, keys, admin_keys),
            timeout_graceful_shutdown=int(_LAST_WORDS_SECONDS),
            **http_settings(),
        )
        host_process = Host(application, service, lambda: load_engine(folder, service))
        code = asyncio.run(host_process.live(bound))
    if any(thread.name in (_LOADER, ENGINE_THREAD) for thread in threading.enumerate()):
        _leave(code)
    return code


def _leave(code: int) -> None:
    """End the process beside a thread that computes: the interpreter's own end would abort it inside its C++."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def checkpoint_folder(config: ServeConfig, scratch: Path) -> Path:
    """Return the folder to serve; without one, the demo model, written to `scratch`."""
    if config.model is not None:
        folder = Path(config.model)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; needed: a Hugging Face checkpoint, or a TOML file")
        return folder
    from runtime.demo import write_checkpoint  # noqa: PLC0415 - it builds a model with torch

    write_checkpoint(scratch)
    return scratch


def key_rings(config: ServeConfig) -> tuple[KeyRing, KeyRing]:
    """Return the API keys and the admin keys, from flags, files and environment."""

    def in_environment(name: str) -> list[str]:
        value = os.environ.get(name)
        keys = [key.strip() for key in (value or "").split(",") if key.strip()]
        if value is not None and not keys:
            raise ConfigError(f"{name} is set and holds no key; needed: keys, separated by commas, or no such variable")
        return keys

    keys = KeyRing([*config.api_key, *in_environment(API_KEYS)], config.api_key_file)
    return keys, KeyRing(in_environment(ADMIN_KEYS), config.admin_key_file)


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        is_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        other = "--host: an address of this machine, or 0.0.0.0" if is_host else "--port, or 0 for any free one"
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another {other}"
        ) from None
    bound.settimeout(0)
    return bound


class Host(uvicorn.Server):
    """A uvicorn server that drains on its first signal and knows when its engine has died."""

    def __init__(self, config: uvicorn.Config, service: Service, load: Callable[[], AsyncEngine]) -> None:
        """`load` makes the engine, on a thread, while the server already answers probes."""
        super().__init__(config)
        self._service, self._load = service, load
        self._failure: BaseException | None = None
        self._drain: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def live(self, bound: socket.socket) -> int:
        """Serve on a bound socket until the end; the exit code. ConfigError when the model cannot be loaded."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text"))
        watching = asyncio.ensure_future(self._watch())
        try:
            await self.serve(sockets=[bound])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if self.force_exit:
            logging.getLogger("uvicorn.error").disabled = True  # it takes what is cancelled now for failed
        for task in self.server_state.tasks:  # what a second signal has left over
            task.cancel()
        engine = self._service.engine
        if engine is not None and not self.force_exit:
            await asyncio.to_thread(engine.close)
        if isinstance(self._failure, ConfigError):
            raise self._failure
        return 0 if self._failure is None else 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Drain at the first signal, end at the second."""
        del frame
        log.info("signal", extra={"signal": sig})
        if self._drain is not None or self._service.is_draining:
            self.force_exit = self.should_exit = True
            return
        self._service.is_draining = True
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._start_drain)

    def _start_drain(self) -> None:
        self._drain = asyncio.ensure_future(self._drain_engine())

    async def _drain_engine(self) -> None:
        if self._service.engine is not None:
            await self._service.engine.drain(self._service.config.waits.drain_s)
        self.should_exit = True

    async def _watch(self) -> None:
        """Load the engine, then wait for it to fail."""
        try:
            engine = await _on_daemon(self._load)
            self._service.engine = engine
            log.info("ready", extra={"models": list(self._service.text.names)})
            while engine.error is None:
                await asyncio.sleep(_WATCH_SECONDS)
            self._failure = engine.error
            log.error("the engine has failed; the server stops")
        except Exception as error:
            self._failure = error
            if not isinstance(error, ConfigError):
                log.exception("the model cannot be loaded")
        self.should_exit = True


async def _on_daemon(work: Callable[[], AsyncEngine]) -> AsyncEngine:
    """Run `work` on a thread that the end of the process does not wait for: weights take minutes to read."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[AsyncEngine] = loop.create_future()

    def settle(result: AsyncEngine | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        elif result is not None:
            done.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - raised where it is waited for
            error = raised
        with suppress(RuntimeError):  # the loop may be gone
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=_LOADER, daemon=True).start()
    return await done
