"""A step's table with parts of the design taken out: a barrier in place of every wait, a launch in place of the loop.

Tasks, lists and order stay. Both are tables that anything which reads tables reads: the kernel, the interpreter and,
for barriers, the verifier.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megakernel.abi import RECORD
from megakernel.build import BuiltStep
from megakernel.counters import NONE
from megakernel.table import TaskTable


def phases(step: BuiltStep) -> np.ndarray:
    """Phase of every record in list order: operators, counted in the order in which they stand in the lists."""
    segments = step.choices.interleave.segments
    assert all(segment.parts == 1 for segment in segments), "an operator in parts is no phase"
    rank = {segment.op: idx for idx, segment in enumerate(segments)}
    ops, last = step.graph.ops, step.model.num_layers
    places = [(op.layer, rank[op.name]) if op.layer >= 0 else (last if idx else -1, idx) for idx, op in enumerate(ops)]
    order = sorted(range(len(ops)), key=places.__getitem__)
    phase = np.empty(len(ops), np.int64)
    phase[order] = np.arange(len(ops))
    found = np.repeat(phase, [len(op.tasks) for op in ops])[step.table.records["task"]]
    for sm in range(step.table.num_sms):
        own = found[step.table.offsets[sm] : step.table.offsets[sm + 1]]
        assert (np.diff(own) >= 0).all(), f"SM {sm} takes operators in another order"
    return found


def grid_synced(step: BuiltStep, *, loads_ahead: bool) -> TaskTable:
    """The table in which whatever waits waits for the grid: every SM that took part in the phase before has ended it.

    An SM arrives once a phase, at its last record of it, and its first record of the next phase waits for all who did.
    Nobody waits for early signals any more, which stay because they say that there is an early part.
    Without `loads_ahead` that holds back the loads as well, as a grid-wide barrier or a launch does. With it, only
    runs are held back; loads start as early as what they read allows, known phase by phase.
    """
    table, phase = step.table, phases(step)
    words = step.choices.counters.words
    sm = np.repeat(np.arange(table.num_sms), np.diff(table.offsets.astype(np.int64)))
    ends = np.append((phase[1:] != phase[:-1]) | (sm[1:] != sm[:-1]), True)
    begins = np.append(True, ends[:-1])

    # an SM's word among those of the phase, by its turn among those who take part
    arriving = np.flatnonzero(ends)
    turn = np.array([(phase[arriving[:idx]] == phase[at]).sum() for idx, at in enumerate(arriving)])
    keys, counter, totals = np.unique(phase[arriving] * words + turn % words, return_inverse=True, return_counts=True)
    of_phase = [np.flatnonzero(keys // words == each) for each in range(int(phase.max()) + 1)]

    records, early = _without_waits(table)
    records["arrive"] = NONE
    records["arrive"][arriving] = counter
    records["early"] = np.where(records["early"] != NONE, records["early"] + len(totals), NONE)
    totals = np.concatenate([totals, early])
    for at in np.flatnonzero(begins):
        before, lag = (phase[at] - 1, 0) if phase[at] else (phase.max(), 1)
        _wait(records, at, "run" if loads_ahead else "load", of_phase[before], lag, totals)
    if loads_ahead:
        for at, awaited, lag in _load_waits(table, phase):
            _wait(records, at, "load", of_phase[awaited], lag, totals)
    header = table.header.copy()
    header["num_counters"] = len(totals)
    return TaskTable(header, table.offsets, totals.astype("<u4"), records)


def operators(step: BuiltStep) -> list[TaskTable]:
    """One table a phase, for one launch each, in order: its tasks in their lists, empty lists left out, no waits."""
    table, phase = step.table, phases(step)
    sm = np.repeat(np.arange(table.num_sms), np.diff(table.offsets.astype(np.int64)))
    records, _ = _without_waits(table)
    records["arrive"] = NONE
    found: list[TaskTable] = []
    for each in range(int(phase.max()) + 1):
        own = phase == each
        lengths = np.unique(sm[own], return_counts=True)[1]
        header = table.header.copy()
        header["num_records"], header["num_sms"] = own.sum(), len(lengths)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype("<u4")
        found.append(TaskTable(header, offsets, _early(records[own], table.num_counters), records[own]))
    return found


def _without_waits(table: TaskTable) -> tuple[np.ndarray, np.ndarray]:
    """Records that wait for nothing, and the early signals that every counter of the table has of them."""
    records = table.records.copy()
    for name in ("load", "run"):
        records[f"num_{name}_waits"] = 0
        records[f"{name}_waits"] = np.zeros_like(records[f"{name}_waits"])
    return records, _early(records, table.num_counters)


def _early(records: np.ndarray, counters: int) -> np.ndarray:
    signals = records["early"][records["early"] != NONE]
    return np.bincount(signals, minlength=counters).astype("<u4")


def _load_waits(table: TaskTable, phase: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Record, phase and lag of whatever a load of the table waits for, once each."""
    of_counter = np.full(table.num_counters, -1)
    for name in ("arrive", "early"):
        arrives = table.records[name] != NONE
        of_counter[table.records[name][arrives]] = phase[arrives]
    seen: set[tuple[int, int, int]] = set()
    for at in np.flatnonzero(table.records["num_load_waits"]):
        for wait in table.records["load_waits"][at][: table.records["num_load_waits"][at]]:
            seen.add((int(at), int(of_counter[wait["counter"]]), int(wait["lag"])))
    yield from sorted(seen)


def _wait(records: np.ndarray, at: int, when: str, counters: np.ndarray, lag: int, totals: np.ndarray) -> None:
    """Have record `at` wait for all arrivals at `counters` as well."""
    first = int(records[f"num_{when}_waits"][at])
    assert first + len(counters) <= RECORD.dtype[f"{when}_waits"].shape[0], "a record holds so many waits"
    for slot, counter in enumerate(counters, first):
        records[f"{when}_waits"][at, slot] = (counter, lag, totals[counter])
    records[f"num_{when}_waits"][at] = first + len(counters)
