"""Dependencies turned into counters, waits and arrivals; nothing else writes a wait.

A counter belongs to one operator at its end, or at its early signal, and every task of it arrives once a step whatever
the live state; the arrivals of one operator may be dealt to several words, and whoever waits for it waits for all. A
record waits only for what its SM has not waited for before in the step: the producer knows what it waited for, and the
consumers know that too, since a run starts after its own record's load wait.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from megakernel.graph import Op, TaskGraph
from megakernel.hazards import Dependencies, Source
from megakernel.placement import Schedule

NONE = 0xFFFF
"""No counter."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait until all `need` arrivals of this step (lag 0) or of the previous one (lag 1) have been counted."""

    counter: int
    lag: int
    need: int


@dataclass(frozen=True, slots=True, eq=False)
class _Waits:
    """Waits of a record, equal to itself alone, so that asking for it costs nothing."""

    load: tuple[Wait, ...]
    run: tuple[Wait, ...]


@dataclass(frozen=True, slots=True)
class Signals:
    """What one record waits for and where it arrives."""

    load_waits: tuple[Wait, ...]
    run_waits: tuple[Wait, ...]
    early: int
    arrive: int


@dataclass(frozen=True)
class Wiring:
    """Signals of every task (by task number), arrivals per step of every counter, and the counters' titles."""

    signals: tuple[Signals, ...]
    totals: tuple[int, ...]
    titles: tuple[str, ...]


def wire(
    graph: TaskGraph, dependencies: Dependencies, schedule: Schedule, *, load_after_wait: bool, words: int = 1
) -> Wiring:
    """Give dependencies counters, `words` each, and records their waits.

    `load_after_wait` holds loads back to the run wait.
    """
    awaited = {(source.op, source.early) for needs in dependencies.needs for source in (*needs.load, *needs.run)}
    totals: list[int] = []
    titles: list[str] = []
    arrives: dict[tuple[int, bool], list[int]] = {}  # by awaited operator, the counter of each of its tasks
    waits: dict[Source, tuple[Wait, ...]] = {}
    for op_idx, early in sorted(awaited):
        op, first = graph.ops[op_idx], len(totals)
        arrives[op_idx, early] = _deal(op, first, words, early=early)
        found = Counter(counter for counter in arrives[op_idx, early] if counter != NONE)
        totals += [found[counter] for counter in sorted(found)]
        name = f"{op.title}{'.early' if early else ''}"
        titles += [name if len(found) == 1 else f"{name}, word {idx + 1}" for idx in range(len(found))]
        for lag in (0, 1):
            waits[Source(op_idx, early, lag)] = tuple(Wait(each, lag, found[each]) for each in sorted(found))

    op_of = [idx for idx, op in enumerate(graph.ops) for _ in op.tasks]
    at_early, at_end = (_by_task(graph, arrives, early=early) for early in (True, False))
    bits = {source: dependencies.bit(source) for source in waits}

    def new(sources: tuple[Source, ...], known: int) -> tuple[tuple[Wait, ...], int]:
        fresh: list[Wait] = []
        for source in sources:
            if not known & bits[source]:
                fresh += waits[source]
                known |= dependencies.implied[source]
        return tuple(fresh), known

    @cache  # many SMs know the same
    def step(op_idx: int, loads_know: int, runs_know: int) -> tuple[_Waits, int, int]:
        needs = dependencies.needs[op_idx]
        load_sources = needs.load + needs.run if load_after_wait else needs.load
        load_waits, loads_know = new(load_sources, loads_know)
        run_waits, runs_know = new(needs.run, runs_know | loads_know)
        return _Waits(load_waits, run_waits), loads_know, runs_know

    known: dict[tuple[_Waits, int, int], Signals] = {}
    signals: list[Signals | None] = [None] * graph.num_tasks
    for tasks in schedule.sms:
        loads_know = runs_know = 0
        for task in tasks:
            waited, loads_know, runs_know = step(op_of[task], loads_know, runs_know)
            key = waited, at_early[task], at_end[task]
            if (found := known.get(key)) is None:
                found = known[key] = Signals(waited.load, waited.run, at_early[task], at_end[task])
            signals[task] = found
    placed = tuple(signal for signal in signals if signal is not None)
    assert len(placed) == graph.num_tasks, "the schedule leaves out a task"
    return Wiring(placed, tuple(totals), tuple(titles))


def _by_task(graph: TaskGraph, arrives: dict[tuple[int, bool], list[int]], *, early: bool) -> list[int]:
    """The counter at which each task of the graph arrives, early or at its end; NONE: at none."""
    counters: list[int] = []
    for idx, op in enumerate(graph.ops):
        counters += arrives.get((idx, early)) or [NONE] * len(op.tasks)
    return counters


def _deal(op: Op, first: int, words: int, *, early: bool) -> list[int]:
    """The counter at which each task of an operator arrives, those from `first` on in turn; NONE: at none."""
    counters: list[int] = []
    turn = 0
    for task in op.tasks:
        arrives = task.signals_early or not early
        counters.append(first + turn % words if arrives else NONE)
        turn += arrives
    return counters
