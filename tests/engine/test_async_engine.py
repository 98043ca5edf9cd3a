"""The engine's thread serves an event loop: streams, cancellation, failure, drain and rest."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support.ahead import AheadBackend
from support.engines import Answer, assert_idle, mixed, mixed_reply, request, scripted, with_settings

from runtime.engine import AsyncEngine, EngineCore, OutputStream
from runtime.request import FinishReason, PromptTooLongError, QueueFullError, UnavailableError

PROMPT = list(range(10, 30))


@asynccontextmanager
async def serving(core: EngineCore | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(core or scripted())
    try:
        yield engine
    finally:
        engine.close()
        assert not engine._thread.is_alive()
        engine.core.roster.check()


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), 60))


async def collect(stream: OutputStream) -> Answer:
    answer = Answer()
    async for output in stream:
        answer.add(output)
    return answer


async def idle(engine: AsyncEngine) -> None:
    """Wait until the engine has nothing to do; it says so by taking an order that was put last."""
    while engine._present:
        done = asyncio.Event()
        asyncio_loop = asyncio.get_running_loop()
        engine._inbox.put(lambda loop=asyncio_loop, event=done: loop.call_soon_threadsafe(event.set))
        await done.wait()


@dataclass
class Gate:
    """A script that waits until it is opened."""

    reached: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, context, sampling) -> int:
        self.reached.set()
        assert self.opened.wait(30)
        return mixed(context, sampling)

    def open(self) -> None:
        self.opened.set()


def test_many_streams_get_their_own_answers_with_one_hand_over_a_step() -> None:
    async def story() -> None:
        async with serving() as engine:
            calls = 0
            loop = asyncio.get_running_loop()
            inner = loop.call_soon_threadsafe

            def counting(*args):
                nonlocal calls
                calls += 1
                return inner(*args)

            loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
            texts = [[idx + 5] * (idx + 1) for idx in range(20)]
            answers = await asyncio.gather(
                *[collect(engine.generate(request(str(idx), text, 9))) for idx, text in enumerate(texts)]
            )
            assert [answer.tokens for answer in answers] == [mixed_reply(text, 9) for text in texts]
            assert calls < 100  # 180 tokens in 4 rows
            assert_idle(engine.core)

    play(story)


@pytest.mark.parametrize("how", ["break", "close", "aclosing", "del"])
def test_a_stream_that_nobody_reads_on_is_aborted(how: str) -> None:
    async def story() -> None:
        async with serving() as engine:
            stream = engine.generate(request("a", PROMPT, 200))
            other = engine.generate(request("b", PROMPT, 60))
            if how == "break":
                async for _ in stream:
                    break
            elif how == "aclosing":
                async with aclosing(stream):
                    await anext(stream)
            elif how == "close":
                stream.close()
                with pytest.raises(StopAsyncIteration):
                    await anext(stream)
            del stream
            assert (await collect(other)).tokens == mixed_reply(PROMPT, 60)
            await idle(engine)
            assert engine.stats().finished[FinishReason.ABORT] == 1
            assert_idle(engine.core)

    play(story)


def test_a_reader_whose_task_is_cancelled_aborts_even_before_its_first_token() -> None:
    async def story() -> None:
        gate = Gate()
        async with serving(scripted(gate, rows=1)) as engine:
            tasks = [asyncio.create_task(collect(engine.generate(request(name, [5], 50)))) for name in "ab"]
            await asyncio.to_thread(gate.reached.wait, 30)
            for task in tasks:  # one decodes, one waits
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            del tasks, task
            gate.open()
            await idle(engine)
            assert engine.stats().finished[FinishReason.ABORT] == 2

    play(story)


def test_a_read_that_times_out_loses_nothing() -> None:
    async def story() -> None:
        gate = Gate()
        async with serving(scripted(gate)) as engine:
            stream = engine.generate(request("a", [5], 6))
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(stream), 0.01)
            gate.open()
            assert (await collect(stream)).tokens == mixed_reply([5], 6)

    play(story)


def test_a_reader_that_sleeps_stops_nobody() -> None:
    async def story() -> None:
        async with serving() as engine:
            asleep = engine.generate(request("asleep", PROMPT, 30))
            awake = await collect(engine.generate(request("awake", PROMPT, 60)))
            assert awake.finish is FinishReason.LENGTH
            assert (await collect(asleep)).tokens == mixed_reply(PROMPT, 30)

    play(story)


def test_abort_and_finish_reach_a_running_request() -> None:
    async def story() -> None:
        gate = Gate()
        async with serving(scripted(gate)) as engine:
            streams = {name: engine.generate(request(name, [5], 90)) for name in ("abort", "finish")}
            engine.abort("abort")
            engine.finish("finish")
            engine.abort("unknown")
            gate.open()
            ends = {name: (await collect(stream)).finish for name, stream in streams.items()}
            assert ends == {"abort": FinishReason.ABORT, "finish": FinishReason.STOP}

    play(story)


def test_refusals_are_raised_by_generate_itself() -> None:
    async def story() -> None:
        gate = Gate()
        async with serving(scripted(gate, rows=1, settings=with_settings(max_waiting=1))) as engine:
            with pytest.raises(PromptTooLongError):
                engine.generate(request("long", [5] * 256))
            first = engine.generate(request("a", [5], group="n"))
            with pytest.raises(ValueError, match="running already"):
                engine.generate(request("a", [5], group="n"))
            second = engine.generate(request("b", [5]))
            with pytest.raises(QueueFullError) as refusal:
                engine.generate(request("c", [5]))
            assert refusal.value.retry_after >= 1
            third = engine.generate(request("d", [5], group="n"))
            gate.open()
            for stream in (first, second, third):
                assert (await collect(stream)).tokens == mixed_reply([5], 8)
            assert (await collect(engine.generate(request("c", [5])))).finish is FinishReason.LENGTH

    play(story)


def test_a_failed_step_ends_every_stream_and_refuses_new_ones() -> None:
    def script(context, sampling):
        if len(context) > 25:
            raise RuntimeError("device lost")
        return mixed(context, sampling)

    async def story() -> None:
        async with serving(scripted(script, rows=2)) as engine:
            assert engine.is_ready
            streams = [engine.generate(request(name, PROMPT, 30)) for name in "abcd"]
            answers = await asyncio.gather(*map(collect, streams))
            assert {answer.finish for answer in answers} == {FinishReason.ERROR}
            assert not engine.is_ready
            assert isinstance(engine.error, RuntimeError)
            with pytest.raises(UnavailableError):
                engine.generate(request("e", PROMPT))
            await asyncio.wait_for(engine.drain(5), 10)

    play(story)


def test_a_fault_of_the_engine_itself_hangs_nobody() -> None:
    async def story() -> None:
        core = scripted()

        def broken(*_: object) -> None:
            raise RuntimeError("pages are in disorder")

        core.cache.leave = broken  # type: ignore[method-assign]
        async with serving(core) as engine:
            answers = await asyncio.gather(*[collect(engine.generate(request(name, PROMPT, 3))) for name in "ab"])
            assert {answer.finish for answer in answers} == {FinishReason.ERROR}
            assert not engine.is_ready
            core.roster.running.clear()
            core.roster.slots = [0, 1, 2, 3]
            del core.cache.leave
            for slot in range(4):
                core.cache.leave(slot)

    play(story)


def test_draining_lets_requests_end_and_aborts_those_that_take_too_long() -> None:
    async def story() -> None:
        async with serving() as engine:
            stream = engine.generate(request("a", PROMPT, 40))
            await engine.drain(30)
            assert (await collect(stream)).finish is FinishReason.LENGTH
            assert not engine.is_ready
            with pytest.raises(UnavailableError, match="shutting down"):
                engine.generate(request("b", PROMPT))
        gate = Gate()
        async with serving(scripted(gate, rows=1)) as engine:
            streams = [engine.generate(request(name, [5], 40)) for name in "ab"]
            draining = asyncio.gather(engine.drain(60), engine.drain(0.01))  # the second is in a hurry
            await asyncio.to_thread(gate.reached.wait, 30)
            await asyncio.sleep(
                0.05
            )  # the abort is asked for while the step still waits: the loop keeps timers in order
            gate.open()
            await draining
            assert [(await collect(stream)).finish for stream in streams] == [FinishReason.ABORT] * 2

    play(story)


def test_closing_gives_every_stream_its_end() -> None:
    async def story() -> None:
        engine = AsyncEngine(scripted(lambda *_: 7, rows=1, max_context_tokens=100_000, pages=(13_000, 13_000)))
        streams = [engine.generate(request(name, PROMPT, 90_000)) for name in "abc"]
        await anext(streams[0])
        engine.close()
        assert [(await collect(stream)).finish for stream in streams] == [FinishReason.ABORT] * 3
        with pytest.raises(UnavailableError, match="shutting down"):
            engine.generate(request("d", PROMPT))
        engine.close()

    play(story)


def test_an_idle_engine_sleeps() -> None:
    async def story() -> None:
        async with serving() as engine:
            passes = 0
            inner = engine.core.step

            def counting():
                nonlocal passes
                passes += 1
                return inner()

            engine.core.step = counting  # type: ignore[method-assign]
            await collect(engine.generate(request("a", PROMPT, 5)))
            before = passes
            await asyncio.sleep(0.1)
            assert passes - before <= 1
            assert before < 20

    play(story)


def test_an_engine_outlives_its_event_loop() -> None:
    engine = AsyncEngine(scripted())
    kept: list[OutputStream] = []

    async def leave_it_running() -> None:
        kept.append(engine.generate(request("a", PROMPT, 200)))
        await anext(kept[0])

    async def come_back() -> None:
        answer = await collect(engine.generate(request("b", PROMPT, 5)))
        assert answer.tokens == mixed_reply(PROMPT, 5)

    asyncio.run(leave_it_running())
    kept.clear()
    asyncio.run(come_back())
    engine.close()
    assert_idle(engine.core)


def test_tokens_do_not_wait_for_a_slice_of_prefill_that_follows_them() -> None:
    async def story() -> None:
        backend = AheadBackend(mixed, vocab_size=192, max_context_tokens=128, pages=(64, 64))
        async with serving(EngineCore(backend)) as engine:
            prefill, kept = backend.prefill, []

            def watched(chunk):
                kept.append(list(engine.core.roster.outputs))
                return prefill(chunk)

            backend.prefill = watched
            first = asyncio.ensure_future(collect(engine.generate(request("a", PROMPT, 60))))
            while not engine.core.stats().generated_tokens:
                await asyncio.sleep(0.001)
            second = await collect(engine.generate(request("b", [9, *PROMPT], 5)))
            assert second.tokens == mixed_reply([9, *PROMPT], 5)
            assert (await first).tokens == mixed_reply(PROMPT, 60)
            assert len(kept) >= 2
            assert not any(kept), "what was made was handed over before"

    play(story)
