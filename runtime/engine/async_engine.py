"""The engine on a thread of its own, for callers on an asyncio loop.

The thread never waits for a reader: a step's outputs go to the loop in one hand-over, and every stream keeps what its
reader has not fetched. Idle, the thread sleeps until something is asked of it. Owns the thread; refuses decisions,
which are `EngineCore`'s, and anything about HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial

from runtime.engine.core import EngineCore
from runtime.request import FinishReason, Output, RefusedError, Request, Stats, UnavailableError

log = logging.getLogger(__name__)

ENGINE_THREAD = "engine"


class OutputStream:
    """Outputs of one request, of which the last has `finish` set; read by one task.

    A read that is cancelled loses nothing. Closing the stream, or dropping it, before its end aborts the request.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        """`abort` ends the request; it may be called from any thread."""
        self.request_id = request_id
        self._abort = abort
        self._outputs: deque[Output] = deque()
        self._arrived = asyncio.Event()
        self._is_over = False

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> Output:
        while not self._outputs:
            if self._is_over:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self._outputs.popleft()

    def push(self, output: Output) -> None:
        """Add an output; on the loop's thread."""
        self._outputs.append(output)
        self._is_over = output.finish is not None
        self._arrived.set()

    def close(self) -> None:
        """Drop what was not read, and abort the request unless it has ended."""
        self._outputs.clear()
        if not self._is_over:
            self._is_over = True
            self._arrived.set()
            self._abort(self.request_id)

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncEngine:
    """Runs an `EngineCore` on a thread from its construction to `close`. All methods but `stats` belong to one loop."""

    def __init__(self, core: EngineCore) -> None:
        """Start the thread; `core` is its alone from now on, but for what `EngineCore` says only reads."""
        self.core = core
        core.pause = self._pause
        # puts are safe wherever the collector runs a stream's end, even inside another put
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._streams: weakref.WeakValueDictionary[str, OutputStream] = weakref.WeakValueDictionary()
        self._present: dict[str, str | None] = {}  # group by id, from `generate` to the hand-over of its end
        self._loop: asyncio.AbstractEventLoop | None = None
        self._emptied = asyncio.Event()
        self._is_draining = self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=ENGINE_THREAD, daemon=True)
        self._thread.start()

    # the loop's side

    @property
    def is_ready(self) -> bool:
        """Whether new requests are taken."""
        return not (self.error or self._is_draining or self._is_closed)

    @property
    def error(self) -> BaseException | None:
        """What ended the engine, if a step failed."""
        return self.core.error

    @property
    def max_context_tokens(self) -> int:
        """The longest prompt and answer together."""
        return self.core.max_context_tokens

    def stats(self) -> Stats:
        """Gauges and counters now."""
        return self.core.stats()

    def generate(self, request: Request) -> OutputStream:
        """Queue a request and return its outputs; a `RefusedError` says at once why it is not taken."""
        self._adopt(asyncio.get_running_loop())
        if self._is_closed or self._is_draining:
            raise UnavailableError("the engine is shutting down")
        self.core.check(request)
        if request.group is None or request.group not in self._present.values():
            self.core.check_queue(len(self._present))
        if request.id in self._present:
            raise ValueError(f"request {request.id!r} is running already")
        self._present[request.id] = request.group
        stream = OutputStream(request.id, self.abort)
        self._streams[request.id] = stream
        self._inbox.put(partial(self._submit, request))
        return stream

    def _adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve this loop from now on; what a loop that is gone has left is aborted."""
        if self._loop is loop:
            return
        if self._present:
            if self._loop is not None and not self._loop.is_closed():
                raise RuntimeError("the engine serves another event loop")
            self._inbox.put(self.core.abort_all)
            self._present.clear()
        self._loop = loop

    def check_room(self, requests: int) -> None:
        """Raise the `RefusedError` for which so many requests can't be taken together."""
        self.core.check_queue(len(self._present), requests)

    def abort(self, request_id: str) -> None:
        """End a request with ABORT before the next step; ids that are not running are ignored. From any thread."""
        self._inbox.put(partial(self.core.abort, request_id))

    def finish(self, request_id: str) -> None:
        """End a request with STOP before the next step, since a stop string was seen; as `abort` otherwise."""
        self._inbox.put(partial(self.core.finish, request_id))

    def reset_prefix_cache(self) -> None:
        """Forget all cached blocks before the next step; running requests go on."""
        self._inbox.put(self.core.reset_prefix_cache)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what is here end by itself for so long, then abort it; a second call may hurry.

        What waits and has begun nothing is aborted at once: it may begin elsewhere.
        """
        self._is_draining = True
        if not self._present:
            return
        self._inbox.put(self.core.abort_waiting)
        self._emptied.clear()
        try:
            await asyncio.wait_for(self._emptied.wait(), seconds)
        except TimeoutError:
            self._inbox.put(self.core.abort_all)
            await self._emptied.wait()

    def close(self) -> None:
        """Abort everything and end the thread, after the step that it is in; streams get their last outputs."""
        if not self._is_closed:
            self._is_closed = True
            self._inbox.put(self.core.abort_all)
            self._thread.join()

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.finish is not None:
                self._present.pop(output.request, None)
            stream = self._streams.get(output.request)
            if stream is not None:
                stream.push(output)
        if not self._present:
            self._emptied.set()

    # the thread's side

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._take_orders()
                self._hand_over(self.core.step())
            self.core.abort_all()
            self._hand_over(self.core.step())
        except BaseException as error:  # extension modules panic with what is no Exception
            log.exception("the engine's thread failed")
            self.core.fail(error)
            self._hand_over(self.core.step())

    def _take_orders(self) -> None:
        """Do all that was asked; sleep until something is, when there is nothing else to do."""
        if not self.core.has_work:
            self._inbox.get()()
        self._take_more_orders()

    def _pause(self) -> None:
        """Before a slice of prefill: nobody's tokens wait for it, and who came meanwhile shares it."""
        self._hand_over(self.core.take_outputs())
        self._take_more_orders()

    def _take_more_orders(self) -> None:
        while not self._inbox.empty():
            self._inbox.get()()

    def _submit(self, request: Request) -> None:
        try:
            self.core.submit(request)
        except RefusedError as error:  # it failed or began to drain since `generate` asked
            self._hand_over([Output(request.id, finish=FinishReason.ERROR, error=str(error))])

    def _hand_over(self, outputs: list[Output]) -> None:
        if not outputs or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._deliver, outputs)
        except RuntimeError:  # the loop is closed: nobody is left to read
            log.warning("the event loop is gone; aborting what still runs")
            self.core.abort_all()
