"""Pausing the garbage collector: where it is paused there is little for it to find, and it is left as it was."""

import gc

import pytest
from support import north
from support.h200 import load_cells

from megakernel.build import assemble
from megakernel.uncollected import uncollected
from megakernel.verify import verify
from simulator.few_layers import truncated
from simulator.simulate import simulate
from simulator.stream import stream_records


@pytest.fixture(autouse=True)
def _collector():
    yield
    gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was_also_by_what_fails(enabled):
    (gc.enable if enabled else gc.disable)()

    @uncollected()
    def fail() -> None:
        assert not gc.isenabled()
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fail()
    assert gc.isenabled() == enabled


def found_after(work) -> int:
    """Objects in cycles that `work` leaves behind, when all caches are filled.

    The fewest of three times: what else the process does leaves some of its own.
    """
    work()
    found: list[int] = []
    for _ in range(3):
        gc.collect()
        gc.disable()
        work()
        found.append(gc.collect())
        gc.enable()
    return min(found)


def test_building_and_proving_make_no_cycle_for_a_record():
    model, chip = truncated(north.model(), 3), north.chip()
    records = 0

    def work() -> None:
        nonlocal records
        step = assemble(model, north.BUCKET, north.choices("hand"), chip.num_sms)
        assert not verify(step.graph, step.table)
        records = len(step.table.records)

    assert found_after(work) < records / 20


def test_a_run_makes_no_cycle_but_its_actors_however_long_it_is():
    cell, chip = load_cells()[50], north.chip()
    short, long = (stream_records(cell.program(layers), chip) for layers in (2, 6))
    assert found_after(lambda: simulate(long, chip)) < 1.2 * found_after(lambda: simulate(short, chip))
