"""On a card: an arrival that is lost while streams run ends them with an error, and the process for its supervisor."""

from __future__ import annotations

import time

import pytest
import torch
from support.served_model import open_service, write_rounded
from support.serving import Stream, hosted

from megakernel.counters import NONE
from megakernel.kinds import TaskKind

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
    async with hosted(service) as at:
        body = {"prompt": [5], "max_tokens": 8000, "ignore_eos": True, "stream": True}
        async with at.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            begin = time.monotonic()
            lose_an_arrival(service.engine.core.backend.tables[0])
            rest = [line async for line in lines]
        assert time.monotonic() - begin < 3, "the deadline of a wait is a fifth of a second"
        stream = Stream.read("\n".join(rest).lstrip("\n") + "\n")
        assert len(stream.errors()) == 1
        assert not stream.is_done
        assert await at.running == 1
    assert "the first task that should have fired is" in caplog.text
    assert "so an arrival was lost" in caplog.text, "the table of the host has all of them"
