"""Critical path, slack and idle memory: sums that must hold, and what simulations of changed programs say."""

from dataclasses import replace

import numpy as np
import pytest
from support import north
from support.predicting import short_step

from megakernel.build import build_step
from megakernel.counters import NONE
from megakernel.tiling import Ring
from megakernel.workload import Workload
from simulator.breakdown import blend, break_down
from simulator.critical import At, Critical, Via
from simulator.exposure import Exposure
from simulator.program import Program
from simulator.routing import mean_state
from simulator.simulate import simulate
from simulator.step_run import run_step
from simulator.walk import Walk, demand_of, walk_of_run, walk_of_timeline

ONE_ROW = Workload(contexts=(8192,))


def run_of(name="hand", layers=5, chip=None, arrival="release"):
    step = short_step(name, layers=layers)
    return run_step(step, chip or north.chip(), mean_state(step.model, ONE_ROW), arrival=arrival)


def critical_of(run):
    walk = walk_of_run(run)
    return Critical(walk, Exposure(walk, run.step.choices.ring, run.chip))


def made_up(records, lists):
    """A walk of records given as dicts of times, waits and signals; lists of their numbers per SM."""
    dtype = [("arrive", "u2"), ("early", "u2")]
    for phase in ("load", "run"):
        dtype += [(f"num_{phase}_waits", "u1"), (f"{phase}_waits", [("counter", "u2"), ("lag", "u1")], (4,))]
    packed = np.zeros(len(records), dtype)
    order = [number for numbers in lists for number in numbers]
    names = ("load_start", "landed", "turned", "run_start", "end", "signalled", "used", "reached")
    times = {name: [] for name in names}
    for row, number in enumerate(order):
        record = records[number]
        packed[row]["arrive"], packed[row]["early"] = record.get("arrive", NONE), record.get("early", NONE)
        for phase in ("load", "run"):
            waits = record.get(f"{phase}_waits", ())
            packed[row][f"num_{phase}_waits"] = len(waits)
            for slot, counter in enumerate(waits):
                packed[row][f"{phase}_waits"][slot] = (counter, 0)
        start = record["run_start"]
        defaults = {"load_start": 0.0, "landed": 0.0, "turned": start, "signalled": start, "used": start}
        for name, values in times.items():
            values.append(float(record.get(name, defaults.get(name, start))))
    return Walk(
        records=packed,
        task=np.array(order),
        op=np.array(order),
        sm=np.array([sm for sm, numbers in enumerate(lists) for _ in numbers]),
        copies=np.array([records[number].get("copies", 0) for number in order]),
        **{name: np.array(values) for name, values in times.items()},
    )


def judged(walk):
    return Critical(walk, Exposure(walk, Ring(copy_bytes=1024, stages=4), north.chip()))


def test_the_chain_of_a_hand_made_walk():
    # SM 0: a (0 to 10) arrives on counter 0; c (10 to 12). SM 1: b (0 to 4), d waits for a, 11 to 15.
    records = [
        {"run_start": 0, "end": 10, "arrive": 0},
        {"run_start": 0, "end": 4, "arrive": 0},
        {"run_start": 10, "end": 12},
        {"turned": 4, "run_start": 11, "end": 15, "run_waits": (0,)},
    ]
    critical = judged(made_up(records, ((0, 2), (1, 3))))
    chain = critical.chain()
    assert [int(critical.walk.task[link.record]) for link in chain] == [3, 0]
    assert [link.via for link in chain] == [Via.RUN_WAIT, Via.BEGIN]
    assert critical.lengths(chain[0]).wait == 1.0
    assert critical.lengths(chain[0]).run == 4.0
    assert critical.lengths(chain[1]).run == 10.0
    # d is last; a holds it; b could end 6 later; c 3 later.
    slack = dict(zip(critical.walk.task.tolist(), critical.slack().tolist(), strict=True))
    assert slack == {0: 0.0, 1: 6.0, 2: 3.0, 3: 0.0}


