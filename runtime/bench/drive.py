"""Sends sessions as a load says, at a rate or as fast as they are answered, and watches how punctual the client is."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field

from runtime.bench.client import Answer, Client
from runtime.bench.load import Load
from runtime.bench.sessions import Session

_TICK_SECONDS = 0.005


@dataclass
class Punctuality:
    """How late the client's own loop woke, seconds, and how much of a core it used: what its figures may be off by."""

    late: list[float] = field(default_factory=list)
    cpu_share: float = 0.0


async def drive(client: Client, load: Load, sessions: Sequence[Session]) -> list[Answer]:
    """Run all sessions and return their answers in the order in which they ended."""
    answers: list[Answer] = []
    room = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else nullcontext()

    async def one(session: Session, due: float) -> None:
        async with room:
            async for answer in _converse(client, session, due):
                answers.append(answer)  # noqa: PERF401 - those of before a failure count too

    rng = random.Random(f"{load.seed}/arrivals")
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for session in sessions:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            group.create_task(one(session, due))
            due = time.perf_counter() if load.request_rate is None else due + rng.expovariate(load.request_rate)
    return answers


async def _converse(client: Client, session: Session, due: float) -> AsyncIterator[Answer]:
    """Ask what a session asks until it ends, or until a request fails."""
    ask = next(session, None)
    while ask is not None:
        await asyncio.sleep(ask.pause_s)
        answer = await client.ask(ask, due)
        yield answer
        if answer.error:
            return
        try:
            ask = session.send(answer.said)
        except StopIteration:
            return
        due = answer.ended + ask.pause_s


@asynccontextmanager
async def watched() -> AsyncIterator[Punctuality]:
    """Note the client's punctuality meanwhile, without pauses for garbage of before."""
    found = Punctuality()

    async def tick() -> None:
        while True:
            due = time.perf_counter() + _TICK_SECONDS
            await asyncio.sleep(_TICK_SECONDS)
            found.late.append(time.perf_counter() - due)

    gc.collect()
    gc.freeze()
    begin, cpu = time.perf_counter(), time.process_time()
    ticking = asyncio.ensure_future(tick())
    try:
        yield found
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        gc.unfreeze()
        found.cpu_share = (time.process_time() - cpu) / max(time.perf_counter() - begin, 1e-9)
