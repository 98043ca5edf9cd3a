"""Who is here: requests that wait, rows that run, their slots and deadlines, and what came of them since the last step.

Every change of a request's state passes here, so a request is always in one place, and its pages go when it goes.
Refuses to choose: admission, preemption and tokens are decided elsewhere.
"""

from __future__ import annotations

import heapq
import logging
from bisect import insort
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from runtime.engine.kv_cache import KvCache
from runtime.engine.listener import Listener, RequestTimes
from runtime.engine.sequence import Sequence
from runtime.engine.tokens import News
from runtime.request import FinishReason, Output

log = logging.getLogger(__name__)


def rank(sequence: Sequence) -> tuple[int, int]:
    """Sort key: the best comes first, by priority, then arrival."""
    return sequence.key


@dataclass
class Counts:
    """Counters of `Stats`."""

    preemptions: int = 0
    corrupted: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    steps: int = 0
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


class Roster:
    """`waiting` in order of rank, `running` by slot; `outputs` not yet handed over."""

    def __init__(self, rows: int, cache: KvCache, listener: Listener, clock: Callable[[], float]) -> None:
        """Empty, with `rows` free slots; `cache` holds the running rows' pages."""
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        self.by_id: dict[str, Sequence] = {}
        self.groups: Counter[str] = Counter()
        self.slots = list(range(rows - 1, -1, -1))
        self.outputs: list[Output] = []
        self.counts = Counts()
        self.departures = 0  # rows that left their slot, for good or not
        self.service_seconds = 1.0  # a request's recent time from admission to end
        self._deadlines: list[tuple[float, int, str]] = []
        self._cache, self._listener, self._clock = cache, listener, clock

    def enter(self, sequence: Sequence) -> None:
        """A new request waits."""
        request = sequence.request
        self.by_id[request.id] = sequence
        if request.group is not None:
            self.groups[request.group] += 1
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, sequence.arrived, request.id))
        self.counts.prompt_tokens += len(request.prompt)
        insort(self.waiting, sequence, key=rank)

    def place(self, sequence: Sequence) -> None:
        """A waiting request takes the next slot."""
        self.waiting.remove(sequence)
        sequence.slot = self.slots.pop()
        self.running[sequence.slot] = sequence
        sequence.is_started = False
        sequence.admissions += 1
        if sequence.admitted_time is None:
            sequence.admitted_time = self._clock()

    def send_back(self, sequence: Sequence) -> None:
        """A running row gives up its pages and waits again, where its rank puts it."""
        self._vacate(sequence, self.slot_of(sequence))
        insort(self.waiting, sequence, key=rank)
        self.counts.preemptions += 1

    @staticmethod
    def slot_of(sequence: Sequence) -> int:
        """The slot of a running row."""
        assert sequence.slot is not None
        return sequence.slot

    def overdue(self, now: float) -> list[Sequence]:
        """Requests whose deadline has passed, each told once."""
        found: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrived, request_id = heapq.heappop(self._deadlines)
            sequence = self.by_id.get(request_id)
            if sequence is not None and sequence.arrived == arrived:
                found.append(sequence)
        return found

    def report(self, sequence: Sequence, news: News) -> None:
        """Hand over what a request got; if it ended with that, it leaves."""
        self.counts.generated_tokens += len(news.tokens)
        if news.tokens and sequence.first_token_time is None:
            sequence.first_token_time = self._clock()
        prompt_logprobs = None
        if sequence.prompt_logprobs is not None and not sequence.collects_prompt_logprobs:
            prompt_logprobs, sequence.prompt_logprobs = tuple(sequence.prompt_logprobs), None
        output = Output(
            sequence.request.id, news.tokens, news.logprobs, prompt_logprobs, news.finish, news.stop_id,
            cached_tokens=sequence.cached_tokens or 0,
        )  # fmt: skip
        self.outputs.append(output)
        if news.finish is not None:
            self._leave(sequence, news.finish)

    def end(self, sequence: Sequence, finish: FinishReason, error: str | None = None) -> None:
        """End a request for a reason that is no token of its own."""
        self.outputs.append(
            Output(sequence.request.id, finish=finish, error=error, cached_tokens=sequence.cached_tokens or 0)
        )
        self._leave(sequence, finish)

    def _leave(self, sequence: Sequence, finish: FinishReason) -> None:
        request, now = sequence.request, self._clock()
        del self.by_id[request.id]
        self.counts.finished[finish] += 1
        if request.group is not None:
            self.groups[request.group] -= 1
            self.groups += Counter()  # drops those that are empty
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._vacate(sequence, sequence.slot)
        if sequence.admitted_time is not None:
            self.service_seconds += 0.1 * (now - sequence.admitted_time - self.service_seconds)
        times = RequestTimes(
            request.id, finish, sequence.arrival_time, sequence.admitted_time, sequence.first_token_time, now,
            len(request.prompt), sequence.cached_tokens or 0, sequence.generated, max(0, sequence.admissions - 1),
        )  # fmt: skip
        self.tell(partial(self._listener.on_end, times))

    def _vacate(self, sequence: Sequence, slot: int) -> None:
        self._cache.leave(slot)
        del self.running[slot]
        self.departures += 1
        self.slots.append(slot)
        sequence.slot = None
        sequence.computed = 0

    def tell(self, news: Callable[[], None]) -> None:
        """Call a listener: metrics may go wrong, but they may not stop the engine."""
        try:
            news()
        except Exception:
            log.exception("a listener failed")

    def check(self) -> None:
        """Assert that every request is in one place, and every slot too."""
        self._cache.check(self.running)
        rows = len(self.slots) + len(self.running)
        assert sorted([*self.slots, *self.running]) == list(range(rows)), "a slot is lost or used twice"
        assert len(self.running) + len(self.waiting) == len(self.by_id), "a request is lost"
        assert self.waiting == sorted(self.waiting, key=rank), "the queue is out of order"
        assert all(sequence.slot == slot for slot, sequence in self.running.items())
        assert all(sequence.slot is None for sequence in self.waiting)
        present = Counter(each.request.group for each in self.by_id.values() if each.request.group is not None)
        assert self.groups == present, "a group is miscounted"