def test_copies_behind_a_load_wait_lead_to_the_signal_that_it_waited_for():
    # a signals early at 3; b's copies start at 5 for it, land at 9, and hold b's run from 6.
    records = [
        {"run_start": 1, "signalled": 3, "end": 4, "early": 7},
        {"load_start": 5, "landed": 9, "run_start": 6, "end": 10, "load_waits": (7,), "copies": 1},
    ]
    critical = judged(made_up(records, ((0,), (1,))))
    first, second = critical.chain()
    assert (first.via, first.since) == (Via.LOAD_WAIT, At.SIGNAL)
    assert critical.lengths(first) == critical.lengths(first).__class__(run=1.0, copies=4.0, wait=2.0, order=0.0)
    assert (second.at, second.via) == (At.SIGNAL, Via.BEGIN)
    assert critical.lengths(second).run == 2.0
    assert critical.lengths(second).wait == 1.0


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_the_parts_of_the_path_and_of_idle_memory_add_up(name):
    run = run_of(name)
    found = break_down(run)
    path, idle = found.critical, found.idle
    assert path.run_ns + path.copies_ns + path.hand_off_ns + path.turn_ns == pytest.approx(found.total_ns)
    assert min(path.run_ns, path.copies_ns, path.hand_off_ns, path.turn_ns) >= 0.0
    parts = (idle.start_ns, idle.hand_offs_ns, idle.imbalance_ns, idle.end_ns, idle.service_ns)
    assert sum(parts) == pytest.approx(found.memory_idle_ns)
    assert sum(off.critical_ns for off in found.hand_offs) == pytest.approx(path.hand_off_ns)
    assert sum(off.on_path for off in found.hand_offs) == path.hand_offs
    assert sum(kind.critical_ns for kind in found.kinds) == pytest.approx(path.run_ns)
    critical = critical_of(run)
    assert sum(critical.lengths(link).order for link in critical.chain()) == pytest.approx(0.0, abs=1e-6)


def test_a_timeline_gives_the_walk_that_it_was_made_of():
    run = run_of(layers=2)
    one, other = walk_of_run(run), walk_of_timeline(run.step, run.timeline(), demand_of(run))
    for name in ("task", "op", "sm", "load_start", "landed", "turned", "run_start", "end", "signalled", "copies"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()


def longer(run, task, extra_ns):
    """Step time when one task computes longer."""
    program = run.lowered.program
    records = [list(each) for each in program.sms]
    row = int(np.flatnonzero(run.lowered.task_of == task)[0])
    offsets = run.step.table.offsets.astype(np.int64)
    sm = int(np.searchsorted(offsets, row, side="right")) - 1
    record = records[sm][row - offsets[sm]]
    records[sm][row - offsets[sm]] = replace(record, compute_ns=record.compute_ns + extra_ns)
    changed = Program(program.ring, tuple(map(tuple, records)), program.num_counters, program.arrival)
    return simulate(changed, run.chip).total_ns


def test_a_task_may_take_its_slack_longer_and_no_more_and_a_critical_one_may_not():
    # Loads after the wait: nothing makes good for a delay. A release that is later also finds other copies in flight,
    # and a copy that is late by itself hides a delay of its task.
    costs = north.chip().costs.model_copy(update={"straggle_ns": 0.0, "straggle_queue_share": 0.0})
    run = run_of("reference", layers=2, chip=north.chip().model_copy(update={"costs": costs}), arrival="relaxed")
    critical = critical_of(run)
    walk, slack = critical.walk, critical.slack()
    layers = np.array([op.layer for op in run.step.graph.ops])[walk.op]
    early = np.flatnonzero((layers == 0) & (slack > 1000.0))

    def grown(record, extra_ns):
        return longer(run, int(walk.task[record]), extra_ns) - walk.total_ns

    sample = early[np.linspace(0, len(early) - 1, 6).astype(int)].tolist()
    shares = [grown(record, 0.8 * slack[record]) / slack[record] for record in sample]
    assert sum(share < 0.01 for share in shares) >= 2
    assert max(shares) < 0.7  # a wait that is met later is polled later: that is not in the slack
    assert min(grown(record, 2.0 * slack[record]) / slack[record] for record in sample) > 0.9
    on_path = [link.record for link in critical.chain() if link.at is At.END and layers[link.record] == 1][:3]
    assert on_path
    assert min(grown(record, 4000.0) for record in on_path) > 0.25 * 4000.0


def test_the_end_of_a_step_and_unequal_sms_are_idle_time_of_their_own():
    chip = north.chip()
    work = chip.work.model_copy(update={"sample": chip.work.sample + 20000.0})
    plain, slow = (break_down(run_of(layers=2, chip=each)) for each in (chip, chip.model_copy(update={"work": work})))
    extra_ns = chip.cycles_ns(20000.0)
    assert slow.idle.end_ns - plain.idle.end_ns == pytest.approx(extra_ns)
    assert slow.idle.hand_offs_ns == pytest.approx(plain.idle.hand_offs_ns)
    step = short_step(layers=2)
    cut = step.choices.cut.model_copy(update={"head": 133})
    uneven = build_step(step.model, step.bucket, step.choices.model_copy(update={"cut": cut}), chip)
    found = break_down(run_step(uneven, chip, mean_state(step.model, ONE_ROW)))
    assert found.idle.imbalance_ns > plain.idle.imbalance_ns + 0.3 * (found.total_ns - plain.total_ns) > 0.0


def test_blending_keeps_the_sums():
    part = break_down(run_of(layers=2))
    mixed = blend([(3.0, part), (-2.0, part)])
    assert mixed.idle.end_ns == pytest.approx(part.idle.end_ns)
    assert mixed.critical.tasks == pytest.approx(part.critical.tasks)
    assert mixed.kinds[1].slack_ns == pytest.approx(part.kinds[1].slack_ns)
