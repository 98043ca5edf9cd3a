"""Who gets a slot and pages: admission that never promises what running rows still need, and preemption that is fair.

The head of the queue is admitted when a slot is free and its prompt's pages can be had beside those that running rows
lack for theirs. A row that grows takes pages from worse rows only, which wait again where their rank puts them;
without any it pauses. The best row can have every page there is, so somebody always gets on, and nobody is overtaken
for good.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.engine.backend import Backend
from runtime.engine.kv_cache import KvCache, Match
from runtime.engine.roster import Roster, rank
from runtime.engine.sequence import Sequence


def reachable_context(backend: Backend) -> int:
    """The longest context that one row alone has pages for."""
    limit = backend.max_context_tokens
    for window, pages in zip(backend.windows, backend.pages, strict=True):
        # a window may begin with the last token of a block and end with the first of another
        slides = window is not None and pages >= (window - 2) // backend.page_tokens + 2
        if not slides:
            limit = min(limit, pages * backend.page_tokens)
    return limit


@dataclass(frozen=True)
class _Situation:
    """What decides whether the head of the queue is admitted: rows that left so far, and pages to be had."""

    head: Sequence
    departures: int
    available: tuple[int, ...]

    def is_no_better_than(self, other: _Situation) -> bool:
        return (
            self.head is other.head
            and self.departures == other.departures
            and all(now <= then for now, then in zip(self.available, other.available, strict=True))
        )


class Admission:
    """Moves requests of a roster between queue and slots; `reuses`: cached blocks are taken over."""

    def __init__(self, backend: Backend, cache: KvCache, roster: Roster, *, reuses: bool) -> None:
        """Read the backend's sizes; `cache` has its pages."""
        self._backend, self._cache, self._roster, self._reuses = backend, cache, roster, reuses
        self._turned_away: _Situation | None = None

    def admit(self) -> None:
        """Give slots to the head of the queue, one after another, as long as there are slots and pages."""
        while self._roster.waiting and self._roster.slots:
            sequence, slot = self._roster.waiting[0], self._roster.slots[-1]
            available = tuple(pool.available for pool in self._cache.pools)
            situation = _Situation(sequence, self._roster.departures, available)
            if self._turned_away is not None and situation.is_no_better_than(self._turned_away):
                return  # no need to look at every block again
            self.attach(sequence, slot)
            if not self._fits(sequence, slot):
                self._cache.leave(slot)
                sequence.computed = 0
                self._turned_away = situation
                return
            self._turned_away = None
            self._roster.place(sequence)

    def attach(self, sequence: Sequence, slot: int) -> None:
        """Let a row of which nothing was computed since its admission start behind the blocks that are cached."""
        match = Match()
        if self._reuses and not sequence.collects_prompt_logprobs:
            match = self._cache.match(sequence)
        self._cache.leave(slot)
        self._cache.attach(slot, sequence, match)
        sequence.computed = match.blocks * self._backend.page_tokens

    def make_room(self, sequence: Sequence, end: int) -> bool:
        """Get pages up to position `end`, if need be those of worse rows; False: it has to pause."""
        while not self._cache.grow(self._roster.slot_of(sequence), end):
            victim = max(self._roster.running.values(), key=rank)
            if victim is sequence:
                assert len(self._roster.running) > 1, "a row alone always finds its pages"
                return False
            self._roster.send_back(victim)
        return True

    def _fits(self, sequence: Sequence, slot: int) -> bool:
        """Whether its prompt's pages are there beside those that running rows still need, and one more for each."""
        if not self._roster.running:
            return True
        rows = self._roster.running.items()
        return all(
            self._missing(sequence, slot, group) + sum(self._missing(other, at, group) + 1 for at, other in rows)
            <= pool.available
            for group, pool in enumerate(self._cache.pools)
        )

    def _missing(self, sequence: Sequence, slot: int, group: int) -> int:
        """Pages of a group that it has yet to take until its prompt is computed."""
        needed = self._cache.blocks(len(sequence.tokens))
        window = self._backend.windows[group]
        if window is not None:
            needed = min(needed, self._cache.blocks(window + self._backend.prefill_tokens[0]) + 1)
        return max(0, needed - self._cache.held(slot, group))
