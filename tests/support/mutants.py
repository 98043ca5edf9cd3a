"""Ways to spoil a packed table, one small change each, as a wrong lowering, placement, wiring or packing might make it.

An operator takes a table and a random source and returns a changed copy, or None where it finds nothing to change.
Operators that change arrivals sometimes carry the change through to totals and needs, so that the sums still add up.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from support.edits import (
    add_wait,
    arrival_sites,
    copied,
    list_of,
    remove_wait,
    settle,
    wait_sites,
    with_record,
    without,
)

from megakernel.counters import NONE
from megakernel.table import TaskTable

Operator = Callable[[TaskTable, random.Random], TaskTable | None]


def _maybe_settle(table: TaskTable, rng: random.Random) -> TaskTable:
    return settle(table) if rng.random() < 0.7 else table


def _drop(*phases: str, lag: int | None = None) -> Operator:
    def operator(table: TaskTable, rng: random.Random) -> TaskTable | None:
        sites = wait_sites(table, phases, lag)
        if not sites:
            return None
        changed = copied(table)
        remove_wait(changed, rng.choice(sites))
        return changed

    return operator


def _change_wait(change: Callable[[np.ndarray, TaskTable, random.Random], bool], lag: int | None = None) -> Operator:
    def operator(table: TaskTable, rng: random.Random) -> TaskTable | None:
        changed = copied(table)
        sites = wait_sites(changed, lag=lag)
        rng.shuffle(sites)
        for row, phase, slot in sites:
            if change(changed.records[f"{phase}_waits"][row, slot : slot + 1], changed, rng):
                return changed
        return None

    return operator


def _lower_need(wait: np.ndarray, _: TaskTable, rng: random.Random) -> bool:
    wait["need"] = rng.randrange(int(wait["need"][0]))
    return True


def _raise_need(wait: np.ndarray, table: TaskTable, rng: random.Random) -> bool:
    wait["need"] += rng.randint(1, int(table.totals[wait["counter"][0]]))
    return True


def _retarget(wait: np.ndarray, table: TaskTable, rng: random.Random) -> bool:
    others = [counter for counter in range(table.num_counters) if counter != wait["counter"][0]]
    if not others:
        return False
    wait["counter"] = rng.choice(others)
    wait["need"] = table.totals[wait["counter"][0]]
    return True


def _flip_lag(wait: np.ndarray, _table: TaskTable, _rng: random.Random) -> bool:
    wait["lag"] = 1 - wait["lag"]
    return True


def move_wait(table: TaskTable, rng: random.Random, source: str, target: str) -> TaskTable | None:
    """Let a run wait for what its load waited for, or the reverse."""
    sites = wait_sites(table, (source,))
    if not sites:
        return None
    changed = copied(table)
    site = rng.choice(sites)
    return changed if add_wait(changed, site[0], target, remove_wait(changed, site)) else None


def drop_arrival(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record arrives at one counter less."""
    sites = arrival_sites(table)
    if not sites:
        return None
    changed = copied(table)
    row, name = rng.choice(sites)
    changed.records[name][row] = NONE
    return _maybe_settle(changed, rng)


