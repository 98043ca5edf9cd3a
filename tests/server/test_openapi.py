"""Requests made up from the server's own description: none may end in a server error."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from support.serving import answered, listening, serving, thought

PATHS = [
    "/v1/chat/completions", "/v1/completions", "/v1/chat/completions/render", "/v1/completions/render",
    "/tokenize", "/detokenize", "/abort", "/reset_prefix_cache", "/v1/models", "/server_info",
]  # fmt: skip
EXAMPLES = {"/v1/chat/completions": 60, "/v1/completions": 60}


@pytest.fixture(scope="module")
def served():
    """A server on a thread of its own: the cases are made by code that does not know asyncio."""
    started, stop = threading.Event(), threading.Event()
    found = {}

    async def run():
        async with listening(thought("hm") + answered("ok"), pages=(4000, 4000)) as server:
            async with httpx.AsyncClient(base_url=server.url) as client:
                found["schema"] = (await client.get("/openapi.json")).json()
            found["url"] = server.url
            started.set()
            await asyncio.to_thread(stop.wait)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(asyncio.run, run())
        try:
            while not started.wait(0.1):
                assert not running.done(), running.exception()
            yield found
        finally:
            stop.set()
            running.result(20)


@pytest.mark.parametrize("path", PATHS)
def test_no_request_that_fits_the_description_is_a_server_error(path, served):
    schema = schemathesis.openapi.from_dict(served["schema"])
    (operation,) = [result.ok() for result in schema.get_all_operations() if result.ok().path == path]
    with httpx.Client(base_url=served["url"], timeout=30) as client:

        @settings(
            max_examples=EXAMPLES.get(path, 15), deadline=None, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def check(case):
            body = case.body if operation.method == "post" and operation.body else None
            response = client.request(operation.method, path, **({} if body is None else {"json": body}))
            assert response.status_code < 500, response.text
            if response.status_code >= 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}

        check()


@pytest.mark.anyio
async def test_the_description_has_every_body():
    async with serving(answered("ok")) as found:
        document = (await found.client.get("/openapi.json")).json()
        for path in PATHS[:7]:
            reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            name = reference.rpartition("/")[2]
            assert document["components"]["schemas"][name]["properties"]
