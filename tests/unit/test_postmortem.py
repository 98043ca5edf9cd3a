"""The autopsy of a stopped launch, on evidence made by hand: who should have fired first, and why it did not."""

import numpy as np
import pytest
from support import small

from megakernel.abi import PROGRESS, REPORT, Place, Stop
from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.table import TaskTable
from runtime.gpu.postmortem import Evidence, GraphTitles, explain


@pytest.fixture(scope="module")
def step():
    return small.build()


def run(table, *, lost=(), first_step=0):
    """Run a table's first step as far as it goes: the evidence that a stop then leaves. `lost` tasks don't arrive."""
    totals = table.totals.astype(np.int64)
    counts = totals * first_step
    at = [0] * table.num_sms
    moved = True
    while moved:
        moved = False
        for sm in range(table.num_sms):
            records = table.sm_records(sm)
            while at[sm] < len(records):
                record = records[at[sm]]
                waits = [*record["load_waits"][: record["num_load_waits"]]]
                waits += [*record["run_waits"][: record["num_run_waits"]]]
                wanted = [(first_step - int(w["lag"])) * totals[w["counter"]] + int(w["need"]) for w in waits]
                if any(counts[w["counter"]] < value for w, value in zip(waits, wanted, strict=True)):
                    break
                if record["task"] not in lost:
                    for counter in (record["early"], record["arrive"]):
                        if counter != NONE:
                            counts[counter] += 1
                at[sm] += 1
                moved = True
    report = np.zeros(1, REPORT.dtype)[0]
    report["stop"], report["place"], report["step"] = Stop.LATE, Place.RUN_WAIT, first_step
    progress = np.zeros(table.num_sms, PROGRESS.dtype)
    progress["arrived"] = at
    return Evidence(report, (counts % 2**32).astype("<u4"), progress, first_step)


def task_of(step, name, index):
    for first, op in zip(step.graph.first_task, step.graph.ops, strict=True):
        if op.title == name:
            return first + index
    raise AssertionError(name)


def titles(step):
    return GraphTitles(step.graph, step.counter_titles)


def changed(step, change):
    records = step.table.records.copy()
    change(records)
    return TaskTable(step.table.header, step.table.offsets, step.table.totals, records)


@pytest.mark.parametrize("witness", ["of the step", "idle so far"])
@pytest.mark.parametrize("first_step", [0, 2**32 // 200])
def test_a_lost_arrival_is_told_from_a_missing_one(step, first_step, witness):
    """Also where the block that gave up first still tells of the launch before: it had nothing to do in this one."""
    lost = task_of(step, "L2.attend", 5)
    evidence = run(step.table, lost={lost}, first_step=first_step)
    if witness == "idle so far":
        evidence.report["step"], evidence.report["place"] = (first_step - 1) % 2**32, Place.RECORD
    message = explain(step.table, titles(step), evidence)
    assert ("gave up first, before its first record" in message) == (witness == "idle so far")
    assert "first task that should have fired is L2.merge[0]" in message
    assert "have run, so an arrival was lost" in message


def test_a_record_that_does_not_arrive_is_found(step):
    row = int(np.nonzero(step.table.records["task"] == task_of(step, "L1.up", 3))[0][0])

    def drop(records):
        records["arrive"][row] = NONE

    table = changed(step, drop)
    message = explain(table, titles(step), run(table))
    assert "first task that should have fired is L1.down[0]" in message
    assert "only 59 records arrive there instead of 60, an arrival is missing" in message


def test_a_wrong_target_is_found(step):
    row = int(np.nonzero(step.table.records["task"] == task_of(step, "L1.merge", 2))[0][0])

    def bend(records):
        records["run_waits"]["need"][row, 0] += 1

    table = changed(step, bend)
    message = explain(table, titles(step), run(table))
    assert "first task that should have fired is L1.merge[2]" in message
    assert "asks for 51 arrivals a step and 50 are made, a wrong target" in message


def test_an_unbuilt_kind_is_named(step):
    evidence = run(step.table)
    evidence.report["stop"], evidence.report["wanted"] = Stop.UNBUILT, TaskKind.MERGE
    evidence.report["task"] = task_of(step, "L0.merge", 1)
    message = explain(step.table, titles(step), evidence)
    assert "L0.merge[1]" in message
    assert "its kind 4 (merge) was not built into this kernel" in message
