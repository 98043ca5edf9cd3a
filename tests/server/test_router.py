"""SMG's cache-aware gateway before two replicas: sessions stick, and a replica's end costs as little as it must."""

import asyncio
import signal
import socket
import sys
from contextlib import asynccontextmanager
from copy import deepcopy
from itertools import pairwise

import httpx2 as httpx
import pytest
from support.serving import Script, Stream, answered, listening, thought

from runtime.server.config import ServeConfig, Waits

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"

WORDS = "word " * 240
"""An answer that takes so long that a replica's end comes before its own, on a slow machine too."""

SESSIONS = 12
"""Enough that one of two replicas is hardly ever left out."""


@asynccontextmanager
async def gateway(*urls):
    """A client of the gateway over these replicas, once both are taken in."""
    with socket.create_server(("127.0.0.1", 0)) as probe, socket.create_server(("127.0.0.1", 0)) as other:
        port, metrics_port = probe.getsockname()[1], other.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "smg", "launch", "--port", str(port), "--policy", "cache_aware", "--worker-urls", *urls,
        "--prometheus-port", str(metrics_port), "--health-check-endpoint", "/ready",
        "--health-check-interval-secs", "1", "--health-failure-threshold", "1",
        "--balance-abs-threshold", "1000", "--log-level", "error",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            async with asyncio.timeout(40):
                while not await _has_workers(client, len(urls)):
                    await asyncio.sleep(0.1)
            yield client
    finally:
        process.kill()
        await process.wait()


async def _has_workers(client, count):
    try:
        workers = (await client.get("/workers")).json()
    except (httpx.HTTPError, ValueError):
        return False
    return (
        sum(bool(each.get("is_healthy")) or each.get("status") == "healthy" for each in workers.get("workers", []))
        == count
    )


def session(number, turns):
    """A conversation of so many turns, with a long beginning of its own; as many tokens whatever the number.

    A script takes what is beyond the shortest prompt of a seed for the answer's beginning.
    """
    messages = [{"role": "system", "content": f"session {number:02} " * 12}]
    for turn in range(turns):
        messages += [{"role": "user", "content": f"question {turn}"}, {"role": "assistant", "content": "answer"}]
    return messages[:-1]


@asynccontextmanager
async def two_replicas():
    """Two replicas, and a client of the gateway before them."""
    script = Script(thought("") + answered("answer"))
    script.on(99, thought("") + answered(WORDS))
    sizes = {"rows": 16, "pages": (1200, 1200), "seconds": 0.004, "config": ServeConfig(waits=Waits(drain_s=30))}
    async with (
        listening(script=script, **sizes) as one,
        listening(script=deepcopy(script), **sizes) as two,
        gateway(one.url, two.url) as client,
    ):
        yield (one, two), client


async def ask(client, messages, **body):
    response = await client.post(CHAT, json={"messages": messages, "model": "demo", **body})
    assert response.status_code == 200, response.text
    return response


async def until_running(replicas, count):
    async with asyncio.timeout(10):
        while sum(each.engine.stats().running for each in replicas) < count:
            await asyncio.sleep(0.01)  # the engines' threads have no event for this


async def test_every_turn_of_a_session_goes_where_the_first_one_went():
    async with two_replicas() as (replicas, client):

        async def counts():
            name = "counterpoint:http_requests_total"
            return [await each.metric(name, route=CHAT, status="200") if each.script.calls else 0 for each in replicas]

        for number in range(4):
            await ask(client, session(number, 1))
        for number in range(4):
            seen = [await counts()]
            for turns in (2, 3, 4):
                reply = (await ask(client, session(number, turns))).json()
                assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, (
                    "nothing of the turn before was found"
                )
                seen.append(await counts())
            steps = [[after - before for before, after in zip(*pair, strict=True)] for pair in pairwise(seen)]
            assert steps in ([[1, 0]] * 3, [[0, 1]] * 3)


async def test_a_drained_replica_loses_no_stream_and_its_sessions_go_on_elsewhere():
    async with two_replicas() as (replicas, client):
        running = [
            asyncio.ensure_future(ask(client, session(number, 2), stream=True, seed=99)) for number in range(SESSIONS)
        ]
        await until_running(replicas, SESSIONS)
        assert min(each.engine.stats().running for each in replicas) > 0, "all went to one replica"
        replicas[0].host.handle_exit(signal.SIGTERM, None)
        for number in range(SESSIONS):
            await ask(client, session(number, 3))
        for response in await asyncio.gather(*running):
            found = Stream.read(response.text)
            assert (found.is_done, found.content()) == (True, WORDS)
        assert not replicas[0].engine.is_ready


async def test_a_killed_replica_loses_only_its_own_streams():
    async with two_replicas() as (replicas, client):
        posts = [
            asyncio.ensure_future(ask(client, session(number, 1), stream=True, seed=99)) for number in range(SESSIONS)
        ]
        await until_running(replicas, SESSIONS)
        counts = [each.engine.stats().running for each in replicas]
        assert min(counts) > 0, "all went to one replica"
        replicas[0].host.force_exit = replicas[0].host.should_exit = True
        results = await asyncio.gather(*posts, return_exceptions=True)
        texts = [each.text for each in results if isinstance(each, httpx.Response)]
        whole = [Stream.read(text) for text in texts if text.endswith("data: [DONE]\n\n") and '"error"' not in text]
        assert [found.content() for found in whole] == [WORDS] * counts[1]
        reply = (await ask(client, session(9, 1))).json()
        assert reply["choices"][0]["message"]["content"] == "answer"
