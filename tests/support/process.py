"""`runtime serve` as a process of its own, with the demo model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import httpx2 as httpx


class Process:
    """A server on any free port; `end` it."""

    def __init__(
        self, *arguments: str, stderr: IO[str] | int = subprocess.PIPE, before: str = "", **environment: str
    ) -> None:
        """Start it with these arguments and variables; `before` is code that runs first."""
        code = f"{before}\nfrom runtime.cli import main; main()"
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **environment},
        )

    def url(self) -> str:
        """Where it says that it listens."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split(" at ")[1].strip()

    async def ready(self, client: httpx.AsyncClient, seconds: float = 60) -> None:
        """Wait until it takes work."""
        async with asyncio.timeout(seconds):
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)  # it tells only those who ask

    def end(self) -> None:
        """Kill it if it still runs, and read what it said."""
        self.process.kill()
        self.process.communicate()
