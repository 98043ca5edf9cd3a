"""What must wait for what: dependencies between operators, derived from overlapping regions.

All three hazards count - read after write, write after read, write after write - inside a step and from one step to the
next; a step is therefore looked at twice in a row. Dependencies are between whole operators, because device-built
shares leave nothing finer to name; one that another dependency already implies is left out. `counters` turns the
result into counters and waits; `verify` does not read it, it proves the packed table against the regions themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.graph import Op, TaskGraph, When
from megakernel.regions import covers, overlap

EARLY, LOAD = int(When.EARLY), int(When.LOAD)
"""Numbers, for arrays: NumPy looks for an attribute of an enumeration that it compares with, and drops an interrupt."""


@dataclass(frozen=True, slots=True)
class Source:
    """What a wait waits for: all tasks of `op` at their early signal or at their end, `lag` steps ago (0 or 1)."""

    op: int
    early: bool
    lag: int


@dataclass(frozen=True, slots=True)
class Needs:
    """Sources that an operator's loads and runs wait for; a run also knows what its loads waited for."""

    load: tuple[Source, ...]
    run: tuple[Source, ...]


@dataclass(frozen=True)
class Dependencies:
    """Needs of every operator, and for every possible source the set of sources that waiting for it implies.

    Sets are bit sets over `bit(source)`.
    """

    needs: tuple[Needs, ...]
    implied: dict[Source, int]
    num_ops: int

    def bit(self, source: Source) -> int:
        """The source's own bit."""
        return 1 << _index(source, self.num_ops)


@dataclass(frozen=True)
class Footprint:
    """Distinct accesses of one operator to one buffer, as arrays: boxes [n, dims, 2], and per box the rest.

    `covers`: the operator's writes leave nothing of the buffer as it was.
    """

    boxes: npt.NDArray[np.int64]
    when: npt.NDArray[np.int8]
    write: npt.NDArray[np.bool_]
    covers: bool


def footprint(op: Op, slots: tuple[int, ...], shape: tuple[int, ...]) -> Footprint:
    """Distinct accesses of `op` to the buffer of `shape` that its `slots` mean."""
    distinct = dict.fromkeys(
        (access.box, access.when, access.write) for task in op.tasks for access in task.accesses if access.slot in slots
    )
    whats = list(zip(*distinct, strict=True))
    boxes, write = np.array(whats[0], dtype=np.int64), np.array(whats[2], dtype=np.bool_)
    return Footprint(boxes, np.array(whats[1], dtype=np.int8), write, covers(boxes[write], shape))


def derive(graph: TaskGraph) -> Dependencies:
    """Dependencies of a step that follows an equal step."""
    return _Derivation(graph).run()


def _index(source: Source, num_ops: int) -> int:
    return 2 * ((1 - source.lag) * num_ops + source.op) + (0 if source.early else 1)


class _Derivation:
    """Walks two steps in reference order; keeps, per buffer, the operators that a later access may clash with."""

    def __init__(self, graph: TaskGraph) -> None:
        self.graph = graph
        self.num_ops = len(graph.ops)
        self.history: dict[int, list[tuple[int, int, Footprint]]] = {}
        self.closure: dict[Source, int] = {}
        self.footprints: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Footprint] = {}
        self.clashes: dict[tuple[int, int], frozenset[tuple[bool, bool]]] = {}

    def run(self) -> Dependencies:
        needs: list[Needs] = []
        for step in (0, 1):
            for op_idx in range(self.num_ops):
                found = self._needs(step, op_idx)
                if step == 1:
                    needs.append(found)
        return Dependencies(tuple(needs), self.closure, self.num_ops)

    def _needs(self, step: int, op_idx: int) -> Needs:
        op = self.graph.ops[op_idx]
        wanted: dict[bool, set[Source]] = {True: set(), False: set()}
        for buffer in sorted(set(op.buffers)):
            if buffer < 0 or self.graph.buffers[buffer].read_only:
                continue
            mine = self._footprint(op, buffer)
            past = self.history.setdefault(buffer, [])
            for past_step, past_idx, theirs in past:
                for early, load in self._clash(theirs, mine):
                    wanted[load].add(Source(past_idx, early, 1 - past_step))
            if mine.covers:
                past.clear()
            past.append((step, op_idx, mine))
        load, known = self._reduce(wanted[True], 0)
        run, known = self._reduce(wanted[False], known)
        at_early, at_end = (Source(op_idx, early=early, lag=1 - step) for early in (True, False))
        self.closure[at_early] = known | 1 << _index(at_early, self.num_ops)
        self.closure[at_end] = self.closure[at_early] | 1 << _index(at_end, self.num_ops)
        return Needs(load, run)

    def _reduce(self, wanted: Iterable[Source], known: int) -> tuple[tuple[Source, ...], int]:
        """Latest source first, each only if what is known so far does not imply it."""
        kept: list[Source] = []
        for source in sorted(wanted, key=lambda s: _index(s, self.num_ops), reverse=True):
            if not known >> _index(source, self.num_ops) & 1:
                kept.append(source)
                known |= self.closure[source]
        return tuple(kept), known

    def _footprint(self, op: Op, buffer: int) -> Footprint:
        slots = tuple(slot for slot, bound in enumerate(op.buffers) if bound == buffer)
        shape = self.graph.buffers[buffer].shape
        key = (id(op.tasks), slots, shape)
        if key not in self.footprints:
            self.footprints[key] = footprint(op, slots, shape)
        return self.footprints[key]

    def _clash(self, past: Footprint, now: Footprint) -> frozenset[tuple[bool, bool]]:
        """Which (past access over at the early signal, present access is a load) pairs of accesses clash."""
        key = (id(past), id(now))
        if key not in self.clashes:
            self.clashes[key] = frozenset(
                (is_early, is_load)
                for is_early in (True, False)
                for is_load in (True, False)
                if _meet(past, (past.when == EARLY) == is_early, now, (now.when == LOAD) == is_load)
            )
        return self.clashes[key]


def _meet(past: Footprint, theirs: npt.NDArray[np.bool_], now: Footprint, mine: npt.NDArray[np.bool_]) -> bool:
    """Whether some of one's boxes and some of the other's share an element that one of the two writes."""
    first, second = past.boxes[theirs], now.boxes[mine]
    writes, written = past.write[theirs], now.write[mine]
    # Most operators that share a buffer clash, and a few boxes show it.
    for some in (slice(4), slice(4, None)):
        if (overlap(first[some], second) & (writes[some, None] | written[None, :])).any():
            return True
    return False
