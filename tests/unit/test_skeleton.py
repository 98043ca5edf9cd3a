"""The skeleton table: the bytes, counts and order that its measured times are for."""

import csv
from pathlib import Path

import numpy as np
import pytest

from megakernel.tiling import Ring
from runtime.gpu.skeleton import (
    LAYERS,
    SHIPPED_CELLS,
    SHIPPED_ORDERS,
    SHIPPED_RING,
    Skeleton,
    build_skeleton,
)

SMS = 132


def test_the_cells_are_those_of_the_data_set():
    path = Path(__file__).parents[1] / "data" / "skeleton-h200.csv"
    with path.open() as lines:
        rows = [f"{r['order']},{r['loads']},{r['in_flight_cap_kb']},{r['work_cycles']}" for r in csv.DictReader(lines)]
    assert sorted(cell.name for cell in SHIPPED_CELLS) == sorted(rows)


@pytest.mark.parametrize("ring", [SHIPPED_RING, Ring(copy_bytes=16384, stages=12), Ring(copy_bytes=4096, stages=50)])
def test_no_copy_size_loses_bytes(ring):
    built = build_skeleton(Skeleton(SHIPPED_ORDERS[0], ring), SMS)
    assert 0 <= built.arena_bytes - 7_061_176_320 <= SMS * ring.copy_bytes / 2


@pytest.mark.parametrize("order", SHIPPED_ORDERS, ids=" ".join)
def test_every_wait_is_met_by_records_before_it(order):
    """All SMs have one list, so walking it once with all SMs in step meets every wait or never does."""
    built = build_skeleton(Skeleton(order, SHIPPED_RING), SMS)
    table, titles = built.table, built.titles
    arrived = np.zeros(table.num_counters, dtype=int)
    for record in table.sm_records(0):
        for phase in ("load", "run"):
            for wait in record[f"{phase}_waits"][: record[f"num_{phase}_waits"]]:
                assert arrived[wait["counter"]] == wait["need"], titles.task(int(record["task"]))
        for counter in (record["early"], record["arrive"]):
            if counter < table.num_counters:
                arrived[counter] += SMS
    assert (arrived[:-1] == SMS).all()
    assert table.num_counters == 6 * LAYERS


def test_the_free_stream_waits_for_nothing():
    table = build_skeleton(Skeleton(SHIPPED_ORDERS[0], SHIPPED_RING, free=True), SMS).table
    assert not table.records["num_load_waits"].any()
    assert not table.records["num_run_waits"].any()
    assert table.num_counters == 0
