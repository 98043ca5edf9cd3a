"""Is the table a complete and faithful copy of the graph: every task once, operands as lowered, counts that add up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megakernel.abi import MAX_LOAD_WAITS, MAX_RUN_WAITS
from megakernel.counters import NONE
from megakernel.graph import TaskGraph
from megakernel.table import TaskTable, operand_records
from megakernel.verify.finding import Finding, TaskNames

MAX_COUNTER_DIFFERENCE = 2**31
"""Counters wrap; the kernel compares by signed difference."""

OPERANDS = (
    "kind", "layer", "begin", "end", "share", "shares", "router_begin", "router_end", "row_tile_begin",
    "row_tile_count", "inputs", "outputs", "hold_copies",
)  # fmt: skip


def check_structure(graph: TaskGraph, table: TaskTable) -> Iterator[Finding]:
    """Findings about records one by one, and about counters' sums; order is not looked at."""
    misplaced = list(_tasks(graph, table))
    if misplaced:
        yield from misplaced
        return
    yield from _operands(graph, table)
    yield from _ring(graph, table)
    yield from _signals(graph, table)


def _tasks(graph: TaskGraph, table: TaskTable) -> Iterator[Finding]:
    names = TaskNames(graph)
    numbers = table.records["task"]
    for task in np.unique(numbers[numbers >= graph.num_tasks])[:5]:
        yield Finding("unknown task", f"a record is task {task}, the graph has {graph.num_tasks}")
    placed = np.bincount(numbers[numbers < graph.num_tasks], minlength=graph.num_tasks)
    for task in np.nonzero(placed != 1)[0][:5]:
        yield Finding("placed once", f"{names[int(task)]} stands in {placed[task]} records, needed 1")


def _operands(graph: TaskGraph, table: TaskTable) -> Iterator[Finding]:
    names = TaskNames(graph)
    numbers = table.records["task"]
    expected = operand_records(graph)[numbers]
    for name in OPERANDS:
        differs = (table.records[name] != expected[name]).reshape(len(numbers), -1).any(axis=1)
        for row in np.nonzero(differs)[0][:5]:
            found, needed = table.records[name][row], expected[name][row]
            yield Finding("operands", f"{names[int(numbers[row])]}: {name} is {found}, lowered as {needed}")


def _ring(graph: TaskGraph, table: TaskTable) -> Iterator[Finding]:
    names = TaskNames(graph)
    header, held = table.header[0], table.records["hold_copies"]
    stages, copy, cap = (int(header[name]) for name in ("ring_stages", "copy_bytes", "in_flight_cap_bytes"))
    for row in np.nonzero(held >= stages)[0][:5]:
        name = names[int(table.records["task"][row])]
        yield Finding(
            "ring space",
            f"{name} holds {held[row]} stages while the next copy needs one more; the ring has {stages}",
            (
                f"{name} has taken {held[row]} copies, frees none and waits for the next",
                f"the producer waits for a stage: {name} holds {stages} of {stages}",
            ),
        )
    if cap and not copy <= cap <= copy * stages:
        yield Finding(
            "ring space",
            f"the in-flight cap is {cap} bytes, needed {copy} (a copy) to {copy * stages} (the ring)",
        )


def _signals(graph: TaskGraph, table: TaskTable) -> Iterator[Finding]:
    names = TaskNames(graph)
    records, totals = table.records, table.totals.astype(np.int64)
    for phase, limit in (("load", MAX_LOAD_WAITS), ("run", MAX_RUN_WAITS)):
        counts = records[f"num_{phase}_waits"]
        used = np.arange(limit)[None, :] < counts[:, None]
        waits = records[f"{phase}_waits"]
        wrong = (counts > limit) | (used & ((waits["counter"] >= len(totals)) | (waits["lag"] > 1))).any(axis=1)
        for row in np.nonzero(wrong)[0][:5]:
            yield Finding("waits", f"{names[int(records['task'][row])]}: a {phase} wait names no counter or step")
    arrivals = np.zeros(len(totals), dtype=np.int64)
    for name in ("arrive", "early"):
        counters = records[name][records[name] != NONE]
        if (counters >= len(totals)).any():
            yield Finding("arrivals", f"a record arrives at counter {counters.max()}, the table has {len(totals)}")
            return
        arrivals += np.bincount(counters, minlength=len(totals))
    for counter in np.nonzero(arrivals != totals)[0][:5]:
        message = f"counter {counter} gets {arrivals[counter]} arrivals a step, its waits count on {totals[counter]}"
        yield Finding("counter total", message)
    if len(totals) and 2 * int(totals.max()) >= MAX_COUNTER_DIFFERENCE:
        yield Finding("counter total", f"{totals.max()} arrivals a step leave no room below 2^31 for two steps")
