"""A task table as it was walked, in a simulation or on a card: what each record did when, and what let it begin.

Owns the arrays that attribution works on, in list order, SM after SM, and the question which arrival a record waited
for last. Refuses to judge: `exposure`, `critical` and `compare` do. Nanoseconds since the step began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megakernel.abi import MAX_LOAD_WAITS, MAX_RUN_WAITS
from megakernel.build import BuiltStep
from megakernel.counters import NONE
from megakernel.hardware import Costs
from megakernel.timeline import Timeline
from simulator.program import Record
from simulator.step_run import StepRun

Times = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Gate(NamedTuple):
    """Per record, of its waits in one phase: the counter that was complete last, when, and who completed it.

    Without a wait the counter is -1, the time minus infinity and the source -1.
    """

    counter: Numbers
    done: Times
    source: Numbers


@dataclass(frozen=True)
class Walk:
    """Times per record, and its number of copies.

    `signalled` is when its early signal was sent (if it has none, its run's start), `used` when its first copy could be
    used, `reached` when its last one's turn comes if all have landed. A timeline holds none of them: they follow from
    the run's start and the chip's work.
    """

    records: npt.NDArray[np.void]
    task: Numbers
    op: Numbers
    sm: Numbers
    load_start: Times
    landed: Times
    turned: Times
    run_start: Times
    end: Times
    signalled: Times
    used: Times
    reached: Times
    copies: Numbers

    @property
    def total_ns(self) -> float:
        """End of the last record."""
        return float(self.end.max(initial=0.0))

    def previous(self) -> Numbers:
        """Per record, the one before it in its SM's list; -1 for an SM's first."""
        before = np.arange(len(self.sm)) - 1
        before[np.diff(self.sm, prepend=-1) != 0] = -1
        return before

    def landed_before(self) -> Times:
        """Per record, when everything that its SM issued earlier had landed; 0 for an SM's first."""
        axis = self.sm * (2.0 * max(self.total_ns, float(self.landed.max(initial=0.0))) + 1.0)
        before = np.maximum.accumulate(self.landed + axis)
        before = np.concatenate([[0.0], before[:-1]])
        return np.maximum(before - axis, 0.0)

    def gates(self) -> tuple[Gate, Gate]:
        """What each record's load waits, and its run waits, of this step were last met by."""
        records = self.records
        arrivals = np.concatenate([records["arrive"], records["early"]]).astype(np.int64)
        times = np.concatenate([self.end, self.signalled])
        order = np.argsort(times, kind="stable")
        done, by = np.full(NONE + 1, -np.inf), np.full(NONE + 1, -1)
        done[arrivals[order]] = times[order]  # of equal indices the last one stays
        by[arrivals[order]] = order % max(len(records), 1)
        return _gate(records, "load", MAX_LOAD_WAITS, done, by), _gate(records, "run", MAX_RUN_WAITS, done, by)


def _gate(records: npt.NDArray[np.void], phase: str, slots: int, done: Times, by: Numbers) -> Gate:
    counter, met = np.full(len(records), -1), np.full(len(records), -np.inf)
    for slot in range(slots):
        waits = records[f"{phase}_waits"][:, slot]
        awaited = waits["counter"].astype(np.int64)
        later = (records[f"num_{phase}_waits"] > slot) & (waits["lag"] == 0) & (done[awaited] > met)
        counter = np.where(later, awaited, counter)
        met = np.where(later, done[awaited], met)
    return Gate(counter, met, np.where(counter >= 0, by[np.maximum(counter, 0)], -1))


@dataclass(frozen=True)
class Demand:
    """What every task asks for, by task number.

    Work from the run's start up to its early signal, up to its first copy, and, if all have landed, up to the turn of
    its last one; and their number.
    """

    signal_ns: Times
    first_ns: Times
    last_ns: Times
    copies: Numbers


def demand_of(run: StepRun) -> Demand:
    """What the tasks of a simulated step asked for."""
    copy_bytes = run.step.choices.ring.copy_bytes
    known: dict[int, tuple[float, float, float]] = {}  # SMs share records
    flat = [record for records in run.lowered.program.sms for record in records]
    for record in flat:
        if id(record) not in known:
            known[id(record)] = _demanded(record, copy_bytes, run.chip.costs)
    times = np.empty((len(flat), 3))
    times[run.lowered.task_of] = [known[id(record)] for record in flat]
    signal, first, last = times.T
    return Demand(signal, first, last, -(-run.lowered.cost.load_bytes // copy_bytes))


def _demanded(record: Record, copy_bytes: int, costs: Costs) -> tuple[float, float, float]:
    """Work of one record up to its early signal, its first copy, and the turn of its last one."""
    signal, copies = record.signal, -(-record.load_bytes // copy_bytes)
    own_ns = record.work_ns + record.other_bytes / costs.l2_bytes_per_ns
    first_ns = signal_ns = signal.work_ns if signal else 0.0
    if signal and signal.copies:
        signal_ns += signal.copies * signal.copy_ns
        copies -= signal.copies
    else:
        first_ns += own_ns
    behind = max(copies - 1, 0)
    read_ns = behind * (costs.consume_ns(copy_bytes) + record.copy_ns)
    turned_ns = behind // record.turn * (record.fetch_ns + record.warp_ns) + (record.fetch_ns if copies else 0.0)
    return signal_ns, first_ns, signal_ns + own_ns + max(read_ns, turned_ns)


def walk_of_run(run: StepRun) -> Walk:
    """The walk of a simulated step."""
    lowered, offsets, demand = run.lowered, run.step.table.offsets.astype(np.int64), demand_of(run)
    load_start, landed, turned, run_start, end = (
        np.concatenate([np.frombuffer(getattr(sm, name)) for sm in run.result.sms])
        for name in ("load_start_ns", "landed_ns", "run_wait_start_ns", "run_start_ns", "end_ns")
    )
    of_record = lowered.task_of
    return Walk(
        records=run.step.table.records,
        task=lowered.task_of,
        op=lowered.op_of,
        sm=np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)),
        load_start=load_start,
        landed=landed,
        turned=turned,
        run_start=run_start,
        end=end,
        signalled=run_start + demand.signal_ns[of_record],
        used=run_start + demand.first_ns[of_record],
        reached=run_start + demand.last_ns[of_record],
        copies=demand.copies[of_record],
    )


def walk_of_timeline(step: BuiltStep, timeline: Timeline, demand: Demand) -> Walk:
    """The walk of a timeline that has every task of `step` once.

    Lists are those of the timeline: which SM ran a task, and in the order of the runs' starts.
    """
    record_of = np.empty(step.graph.num_tasks, dtype=np.int64)
    record_of[step.table.records["task"].astype(np.int64)] = np.arange(step.graph.num_tasks)
    spans = sorted(timeline.spans, key=lambda span: (span.sm, span.run_start_ns, span.end_ns))
    task = np.array([span.task for span in spans], dtype=np.int64)
    run_start, end = np.array([span.run_start_ns for span in spans]), np.array([span.end_ns for span in spans])
    return Walk(
        records=step.table.records[record_of[task]],
        task=task,
        op=np.repeat(np.arange(len(step.graph.ops)), [len(op.tasks) for op in step.graph.ops])[task],
        sm=np.array([span.sm for span in spans], dtype=np.int64),
        load_start=np.array([span.load_start_ns for span in spans]),
        landed=np.array([span.landed_ns for span in spans]),
        turned=np.array([span.run_wait_ns for span in spans]),
        run_start=run_start,
        end=end,
        signalled=np.minimum(run_start + demand.signal_ns[task], end),
        used=np.minimum(run_start + demand.first_ns[task], end),
        reached=np.minimum(run_start + demand.last_ns[task], end),
        copies=demand.copies[task],
    )
