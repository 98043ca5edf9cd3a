"""The chain of tasks that a step's time is made of, and how much later every other task could have ended.

Owns two readings of a `Walk`. The *critical path* goes back from the last task. A run that waited for its copies was
held by its SM's stream, and that by what it stood still for last: a full ring, until a run used its first copy, or a
load wait. Any other run began after its SM's previous one, or after the last arrival that it waited for. The parts add
up to the step. *Slack* is how much later a task could end while the step does not, if everything else took as long as
it did and the stream kept its pace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

import numpy as np

from megakernel.counters import NONE
from simulator.exposure import Exposure
from simulator.walk import Gate, Numbers, Times, Walk


class At(Enum):
    """The moment of a record that a later link waited for."""

    END = "end"
    SIGNAL = "signal"
    USE = "use"  # of its first copy, which frees a stage


class Via(Enum):
    """How a link was held by the one before it."""

    BEGIN = "begin"  # by nobody
    LIST = "list"  # by the SM's previous record
    RUN_WAIT = "run wait"
    OPENING = "opening"  # by a load wait, before which no run opens
    RING = "ring"  # its copies, by a full ring
    LOAD_WAIT = "load wait"  # its copies, by a load wait


@dataclass(frozen=True)
class Link:
    """A record of the chain up to its moment `at`.

    `held` is the record whose load wait or full ring held its copies, else the record itself. `source` is the record
    of the previous link (-1: none), waited for at its moment `since`, through `counter` (-1: none).
    """

    record: int
    at: At
    via: Via
    held: int
    source: int = -1
    since: At = At.END
    counter: int = -1


@dataclass(frozen=True)
class Lengths:
    """What a link took, in ns: its run, its copies, its wait; `order` is time that it waited for others."""

    run: float
    copies: float
    wait: float
    order: float


class Critical:
    """Questions about the order of a walk, asked of arrays made once."""

    def __init__(self, walk: Walk, exposure: Exposure) -> None:
        """Find what let each record begin, and its copies."""
        self.walk = walk
        self.load_gate, self.run_gate = walk.gates()
        self._exposure = exposure
        self._previous = walk.previous()
        self._landed_before = walk.landed_before()
        self._previous_end = np.where(self._previous >= 0, walk.end[self._previous], 0.0)
        self._ready = np.maximum(self._previous_end, self.run_gate.done)
        self._copied = np.clip(walk.landed, walk.run_start, np.maximum(walk.end, walk.run_start))
        # The stream stood still for a load wait if all was there before the last arrival.
        self._loads_held = (self.load_gate.done >= self._landed_before) & (walk.load_start > self._landed_before)
        self._restart = self._restarts()

    def _restarts(self) -> Numbers:
        """Per record, the last one at or before it in its list for which the stream stood still; -1 for none."""
        walk = self.walk
        stands = (exposed := self._exposure.full < walk.used) | self._loads_held
        # A run that freed a full ring after these copies had landed did not hold them.
        found = np.maximum.accumulate(np.where(stands, np.arange(len(stands)), -1))
        late = exposed[found] & ~self._loads_held[found] & (walk.used[found] > walk.landed)
        found = np.where(late, np.concatenate([[-1], found[:-1]]), found)
        return np.where((found >= 0) & (walk.sm[found] == walk.sm), found, -1)

    def chain(self) -> tuple[Link, ...]:
        """The critical path, from the last record back to the first."""
        return tuple(self._links()) if len(self.walk.end) else ()

    def _links(self) -> Iterator[Link]:
        record, at = int(self.walk.end.argmax()), At.END
        while record >= 0:
            waited = self.walk.landed[record] > self.walk.run_start[record]
            link = self._held_copies(record) if at is At.END and waited else self._held_run(record, at)
            yield link
            record, at = link.source, link.since

    def _held_copies(self, record: int) -> Link:
        held = int(self._restart[record])
        if held < 0:
            return Link(record, At.END, Via.BEGIN, record)
        if self._loads_held[held]:
            return self._through(Link(record, At.END, Via.LOAD_WAIT, held), self.load_gate)
        return Link(record, At.END, Via.RING, held, held, At.USE)

    def _held_run(self, record: int, at: At) -> Link:
        walk, gate, previous = self.walk, self.run_gate, int(self._previous[record])
        turned = max(float(walk.turned[record]), float(gate.done[record]))
        if self.load_gate.counter[record] >= 0 and walk.load_start[record] > turned:
            return self._through(Link(record, at, Via.OPENING, record), self.load_gate)
        if gate.counter[record] >= 0 and gate.done[record] > self._previous_end[record]:
            return self._through(Link(record, at, Via.RUN_WAIT, record), gate)
        return Link(record, at, Via.LIST if previous >= 0 else Via.BEGIN, record, previous)

    def _through(self, link: Link, gate: Gate) -> Link:
        counter, source = int(gate.counter[link.held]), int(gate.source[link.held])
        is_early = int(self.walk.records["early"][source]) == counter
        return Link(link.record, link.at, link.via, link.held, source, At.SIGNAL if is_early else At.END, counter)

    def lengths(self, link: Link) -> Lengths:
        """What `link` took in this walk, by this walk's numbers of its records.

        Its chain may be another walk's: the four add up to the time from the source's moment (or the step's beginning)
        to the link's, and in the walk that the chain is of, `order` is zero.
        """
        walk, record, held = self.walk, link.record, link.held
        began = self.moment(link.source, link.since) if link.source >= 0 else 0.0
        run_start = float(walk.run_start[record])
        if link.at is not At.END:
            run, copies, late = self.moment(record, link.at) - run_start, 0.0, 0.0
        else:
            copied, landed = float(self._copied[record]), float(walk.landed[record])
            run, copies, late = float(walk.end[record]) - copied, copied - run_start, copied - landed
            if link.via is Via.RING:
                return Lengths(run, landed - began, 0.0, late)
            if link.via is Via.LOAD_WAIT:
                load_start = float(walk.load_start[held])
                ready = max(float(self.load_gate.done[held]), float(self._landed_before[held]))
                return Lengths(run, landed - load_start, load_start - ready, ready - began + late)
            if link.via is Via.BEGIN:
                return Lengths(run, copied, 0.0, 0.0)
        ready = float((self.load_gate.done if link.via is Via.OPENING else self._ready)[record])
        return Lengths(run, copies, run_start - ready, ready - began)

    def moment(self, record: int, at: At) -> float:
        """When a record got to that moment."""
        walk = self.walk
        times = {At.END: walk.end, At.SIGNAL: walk.signalled, At.USE: walk.used}[at]
        return float(times[record])

    def slack(self) -> Times:
        """Per record, how much later its end could come."""
        walk, total = self.walk, self.walk.total_ns
        slack = np.full(len(walk.end), np.inf)
        latest = np.full(NONE + 1, np.inf)  # per counter, when it may be complete at the latest
        stream = np.full(int(walk.sm.max(initial=-1)) + 1, np.inf)  # per SM, how much later its copies may land
        stall = np.maximum(walk.landed - walk.reached, 0.0)
        spare = np.maximum(walk.run_start - walk.landed, 0.0)
        room = np.maximum(self._exposure.full - walk.used, 0.0)
        opens = np.maximum(self._landed_before, self.load_gate.done)
        ready = np.maximum(self._ready, self.load_gate.done)
        arrive, early = walk.records["arrive"].tolist(), walk.records["early"].tolist()
        loads, runs = _counters(walk, "load"), _counters(walk, "run")
        order: list[int] = np.argsort(-walk.run_start, kind="stable").tolist()
        for record in order:
            sm, previous = walk.sm[record], self._previous[record]
            own = min(slack[record], total - walk.end[record], latest[arrive[record]] - walk.end[record])
            own = max(min(own, latest[early[record]] - walk.signalled[record]), 0.0)
            slack[record] = own
            begin = ready[record] + min(own + stall[record], room[record] + stream[sm])
            for counter in runs[record]:
                latest[counter] = min(latest[counter], begin)
            if previous >= 0:
                slack[previous] = begin - walk.end[previous]
            if walk.copies[record]:
                stream[sm] = min(stream[sm], own + spare[record])
            for counter in loads[record]:
                latest[counter] = min(latest[counter], opens[record] + stream[sm], begin)
        return slack


def _counters(walk: Walk, phase: str) -> list[list[int]]:
    """Per record, the counters of its waits for this step."""
    waits = walk.records[f"{phase}_waits"]
    num_waits: Numbers = walk.records[f"num_{phase}_waits"].astype(np.int64)
    counters: Numbers = waits["counter"].astype(np.int64)
    lags: Numbers = waits["lag"].astype(np.int64)
    is_used = (np.indices(counters.shape)[1] < num_waits[:, None]) & (lags == 0)
    found: list[list[int]] = [[] for _ in range(len(counters))]
    for record, slot in np.argwhere(is_used).tolist():
        found[record].append(int(counters[record, slot]))
    return found