def extra_arrival(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record arrives at one counter more, early or at its end."""
    sites = [(row, name) for name in ("early", "arrive") for row in np.nonzero(table.records[name] == NONE)[0]]
    if not sites or not table.num_counters:
        return None
    changed = copied(table)
    row, name = rng.choice(sites)
    changed.records[name][row] = rng.randrange(table.num_counters)
    return _maybe_settle(changed, rng)


def wrong_arrival(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record arrives at another counter."""
    sites = arrival_sites(table)
    if not sites or table.num_counters < 2:
        return None
    changed = copied(table)
    row, name = rng.choice(sites)
    others = [counter for counter in range(table.num_counters) if counter != changed.records[name][row]]
    changed.records[name][row] = rng.choice(others)
    return _maybe_settle(changed, rng)


def arrive_early(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record arrives at its early signal and not at its end; if it signals early anyway, the two change places."""
    rows = np.nonzero(table.records["arrive"] != NONE)[0]
    return _exchange_signals(table, int(rng.choice(rows))) if len(rows) else None


def arrive_late(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record's early signal comes with its end."""
    rows = np.nonzero(table.records["early"] != NONE)[0]
    return _exchange_signals(table, int(rng.choice(rows))) if len(rows) else None


def _exchange_signals(table: TaskTable, row: int) -> TaskTable:
    changed = copied(table)
    early, arrive = changed.records["early"][row], changed.records["arrive"][row]
    changed.records["early"][row], changed.records["arrive"][row] = arrive, early
    return changed


def swap_in_list(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """Two records of one list change places."""
    lists = [sm for sm in range(table.num_sms) if len(table.sm_records(sm)) >= 2]
    if not lists:
        return None
    changed = copied(table)
    _swap_two(changed, rng.choice(lists), rng)
    return changed


def swap_in_two_lists(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """In each of two lists, two records change places."""
    lists = [sm for sm in range(table.num_sms) if len(table.sm_records(sm)) >= 2]
    if len(lists) < 2:
        return None
    changed = copied(table)
    for sm in rng.sample(lists, 2):
        _swap_two(changed, sm, rng)
    return changed


def _swap_two(table: TaskTable, sm: int, rng: random.Random) -> None:
    rows = rng.sample(range(int(table.offsets[sm]), int(table.offsets[sm + 1])), 2)
    table.records[rows] = table.records[rows[::-1]]


def move_record(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record moves to a random place of another list."""
    row = rng.randrange(len(table.records))
    record = table.records[row].copy()
    sm = rng.choice([sm for sm in range(table.num_sms) if sm != list_of(table, row)])
    smaller = without(table, row)
    return with_record(smaller, sm, rng.randint(0, len(smaller.sm_records(sm))), record)


def drop_record(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record is missing."""
    return _maybe_settle(copied(without(table, rng.randrange(len(table.records)))), rng)


def duplicate_record(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record stands in two places, or in that of another."""
    record = table.records[rng.randrange(len(table.records))].copy()
    sm = rng.randrange(table.num_sms)
    if rng.random() < 0.5 and len(table.records) > 1:
        changed = copied(table)
        changed.records[rng.choice(np.nonzero(table.records["task"] != record["task"])[0])] = record
    else:
        changed = copied(with_record(table, sm, rng.randint(0, len(table.sm_records(sm))), record))
    return _maybe_settle(changed, rng)


def alter_operand(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record means other units, another share or other buffers."""
    changed = copied(table)
    name = rng.choice(("kind", "layer", "begin", "end", "share", "shares", "router_end", "row_tile_count"))
    row = rng.randrange(len(table.records))
    changed.records[name][row] = (int(changed.records[name][row]) + rng.randint(1, 3)) % NONE
    return changed


def overflow_ring(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A ring with less room than a run keeps, or a run that keeps more than the ring has."""
    changed = copied(table)
    stages, held = int(table.header["ring_stages"][0]), int(table.records["hold_copies"].max())
    match rng.randrange(3):
        case 0 if held:
            changed.header["ring_stages"] = rng.randint(1, held)
        case 1:
            changed.header["in_flight_cap_bytes"] = rng.randint(1, int(table.header["copy_bytes"][0]) - 1)
        case _:
            changed.records["hold_copies"][rng.randrange(len(table.records))] = stages + rng.randrange(2)
    return changed


def reorder_waits(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record asks for the same counts in another order."""
    sites = [(row, phase) for row, phase, slot in wait_sites(table) if slot == 1]
    if not sites:
        return None
    changed = copied(table)
    row, phase = rng.choice(sites)
    waits = changed.records[f"{phase}_waits"][row]
    waits[:2] = waits[:2][::-1].copy()
    return changed


def extra_wait(table: TaskTable, rng: random.Random) -> TaskTable | None:
    """A record waits for one thing more."""
    if not table.num_counters:
        return None
    changed = copied(table)
    counter = rng.randrange(table.num_counters)
    wait = (counter, rng.randrange(2), int(table.totals[counter]))
    return changed if add_wait(changed, rng.randrange(len(table.records)), rng.choice(("load", "run")), wait) else None


OPERATORS: dict[str, Operator] = {
    "drop a run wait": _drop("run"),
    "drop a load wait": _drop("load"),
    "drop a wait for the previous step": _drop("load", "run", lag=1),
    "lower a need": _change_wait(_lower_need),
    "raise a need": _change_wait(_raise_need),
    "wait for another counter": _change_wait(_retarget),
    "wait a step too late": _change_wait(_flip_lag, lag=0),
    "wait a step too soon": _change_wait(_flip_lag, lag=1),
    "wait at the run, not the load": lambda table, rng: move_wait(table, rng, "load", "run"),
    "wait at the load, not the run": lambda table, rng: move_wait(table, rng, "run", "load"),
    "drop an arrival": drop_arrival,
    "arrive once more": extra_arrival,
    "arrive at another counter": wrong_arrival,
    "arrive early": arrive_early,
    "signal late": arrive_late,
    "swap records of a list": swap_in_list,
    "swap records of two lists": swap_in_two_lists,
    "move a record": move_record,
    "drop a record": drop_record,
    "duplicate a record": duplicate_record,
    "alter an operand": alter_operand,
    "overflow the ring": overflow_ring,
    "reorder waits": reorder_waits,
    "wait once more": extra_wait,
}

MOSTLY_HARMLESS = {"wait at the load, not the run", "signal late", "reorder waits"}
"""Operators that make a table stricter or change nothing: they are there for what verify must let pass."""
