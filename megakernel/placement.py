"""Which SM runs which task, and in which order: a task graph and integer weights in, a schedule out.

Every SM runs its list strictly in order, so the order of phases in the lists *is* the schedule. Placement never asks a
cost model: it balances the tasks' weights (bytes), so the same choices give the same table everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megakernel.graph import Op, TaskGraph
from megakernel.kinds import Path
from megakernel.tiling import Interleave, Segment


@dataclass(frozen=True)
class Schedule:
    """Task numbers (reference order) in every SM's list."""

    sms: tuple[tuple[int, ...], ...]


def place(graph: TaskGraph, interleave: Interleave, num_sms: int) -> Schedule:
    """Deal all tasks of `graph` to `num_sms` lists, layer by layer in the order of `interleave`."""
    lists: list[list[int]] = [[] for _ in range(num_sms)]
    if interleave.policy == "round_robin":
        cursor = 0
        for _, tasks in _segments(graph, interleave):
            for task, _ in tasks:
                lists[cursor].append(task)
                cursor = (cursor + 1) % num_sms
    else:
        load = np.zeros(num_sms, dtype=np.int64)
        for path, tasks in _segments(graph, interleave):
            low, high = _group(path, interleave, num_sms)
            own = len(tasks) - len(tasks) * interleave.takeover_percent // 100
            for idx, (task, weight) in enumerate(tasks):
                first, last = (low, high) if idx < own else (0, num_sms)
                sm = first + int(load[first:last].argmin())
                load[sm] += weight
                lists[sm].append(task)
    return Schedule(tuple(tuple(tasks) for tasks in lists))


def _group(path: Path, interleave: Interleave, num_sms: int) -> tuple[int, int]:
    """SMs that a path's tasks go to."""
    if interleave.attention_sms is None or path is Path.TRUNK:
        return 0, num_sms
    if path is Path.ATTENTION:
        return 0, interleave.attention_sms
    return interleave.attention_sms, num_sms


def _segments(graph: TaskGraph, interleave: Interleave) -> Iterator[tuple[Path, list[tuple[int, int]]]]:
    """Parts of operators in the order in which their tasks enter the lists, as (task, weight) pairs."""
    layers: dict[int, dict[str, tuple[int, Op]]] = {}
    outside: list[tuple[int, Op]] = []
    for first, op in zip(graph.first_task, graph.ops, strict=True):
        if op.layer < 0:
            outside.append((first, op))
        else:
            layers.setdefault(op.layer, {})[op.name] = (first, op)
    before, *after = outside
    everything = Segment(op="")
    yield _part(*before, everything)
    for layer in sorted(layers):
        for segment in interleave.segments:
            if segment.op in layers[layer]:
                yield _part(*layers[layer][segment.op], segment)
    for first, op in after:
        yield _part(first, op, everything)


def _part(first: int, op: Op, segment: Segment) -> tuple[Path, list[tuple[int, int]]]:
    size = len(op.tasks)
    begin, end = size * (segment.part - 1) // segment.parts, size * segment.part // segment.parts
    return op.path, [(first + idx, op.tasks[idx].weight) for idx in range(begin, end)]
