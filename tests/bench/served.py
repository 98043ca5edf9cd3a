"""`runtime serve` as a process of its own, for the scripts of this folder, and the machine that it runs on."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.bench.client import Client
from runtime.demo.checkpoint import write_tokenizer

ROOT = Path(__file__).parents[2]
_DRAIN_SECONDS = 40
_LAST_WORDS = 2000


@dataclass(frozen=True)
class Server:
    """A running server: a process of ours, whose log is in a file, or one that somebody else started."""

    url: str
    began: float
    process: subprocess.Popen[str] | None = None
    log: Path | None = None

    async def ready(self, client: Client, limit_s: float) -> float:
        """Wait until it takes work; seconds since its start. SystemExit with its last words when it ends instead."""
        waiting = asyncio.ensure_future(client.ready(limit_s))
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=0.2)
            if self.process is not None and self.process.poll() is not None:
                waiting.cancel()
                raise SystemExit(_last_words(self.process, self.log))
        waiting.result()
        return time.monotonic() - self.began

    def end(self) -> int:
        """Let it drain, and return its exit code, killed when that takes too long; others' servers are left alone."""
        if self.process is None:
            return 0
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_DRAIN_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@contextmanager
def serving(arguments: Sequence[str], log: Path, url: str | None = None) -> Iterator[Server]:
    """Start it on any free port, ended afterwards if it still runs; or take the one at `url`."""
    began = time.monotonic()
    if url is not None:
        yield Server(url, began)
        return
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", "from runtime.cli import main; main()", "serve", "--port", "0", *arguments],
            env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if " at " not in line:
            process.wait(_DRAIN_SECONDS)
            raise SystemExit(_last_words(process, log))
        server = Server(line.split(" at ")[1].strip(), began, process, log)
        try:
            yield server
        finally:
            if process.poll() is None:
                server.end()
            process.stdout.close()


def _last_words(process: subprocess.Popen[str], log: Path | None) -> str:
    said = log.read_text(encoding="utf-8")[-_LAST_WORDS:] if log else ""
    return f"the server ended with {process.poll()}:\n{said}"


def write_geometry(model: Path, folder: Path) -> None:
    """A checkpoint folder without weights: the model's config, and the demo's tokenizer and template."""
    folder.mkdir()
    write_tokenizer(folder)
    (folder / "config.json").write_bytes(model.read_bytes())


def machine() -> dict[str, Any]:
    """Where and when a record is made; card and commit where there are any."""
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "python": platform.python_version(), "cores": os.cpu_count(), "load": os.getloadavg()[0],
    }  # fmt: skip
    commit = _said("git", "-C", str(ROOT), "rev-parse", "HEAD")
    card = _said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return found | ({"commit": commit} if commit else {}) | ({"card": card} if card else {})


def card_bytes() -> int | None:
    """Memory in use on the card, of several on the first that is visible; None without one."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
    which = ("-i", visible) if visible else ()
    used = _said("nvidia-smi", *which, "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    return int(used.split()[0]) * 2**20 if used else None


def resident_bytes(process: int) -> int:
    """Resident memory of a process, as Linux counts it."""
    pages = Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _said(*command: str) -> str:
    """What a command prints; nothing where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return done.stdout.strip() if done.returncode == 0 else ""
