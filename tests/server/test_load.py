"""Two hundred clients at once, some of which leave, some of which talk nonsense."""

import asyncio
import json
import random

import httpx2 as httpx
import pytest
from support.serving import Script, Stream, answered, call_text, error_of, listening, thought, tool

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLIENTS = 200
WRONG = (
    (CHAT, b"{"),
    (CHAT, b'{"messages": []}'),
    (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "temperature": 9}'),
    (TEXT, b'{"prompt": "x", "n": 1000}'),
    (TEXT, json.dumps({"prompt": [5] * 2000}).encode()),
    ("/v1/nothing", b"{}"),
)


async def test_200_clients_of_which_some_leave_and_some_are_wrong():
    random.seed(1)
    script = Script(thought("hm") + answered("word " * 8))
    script.on(10**6, thought("") + call_text(("f", {"x": 1})))
    async with listening(script=script, rows=32, pages=(2000, 2000), max_waiting=400) as served:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=50)
        left, errors, whole = 0, 0, 0
        async with httpx.AsyncClient(base_url=served.url, timeout=60, limits=limits) as client:

            async def good(number):
                nonlocal whole
                body = {"messages": [{"role": "user", "content": f"client {number}"}], "stream": True, "seed": number}
                body["stream_options"] = {"include_usage": True}
                if number % 7 == 0:
                    body |= {"tools": [tool("f", x={"type": "integer"})], "n": 2}
                response = await client.post(CHAT, json=body)
                assert response.status_code == 200, response.text
                found = Stream.read(response.text)
                for index in range(body.get("n", 1)):
                    assert (found.content(index), found.finishes(index)) == ("word " * 8, ["stop"])
                assert found.is_done
                assert len(found.usages()) == 1
                whole += 1

            async def leaves(number):
                nonlocal left
                body = {"messages": [{"role": "user", "content": f"leaver {number}"}], "stream": number % 2 == 0}
                posting = asyncio.ensure_future(client.post(CHAT, json=body))
                await asyncio.wait({posting}, timeout=random.random())
                posting.cancel()
                await asyncio.gather(posting, return_exceptions=True)
                left += 1

            async def wrong(number):
                nonlocal errors
                path, body = WRONG[number % len(WRONG)]
                response = await client.post(path, content=body)
                assert 400 <= response.status_code < 500
                error_of(response)
                errors += 1

            async def one(number):
                kind = leaves if number % 20 == 0 else wrong if number % 10 == 3 else good
                await kind(number)

            async with asyncio.timeout(60):
                await asyncio.gather(*(one(number) for number in range(CLIENTS)))
        assert (left, errors, whole) == (10, 20, 170)
        await served.idle()
        assert await served.metric("vllm:num_requests_running") == 0
        assert await served.metric("vllm:request_success_total", finished_reason="error") == 0
