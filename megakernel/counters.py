"""Dependencies turned into counters, waits and arrivals; nothing else writes a wait.

A counter belongs to one operator at its end, or at its early signal, and every task of it arrives once a step whatever
the live state. A record waits only for what its SM has not waited for before in the step: the producer knows what it
waited for, and the consumers know that too, since a run starts after its own record's load wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel.graph import TaskGraph
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


def wire(graph: TaskGraph, dependencies: Dependencies, schedule: Schedule, *, load_after_wait: bool) -> Wiring:
    """Give dependencies counters and records their waits; `load_after_wait` holds loads back to the run wait."""
    counters: dict[tuple[int, bool], int] = {}
    for needs in dependencies.needs:
        for source in (*needs.load, *needs.run):
            counters.setdefault((source.op, source.early), 0)
    totals: list[int] = []
    titles: list[str] = []
    for counter, (op_idx, early) in enumerate(sorted(counters)):
        counters[op_idx, early] = counter
        op = graph.ops[op_idx]
        totals.append(sum(task.signals_early for task in op.tasks) if early else len(op.tasks))
        titles.append(f"{op.title}{'.early' if early else ''}")

    op_of = [idx for idx, op in enumerate(graph.ops) for _ in op.tasks]
    first_task = graph.first_task
    arrivals = [(counters.get((idx, True), NONE), counters.get((idx, False), NONE)) for idx in range(len(graph.ops))]
    waits = {
        source: Wait(counter, source.lag, totals[counter])
        for (op, early), counter in counters.items()
        for source in (Source(op, early, 0), Source(op, early, 1))
    }
    bits = {source: dependencies.bit(source) for source in waits}

    def new(sources: tuple[Source, ...], known: int) -> tuple[tuple[Wait, ...], int]:
        fresh: list[Wait] = []
        for source in sources:
            if not known & bits[source]:
                fresh.append(waits[source])
                known |= dependencies.implied[source]
        return tuple(fresh), known

    signals: list[Signals | None] = [None] * graph.num_tasks
    for tasks in schedule.sms:
        loads_know = runs_know = 0
        for task in tasks:
            op_idx = op_of[task]
            needs = dependencies.needs[op_idx]
            load_sources = needs.load + needs.run if load_after_wait else needs.load
            load_waits, loads_know = new(load_sources, loads_know)
            run_waits, runs_know = new(needs.run, runs_know | loads_know)
            early, end = arrivals[op_idx]
            publishes = graph.ops[op_idx].tasks[task - first_task[op_idx]].signals_early
            signals[task] = Signals(load_waits, run_waits, early if publishes else NONE, end)
    placed = tuple(signal for signal in signals if signal is not None)
    assert len(placed) == graph.num_tasks, "the schedule leaves out a task"
    return Wiring(placed, tuple(totals), tuple(titles))
