"""A second opinion on packed tables, by running them: every interleaving of a tiny one, random ones of a larger one.

Knows what the tasks of a graph touch and how the kernel walks a table, and nothing of `megakernel.verify` or
`megakernel.hazards`. `judge` explores all that can happen in a few steps, and so proves harm or its absence; `fuzz` can
only prove harm. Harm is a deadlock, a clash of accesses, a counter that runs away from a wait (two steps ahead, and so
without bound), counts that don't add up, a ring that stalls, or a table that is not the graph's.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
from support.walk import Harm, Walk

from megakernel.abi import MAX_INPUTS, MAX_OUTPUTS
from megakernel.counters import NONE
from megakernel.graph import Access, TaskGraph, When
from megakernel.kinds import KINDS
from megakernel.table import TaskTable

STEPS = 4
"""One more than `verify` ever looks at."""

OPERANDS = ("begin", "end", "share", "shares", "router_begin", "router_end", "row_tile_begin", "row_tile_count")


@dataclass(frozen=True)
class Clash:
    """An access of `first` that must be over before one of `then` begins; they stand `lag` steps apart (1: or more)."""

    first: int
    over_early: bool
    then: int
    loads: bool
    lag: int


def clashes(graph: TaskGraph) -> list[Clash]:
    """Pairs of accesses, of different tasks or steps, that meet in an element which one of them writes."""
    touches: dict[int, list[tuple[int, int, Access]]] = {}
    tasks = [(op_idx, task) for op_idx, op in enumerate(graph.ops) for task in op.tasks]
    for number, (op_idx, task) in enumerate(tasks):
        for access in task.accesses:
            touches.setdefault(graph.ops[op_idx].buffers[access.slot], []).append((op_idx, number, access))
    found: dict[Clash, None] = {}
    for touching in touches.values():
        if not any(access.write for _, _, access in touching):
            continue
        for op, first, a in touching:
            for other_op, then, b in touching:
                apart = any(max(x[0], y[0]) >= min(x[1], y[1]) for x, y in zip(a.box, b.box, strict=True))
                if apart or not (a.write or b.write):
                    continue
                early, loads = a.when is When.EARLY, b.when is When.LOAD
                found[Clash(first, early, then, loads, lag=1)] = None
                if first < then and not (op == other_op and a.partitioned and b.partitioned):
                    found[Clash(first, early, then, loads, lag=0)] = None
    return list(found)


class Oracle:
    """Judge of all tables of one graph."""

    def __init__(self, graph: TaskGraph, steps: int = STEPS) -> None:
        """Find out once what must not meet."""
        self.graph, self.steps = graph, steps
        self.clashes = clashes(graph)
        self.tasks = [(op_idx, task) for op_idx, op in enumerate(graph.ops) for task in op.tasks]

    def judge(self, table: TaskTable) -> Harm | None:
        """What goes wrong in some interleaving of `table`; None proves that nothing does."""
        return self.misfit(table) or Walk(self, table).explore()

    def fuzz(self, table: TaskTable, seeds: range) -> Harm | None:
        """What goes wrong in one of the interleavings that `seeds` draw; None proves nothing."""
        if harm := self.misfit(table):
            return harm
        walk = Walk(self, table)
        return next((harm for seed in seeds if (harm := walk.follow(random.Random(seed)))), None)

    def title(self, task: int) -> str:
        """Name of a task."""
        op_idx, _ = self.tasks[task]
        return self.graph.task_title(op_idx, task - self.graph.first_task[op_idx])

    def misfit(self, table: TaskTable) -> Harm | None:
        """What is wrong with the table whatever the order: tasks, operands, sums of arrivals, ring."""
        placed = sorted(int(record["task"]) for record in table.records)
        if placed != list(range(len(self.tasks))):
            return Harm("tasks", f"records hold tasks {placed}")
        arrivals = [0] * table.num_counters
        ring = [int(table.header[0][name]) for name in ("ring_stages", "copy_bytes", "in_flight_cap_bytes")]
        for record in table.records:
            title = self.title(int(record["task"]))
            if wrong := self._altered(record):
                return Harm("operands", f"{title}: {wrong}")
            if ring_stalls(int(record["hold_copies"]), *ring):
                return Harm("ring", f"{title} stalls a ring of {ring[0]} stages")
            for name in ("early", "arrive"):
                if record[name] != NONE:
                    arrivals[record[name]] += 1
        if arrivals != table.totals.tolist():
            return Harm("counters", f"a step brings {arrivals} arrivals, the table says {table.totals.tolist()}")
        return None

    def _altered(self, record: np.void) -> str | None:
        op_idx, lowered = self.tasks[int(record["task"])]
        op = self.graph.ops[op_idx]
        inputs = [*op.buffers[: op.num_inputs], *[-1] * MAX_INPUTS][:MAX_INPUTS]
        outputs = [*op.buffers[op.num_inputs :][: op.num_outputs], *[-1] * MAX_OUTPUTS][:MAX_OUTPUTS]
        wanted = {
            "kind": op.kind,
            "layer": op.layer if op.layer >= 0 else NONE,
            "hold_copies": KINDS[op.kind].hold_copies,
            "inputs": [buffer if buffer >= 0 else NONE for buffer in inputs],
            "outputs": [buffer if buffer >= 0 else NONE for buffer in outputs],
        }
        wanted |= {name: getattr(lowered, name) for name in OPERANDS}
        return next((name for name, value in wanted.items() if record[name].tolist() != value), None)


def ring_stalls(hold: int, stages: int, copy_bytes: int, cap_bytes: int) -> bool:
    """Whether some number of copies never gets through the ring when a run keeps `hold` of them behind the newest."""
    in_flight = cap_bytes // copy_bytes if cap_bytes else stages
    for copies in range(stages + hold + 3):
        issued = taken = freed = 0
        while True:
            if issued < copies and issued - freed < stages and issued - taken < in_flight:
                issued += 1
            elif taken < issued:
                taken += 1
                freed = max(freed, taken - hold)
            else:
                break
        if taken < copies:
            return True
    return False
