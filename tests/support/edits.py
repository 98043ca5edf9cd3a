"""Small edits of packed tables, from which `mutants` is made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megakernel.abi import MAX_LOAD_WAITS, MAX_RUN_WAITS
from megakernel.counters import NONE
from megakernel.table import TaskTable

Site = tuple[int, str, int]
"""A wait: record, phase and slot."""

LIMITS = {"load": MAX_LOAD_WAITS, "run": MAX_RUN_WAITS}


def copied(table: TaskTable) -> TaskTable:
    """A table whose arrays may be written."""
    return TaskTable(table.header.copy(), table.offsets.copy(), table.totals.copy(), table.records.copy())


def wait_sites(table: TaskTable, phases: tuple[str, ...] = ("load", "run"), lag: int | None = None) -> list[Site]:
    """All waits of some phases, with a lag if one is given."""
    return [
        (row, phase, slot)
        for row in range(len(table.records))
        for phase in phases
        for slot in range(int(table.records[f"num_{phase}_waits"][row]))
        if lag is None or table.records[f"{phase}_waits"]["lag"][row, slot] == lag
    ]


def remove_wait(table: TaskTable, site: Site) -> tuple[int, int, int]:
    """Take a wait out of its record, in place; the wait."""
    row, phase, slot = site
    waits = table.records[f"{phase}_waits"][row]
    taken = tuple(int(value) for value in waits[slot])
    waits[slot:-1] = waits[slot + 1 :].copy()
    waits[-1] = 0
    table.records[f"num_{phase}_waits"][row] -= 1
    return taken


def add_wait(table: TaskTable, row: int, phase: str, wait: tuple[int, int, int]) -> bool:
    """Append a wait to a record, in place; False if there is no room."""
    count = int(table.records[f"num_{phase}_waits"][row])
    if count == LIMITS[phase]:
        return False
    table.records[f"{phase}_waits"][row, count] = wait
    table.records[f"num_{phase}_waits"][row] = count + 1
    return True


def without(table: TaskTable, row: int) -> TaskTable:
    """The table less one record; its counters keep their totals."""
    offsets = table.offsets.copy()
    offsets[list_of(table, row) + 1 :] -= 1
    return _relisted(table, offsets, np.delete(table.records, row))


def with_record(table: TaskTable, sm: int, at: int, record: np.void) -> TaskTable:
    """The table with `record` inserted as record `at` of list `sm`."""
    offsets = table.offsets.copy()
    offsets[sm + 1 :] += 1
    return _relisted(table, offsets, np.insert(table.records, int(table.offsets[sm]) + at, record))


def settle(table: TaskTable) -> TaskTable:
    """Carry a change of arrivals through, in place: totals are what arrives, and waits for all wait for all."""
    arriving = [*table.records["arrive"].tolist(), *table.records["early"].tolist()]
    totals = np.array([arriving.count(counter) for counter in range(table.num_counters)], dtype=table.totals.dtype)
    for row, phase, slot in wait_sites(table):
        wait = table.records[f"{phase}_waits"][row, slot : slot + 1]
        counter = int(wait["counter"][0])
        if wait["need"][0] == table.totals[counter]:
            wait["need"] = totals[counter]
    table.totals[:] = totals
    return table


def arrival_sites(table: TaskTable) -> list[tuple[int, str]]:
    """All arrivals: record and field."""
    return [(int(row), name) for name in ("early", "arrive") for row in np.nonzero(table.records[name] != NONE)[0]]


def list_of(table: TaskTable, row: int) -> int:
    """SM whose list holds a record."""
    return int(np.searchsorted(table.offsets, row, side="right")) - 1


def _relisted(table: TaskTable, offsets: np.ndarray, records: np.ndarray) -> TaskTable:
    header = table.header.copy()
    header["num_records"] = len(records)
    return replace(table, header=header, offsets=offsets, records=records)
