"""What HTTP adds to a token: from the moment a backend hands it over until a client has read its event.

    python tests/bench/http_latency.py [--tokens COUNT] [--out FILE]

The server runs in this process, clients in another one, both on this machine's clock. The backend is a metronome: with
1, 8 and 64 streams every stream gets a token each 8.9 ms (8 streams: 900 tok/s), then as fast as it goes with 8. Two
clients read in turn: the barest one possible, on raw sockets, and that of `runtime bench`, so that what the second adds
and the share of a core that it takes can be told. Prints one JSON record.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import uvicorn
from support.serving import VOCAB, ids, text_side

from runtime.bench.client import Client, connected
from runtime.bench.load import Load
from runtime.bench.sessions import TEXT, Ask, shared_body
from runtime.engine import AsyncEngine, EngineCore, EngineSettings
from runtime.engine.backend import Chunk, Result, Row
from runtime.server.app import make_app
from runtime.server.auth import KeyRing
from runtime.server.config import ServeConfig
from runtime.server.connection import http_settings
from runtime.server.metrics import Metrics
from runtime.server.run import Host
from runtime.server.service import Service

STREAM_TOKENS_PER_S = 900 / 8
READERS = ("raw", "runtime bench")


class Metronome:
    """A backend that gives every row a token at each tick, and notes when."""

    vocab_size, rows, page_tokens, windows, pages = VOCAB, 64, 64, (None,), (64 * 32,)
    max_context_tokens, prefill_tokens, prefill_layers, max_steps = 2048, (64, 4096), 1, 1
    decodes_ahead = False

    def __init__(self, interval: float) -> None:
        """Tick every `interval` seconds, 0 without pause."""
        self.interval, self.token = interval, ids("a")[0]
        self.times: defaultdict[int, list[float]] = defaultdict(list)
        self._next = 0.0

    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        return tuple(self._one(span.sampling.seed) for span in chunk.spans)

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        del steps
        self._next = max(self._next + self.interval, time.monotonic())
        time.sleep(max(0.0, self._next - time.monotonic()))
        return tuple(self._one(row.sampling.seed) for row in rows)

    def _one(self, seed: int) -> Result:
        self.times[seed].append(time.monotonic())
        return Result(tokens=(self.token,))


async def measure(streams: int, interval: float, tokens: int, reader: str) -> dict[str, float | str]:
    """Run one load; milliseconds that HTTP and reader added, tokens a second, and the reader's share of a core."""
    metrics = Metrics("demo")
    service = Service(ServeConfig(), text_side(window=2048), metrics)
    backend = Metronome(interval)
    service.engine = engine = AsyncEngine(EngineCore(backend, EngineSettings(prefix_cache=False), metrics))
    app = make_app(service, KeyRing([], None), KeyRing([], None))
    host = Host(uvicorn.Config(app, **http_settings()), service, lambda: engine)
    bound = socket.create_server(("127.0.0.1", 0))
    bound.setblocking(False)
    running = asyncio.ensure_future(host.live(bound))
    port = bound.getsockname()[1]
    try:
        client = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", reader, str(port), str(streams), str(tokens), stdout=subprocess.PIPE
        )
        output, _ = await client.communicate()
    finally:
        host.should_exit = True
        await running
    found = json.loads(output)
    arrivals: dict[str, list[float]] = found["arrivals"]
    added = sorted(
        1e3 * (arrived - made)
        for seed, times in arrivals.items()
        for arrived, made in zip(times[1:], backend.times[int(seed)][1:], strict=True)
    )
    first = min(times[0] for times in backend.times.values())
    last = max(times[-1] for times in arrivals.values())
    return {
        "reader": reader,
        "reader_cpu_share": round(found["cpu_s"] / (last - first), 3),
        "streams": streams,
        "tokens": len(added),
        "tokens_per_s": round(len(added) / (last - first), 1),
        "added_ms_median": round(statistics.median(added), 3),
        "added_ms_p95": round(added[int(0.95 * len(added))], 3),
        "added_ms_p99": round(added[int(0.99 * len(added))], 3),
    }


def cell(streams: int, interval: float, tokens: int, reader: str) -> dict[str, float | str]:
    """Run one load in an event loop of its own."""
    return asyncio.run(measure(streams, interval, tokens, reader))


async def read_raw(port: int, seed: int, tokens: int) -> list[float]:
    """Read a stream from a raw socket; when each token's event arrived."""
    body = json.dumps({"prompt": [20], "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": seed})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + body).encode())
    times: list[float] = []
    while len(times) < tokens:
        line = await reader.readline()
        if line.startswith(b"data: {"):
            # a chunk may hold several tokens when the server had fallen behind
            text = json.loads(line[6:])["choices"][0]["text"]
            times += [time.monotonic()] * len(text)
    writer.close()
    return times


async def run_client(reader: str, port: int, streams: int, tokens: int) -> None:
    """Open streams and print when each token's event arrived, and the processor time that reading took."""
    if reader == "raw":
        begin = time.process_time()
        found = await asyncio.gather(*(read_raw(port, seed, tokens) for seed in range(1, streams + 1)))
    else:
        async with connected() as http:
            client = Client(http, f"http://127.0.0.1:{port}")
            load = Load(num_prompts=streams, random_output_len=tokens)
            client.shared = shared_body(load, "demo")
            asks = [Ask(TEXT, {"prompt": [20], "max_tokens": tokens, "seed": seed}) for seed in range(1, streams + 1)]
            begin = time.process_time()
            answers = await asyncio.gather(*(client.ask(ask, time.perf_counter()) for ask in asks))
        # on Linux both clocks are the same one
        found = [[moment for moment, count in each.arrivals for _ in range(count)] for each in answers]
    spent = time.process_time() - begin
    print(json.dumps({"arrivals": dict(enumerate(found, start=1)), "cpu_s": spent}))


def main() -> None:
    """Run as a script."""
    if sys.argv[1:2] == ["--client"]:
        asyncio.run(run_client(sys.argv[2], *map(int, sys.argv[3:])))
        return
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--tokens", type=int, default=400, metavar="COUNT", help="tokens a stream")
    options.add_argument("--out", type=Path, metavar="FILE")
    chosen = options.parse_args()
    interval = 1 / STREAM_TOKENS_PER_S
    record = {
        "what": "http latency",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]},
        "paced": [cell(streams, interval, chosen.tokens, reader) for streams in (1, 8, 64) for reader in READERS],
        "flat_out": [cell(8, 0.0, chosen.tokens, reader) for reader in READERS],
    }
    text = json.dumps(record, indent=1)
    print(text)
    if chosen.out:
        chosen.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
