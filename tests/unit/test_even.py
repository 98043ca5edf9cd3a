"""Tables of equal phases: the data set's cells and bytes, and that each phase waits for all of the one before."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.assets import asset
from megakernel.config import ConfigError
from megakernel.hardware import load_hardware
from megakernel.tiling import Ring
from runtime.gpu.even import CONSUMES, HAND_OFFS, ISSUES, STREAMING_CELLS, Even
from simulator.points import EvenPoint
from simulator.stream import stream_records

RING = Ring(copy_bytes=8192, stages=25)
SMS = 132


def rows():
    with (Path(__file__).parents[1] / "data" / "streaming-h200.csv").open() as lines:
        yield from csv.DictReader(lines)


def name_of(row):
    """A row's name: the free stream is the uncapped program in which nothing waits."""
    work = row["work_cycles"] if row["in_flight_cap_kb"] or row["work_cycles"] != "none" else ""
    shape = f"{row['dependencies_per_layer']} x {row['copies_per_dependency']}"
    return f"{row['copy_bytes']} B x {row['ring_stages']},{shape},{row['in_flight_cap_kb']},{work}"


def test_the_cells_are_those_of_the_data_set():
    assert len(list(rows())) == 360
    assert sorted(cell.name for cell in STREAMING_CELLS) == sorted({name_of(row) for row in rows()})


def test_a_cell_streams_the_bytes_of_its_row():
    wanted = {
        name_of(row): 49 * SMS * int(row["dependencies_per_layer"]) * int(row["copies_per_dependency"])
        for row in rows()
    }
    for cell in STREAMING_CELLS[::35]:
        built = cell.even.build(SMS)
        records = built.table.records
        assert int((records["end"] - records["begin"]).sum()) == wanted[cell.name]
        assert built.arena_bytes == wanted[cell.name] * cell.ring.copy_bytes


def walk(table, seed):
    """Execute all lists, whoever is ready in random order; yields (SM, phase) as they run. Stops where nobody can."""
    draw = random.Random(seed)
    counters = np.zeros(table.num_counters, dtype=int)
    at = [0] * table.num_sms
    while True:
        ready = []
        for sm in range(table.num_sms):
            records = table.sm_records(sm)
            if at[sm] < len(records):
                record = records[at[sm]]
                waits = record["run_waits"][: record["num_run_waits"]]
                if all(counters[wait["counter"]] >= wait["need"] for wait in waits):
                    ready.append(sm)
        if not ready:
            break
        sm = draw.choice(ready)
        yield sm, at[sm]
        arrive = table.sm_records(sm)[at[sm]]["arrive"]
        if arrive < table.num_counters:
            counters[arrive] += 1
        at[sm] += 1
    assert (counters == table.totals).all()


@settings(max_examples=60, deadline=None)
@given(
    phases=st.integers(1, 5),
    sms=st.integers(1, 7),
    words=st.integers(1, 4),
    work=st.sampled_from([None, 0, 1000]),
    again=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_phase_is_run_once_and_after_all_of_the_one_before(phases, sms, words, work, again, seed):
    even = Even(RING, phases, 3, work, words=min(words, sms), again=again, num_sms=sms)
    ran = list(walk(even.build(SMS).table, seed))
    assert sorted(ran) == [(sm, phase) for sm in range(sms) for phase in range(phases)]
    if work is not None:
        assert [phase for _, phase in ran] == sorted(phase for _, phase in ran)


@pytest.mark.parametrize("work", [None, 0, 2000])
def test_the_simulator_prices_the_same_program(work):
    """Runtime and simulator share no code here: copies, waits and arrivals of one SM, phase by phase."""
    built = Even(RING, 12, 5, work).build(SMS)
    chip = load_hardware(asset("configs/hardware/h200.toml"))
    program = stream_records(EvenPoint(RING.copy_bytes, RING.stages, 4, 5, None, work).program(3), chip)
    for mine, theirs in zip(built.table.sm_records(0), program.sms[0], strict=True):
        assert (mine["end"] - mine["begin"]) * RING.copy_bytes == theirs.load_bytes
        waits = mine["run_waits"][: mine["num_run_waits"]]
        assert [(wait["counter"], wait["need"]) for wait in waits] == [
            (wait.counter, wait.need) for wait in theirs.run_waits
        ]
        assert theirs.arrive in (mine["arrive"], None)  # the simulator leaves out what nobody waits for


def test_what_waits_for_nothing_has_no_counters():
    table = Even(RING, 4, 3).build(SMS).table
    assert table.num_counters == 0
    assert not table.records["num_run_waits"].any()


def test_arrivals_are_dealt_to_the_words_and_all_are_waited_for():
    built = Even(RING, 2, 0, 0, words=4).build(SMS)
    first, second = built.table.sm_records(5)
    assert first["arrive"] == 1
    assert [(int(wait["counter"]), int(wait["need"])) for wait in second["run_waits"]] == [
        (each, 33) for each in range(4)
    ]
    assert built.titles.counter(1) == "counter 1 (P0, word 1)"
    assert built.titles.task(int(second["task"])) == "P1[5]"


@pytest.mark.parametrize(("words", "sms"), [(5, SMS), (3, 2), (0, 8)])
def test_more_words_than_an_sm_can_wait_for_are_refused(words, sms):
    with pytest.raises(ConfigError, match=f"words is {words}, needed 1 to"):
        Even(RING, 2, 0, 0, words=words, num_sms=sms).build(SMS)


def test_work_is_not_spent_in_the_first_phase():
    kinds = Even(RING, 3, 1, 1000).build(SMS).table.sm_records(0)["kind"]
    assert kinds[0] not in kinds[1:]


def test_data_that_are_to_lie_in_l2_do():
    for even in (*ISSUES.values(), *CONSUMES.values()):
        assert even.build(SMS).arena_bytes <= 16 << 20
        assert even.num_sms == 1


def test_a_ring_holds_all_that_is_to_have_landed():
    for even in CONSUMES.values():
        assert even.copies <= even.ring.stages


def test_hand_offs_copy_nothing():
    assert all(even.copies == 0 and even.num_sms <= SMS for even in HAND_OFFS.values())
