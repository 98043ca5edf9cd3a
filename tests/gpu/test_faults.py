"""On a card: an arrival that is lost while streams run ends them with an error, and the process for its supervisor."""

from __future__ import annotations

import asyncio
import socket
import time

import httpx2 as httpx
import pytest
import torch
import uvicorn
from support.served_model import open_service, write_rounded
from support.serving import Stream

from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from runtime.server.app import make_app
from runtime.server.auth import KeyRing
from runtime.server.connection import http_settings
from runtime.server.run import Host

pytestmark = [pytest.mark.gpu, pytest.mark.anyio]


@pytest.fixture
def anyio_backend():
    return "asyncio"


def lose_an_arrival(decoder) -> None:
    """On the card itself, while the kernel reads its records: a share of the attention arrives no more."""
    records = decoder.step.table.records.copy()
    row = int((records["kind"] == TaskKind.ATTEND).nonzero()[0][0])
    records["arrive"][row] = NONE
    raw = torch.from_numpy(records.view("u1").reshape(-1))
    decoder.table._static[2].copy_(raw)


async def test_a_lost_arrival_ends_streams_health_and_process(tmp_path, caplog):
    service = open_service(write_rounded(tmp_path), device="cuda", max_num_seqs=2, max_model_len=8192)
    engine = service.engine
    app = make_app(service, KeyRing((), None), KeyRing((), None))
    host = Host(uvicorn.Config(app, timeout_graceful_shutdown=2, **http_settings()), service, lambda: engine)
    bound = socket.create_server(("127.0.0.1", 0))
    bound.setblocking(False)
    running = asyncio.ensure_future(host.live(bound))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=30) as client:
        while not host.started:
            await asyncio.sleep(0.005)  # uvicorn has no event for this
        body = {"prompt": [5], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            begin = time.monotonic()
            lose_an_arrival(engine.core.backend.tables[0])
            rest = [line async for line in lines]
        assert time.monotonic() - begin < 3, "the deadline of a wait is a fifth of a second"
        stream = Stream.read("\n".join(rest).lstrip("\n") + "\n")
        assert len(stream.errors()) == 1
        assert not stream.is_done
    assert await running == 1
    assert "the first task that should have fired is" in caplog.text
    assert "an arrival is missing" in caplog.text
