"""What clients of `runtime serve` get on a card: North's geometry, drawn weights, over HTTP.

    python tests/bench/served_north.py [--out FILE] [--flag ...]

Time to the first token on an idle server, tokens a second of 1, 2, 4 and 8 streams of 8K beside the step that the
server measured at its start, times between tokens while prompts arrive, and tokens a second of 8 closed-loop streams.
Other arguments go to the server. Prints one JSON record.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import httpx2 as httpx
from support.north_folder import write_north
from support.process import Process

RNG = random.Random(7)


def prompt(tokens: int) -> list[int]:
    return [RNG.randrange(1000, 262_000) for _ in range(tokens)]


async def stream(client: httpx.AsyncClient, tokens: int, answer: int) -> list[float]:
    """When each token of an answer came, after when it was asked for."""
    body = {"prompt": prompt(tokens), "max_tokens": answer, "ignore_eos": True, "stream": True, "temperature": 0}
    times = [time.perf_counter()]
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, (await response.aread())[:300]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                assert '"error"' not in line, line
                times.append(time.perf_counter())
    return times


async def first_token(client: httpx.AsyncClient, tokens: int, count: int) -> dict[str, float]:
    times = []
    for _ in range(count):
        found = await stream(client, tokens, 2)
        times.append(1e3 * (found[1] - found[0]))
    return {"median_ms": round(statistics.median(times), 1), "max_ms": round(max(times), 1)}


async def streams(client: httpx.AsyncClient, count: int, tokens: int, answer: int) -> float:
    """Tokens a second of all streams together, from when all have begun until the first has ended."""
    found = await asyncio.gather(*(stream(client, tokens, answer) for _ in range(count)))
    begin = max(times[1] for times in found)
    end = min(times[-1] for times in found)
    return sum(sum(begin < at <= end for at in times[1:]) for times in found) / (end - begin)


async def gaps(client: httpx.AsyncClient, arriving: int) -> dict[str, float]:
    """Times between tokens of four running streams while prompts of so many tokens arrive."""
    running = [asyncio.ensure_future(stream(client, 64, 500)) for _ in range(4)]
    await asyncio.sleep(0.5)
    begin = time.perf_counter()
    for _ in range(6):
        await stream(client, arriving, 4)
    end = time.perf_counter()
    found = await asyncio.gather(*running)
    between = sorted(1e3 * (b - a) for times in found for a, b in pairwise(times[1:]) if begin < b <= end)
    return {"p50_ms": round(between[len(between) // 2], 2), "p99_ms": round(between[int(0.99 * len(between))], 2),
            "max_ms": round(between[-1], 2), "count": len(between)}  # fmt: skip


async def measure(client: httpx.AsyncClient, card: dict) -> dict:
    await stream(client, 100, 20)
    record: dict = {"first_token": {tokens: await first_token(client, tokens, 6) for tokens in (16, 1024, 8192)}}
    print(json.dumps(record), flush=True)
    step_ns = {bucket["rows"]: bucket["measured_ns"] for bucket in card["buckets"]}
    record["streams"] = {}
    for count in (1, 2, 4, 8):
        rate = await streams(client, count, 8000, 300)
        of_step = rate * step_ns[count] / 1e9 / count
        record["streams"][count] = {"tokens_per_s": round(rate, 1), "of_measured_step": round(of_step, 4)}
        print(json.dumps(record["streams"][count]), flush=True)
    record["gaps"] = {"none": await gaps(client, 8), "1K": await gaps(client, 1024), "8K": await gaps(client, 8192)}
    print(json.dumps(record["gaps"]), flush=True)

    async def closed() -> int:
        return sum([len(await stream(client, 1024, 512)) - 1 for _ in range(2)])

    begin = time.perf_counter()
    made = sum(await asyncio.gather(*(closed() for _ in range(8))))
    record["closed_loop_tokens_per_s"] = round(made / (time.perf_counter() - begin), 1)
    return record


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    given, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        write_north(Path(folder))
        begin = time.perf_counter()
        log = Path(folder, "log").open("w", encoding="utf-8")  # noqa: SIM115 - a pipe that nobody reads fills up
        server = Process(folder, "--device", "cuda", "--load-format", "dummy", *flags, stderr=log)
        try:
            async with httpx.AsyncClient(base_url=server.url(), timeout=120) as client:
                await server.ready(client, seconds=150)
                started = round(time.perf_counter() - begin, 1)
                card = (await client.get("/server_info")).json()["card"]
                print(json.dumps({"start_s": started, "card": card}), flush=True)
                record = {"start_s": started, "card": card} | await measure(client, card)
        except BaseException:
            print(Path(folder, "log").read_text(encoding="utf-8")[-6000:], file=sys.stderr)
            raise
        finally:
            server.end()
    print(json.dumps(record, indent=1))
    if given.out:
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
