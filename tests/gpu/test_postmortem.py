"""On a card: a launch that cannot end leaves, says which task should have fired first, and the card stays usable."""

import numpy as np
import pytest
from support import small

from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.table import TaskTable

pytestmark = pytest.mark.gpu

DEADLINE_MS = 20.0


@pytest.fixture(scope="module")
def step():
    return small.build()


@pytest.fixture(scope="module", params=[True, False], ids=["streaming", "computing"])
def streaming(request):
    return request.param


@pytest.fixture(scope="module")
def bench(step, streaming):
    """What all launches here share: buffers, addresses and titles."""
    from runtime.gpu.buffers import StepBuffers, random_inputs
    from runtime.gpu.postmortem import GraphTitles

    buffers = StepBuffers(step, drawn="normal")
    return (
        buffers,
        buffers.set_inputs(random_inputs(step, (2047, 130, 3000))),
        GraphTitles(step.graph, step.counter_titles),
        streaming,
    )


def run(step, bench, table, built=None):
    from runtime.gpu.compile import compile_kernel
    from runtime.gpu.launch import LoadedTable
    from runtime.gpu.specialize import KernelOptions, Specialization, specialize

    constants = dict(specialize(step, small.chip(), KernelOptions(streaming=bench[3])).constants)
    if built is not None:
        constants["kBuiltKinds"] = built
    compiled = compile_kernel(Specialization(tuple(constants.items())), "sm_90a")
    _, addresses, titles, _ = bench
    loaded = LoadedTable(compiled, table, titles, proved_digest=None)
    loaded.arm(addresses, steps=2, deadline_ms=DEADLINE_MS)
    loaded.run()


def broken(table, change):
    """A copy of a table with one record changed."""
    records = table.records.copy()
    change(records)
    return TaskTable(table.header, table.offsets, table.totals, records)


def row_of(step, name, index):
    """The record of task `index` of the operator called `name`."""
    for first, op in zip(step.graph.first_task, step.graph.ops, strict=True):
        if op.title == name:
            return int(np.nonzero(step.table.records["task"] == first + index)[0][0])
    raise AssertionError(name)


def stopped(step, bench, table, **options):
    from runtime.gpu.launch import KernelStoppedError

    with pytest.raises(KernelStoppedError) as caught:
        run(step, bench, table, **options)
    run(step, bench, step.table)  # the card is usable: the same table, whole, ends well
    return str(caught.value)


def test_a_dropped_arrival_is_named(step, bench):
    row = row_of(step, "L1.attend", 7)

    def drop(records):
        records["arrive"][row] = NONE

    message = stopped(step, bench, broken(step.table, drop))
    assert "the first task that should have fired is L1.merge[0]" in message
    assert "L1.attend" in message
    assert "an arrival is missing" in message


def test_a_wrong_target_is_named(step, bench):
    row = row_of(step, "L2.merge", 3)

    def bend(records):
        records["run_waits"]["need"][row, 0] += 1

    message = stopped(step, bench, broken(step.table, bend))
    assert "the first task that should have fired is L2.merge[3]" in message
    assert "a wrong target" in message


def test_an_unbuilt_task_is_named(step, bench):
    built = sum(1 << kind for kind in TaskKind if kind is not TaskKind.MERGE)
    message = stopped(step, bench, step.table, built=built)
    assert "the first task that should have fired is L0.merge[" in message
    assert "its kind 4 (merge) was not built into this kernel" in message
