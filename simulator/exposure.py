"""Where an SM's stream of copies stood still, and which wait of that SM it was.

Owns the arithmetic behind *exposed* time (defined in `breakdown`) on arrays over all records, SM after SM. An SM's
stream is idle before a record whose load wait ended after everything issued earlier had landed, and while the ring is
full. The latter is not recorded by the simulation: the copy that fills the ring is known, when it landed is estimated
at the SM's fair share of the memory, so a stream that runs faster, catching up, counts as idle a little late. Called
by `breakdown`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megakernel.abi import MAX_LOAD_WAITS, MAX_RUN_WAITS
from megakernel.build import BuiltStep
from megakernel.counters import NONE
from megakernel.hardware import HardwareSpec
from simulator.step_run import StepRun

Times = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


class Exposure:
    """Times per record, in list order, SM after SM; nanoseconds since the step began."""

    def __init__(self, run: StepRun) -> None:
        """Lay the times of all SMs end to end."""
        step, lowered, result, chip = run.step, run.lowered, run.result, run.chip
        self._records = step.table.records
        self.turned, self.run_start, self.end, load_start, landed = (
            np.concatenate([np.frombuffer(getattr(sm, name)) for sm in result.sms])
            for name in ("run_wait_start_ns", "run_start_ns", "end_ns", "load_start_ns", "landed_ns")
        )
        flat = [record for records in lowered.program.sms for record in records]
        signal_ns = np.array([record.signal.work_ns if record.signal else 0.0 for record in flat])
        work_ns = np.array([record.work_ns + record.other_bytes / chip.costs.l2_bytes_per_ns for record in flat])
        self.used = self.run_start + signal_ns + work_ns
        self._signalled = self.run_start + signal_ns
        # Later SMs lie beyond the end of earlier ones on one common axis, so that one sorted search serves all.
        sizes = np.diff(step.table.offsets.astype(np.int64))
        sm_of = np.repeat(np.arange(len(sizes)), sizes)
        self._axis = sm_of * (2.0 * result.total_ns + 1.0)
        before = np.concatenate([[0.0], np.maximum.accumulate(landed + self._axis)[:-1]])
        before = np.maximum(before - self._axis, 0.0)  # everything issued earlier has landed
        self.load_gap = np.maximum(load_start - before, 0.0)
        self._gap_start = before
        copies = -(-lowered.cost.load_bytes[lowered.task_of] // step.choices.ring.copy_bytes)
        full = self._ring_full(step, sm_of, copies, np.maximum(load_start, before), chip)
        self.exposed_runs = np.maximum(self.used - np.maximum(self.turned, full), 0.0)
        self.exposed_runs += self._within(self._gap_start, self.load_gap, self.turned, self.used)
        self.exposed_loads = self.load_gap - self._within(
            self.turned, self.used - self.turned, self._gap_start, self._gap_start + self.load_gap
        )

    def causes(self) -> tuple[Numbers, Numbers]:
        """Counter that each record's load waits, and its run, waited for longest; -1 where there is none."""
        records = self._records
        done = np.zeros(NONE + 1)
        np.maximum.at(done, records["arrive"], self.end)
        np.maximum.at(done, records["early"], self._signalled)
        load, load_done = _latest(records, "load", MAX_LOAD_WAITS, done)
        run, run_done = _latest(records, "run", MAX_RUN_WAITS, done)
        return load, np.where(load_done > run_done, load, run)

    def _ring_full(
        self, step: BuiltStep, sm_of: Numbers, copies: Numbers, first_start: Times, chip: HardwareSpec
    ) -> Times:
        """When the ring has filled up behind each record, if its first copy is not used before."""
        share = chip.ceiling_bytes_per_ns(step.table.num_sms) / step.table.num_sms
        copy_ns = step.choices.ring.copy_bytes / share
        behind = np.cumsum(copies)
        first = behind - copies
        last_of_sm = behind[step.table.offsets[1:].astype(np.int64) - 1][sm_of]
        filling = first + step.choices.ring.stages - 1
        holder = np.minimum(np.searchsorted(behind, filling, side="right"), len(behind) - 1)
        full = first_start[holder] + (filling - first[holder] + 1) * copy_ns
        # The last copies of an SM fit into the ring: nothing is left to stream.
        return np.where(filling < last_of_sm, full, np.inf)

    def _within(self, starts: Times, lengths: Times, begin: Times, end: Times) -> Times:
        """Per record, how much of begin..end its SM's intervals cover; these are disjoint and sorted."""
        keys = starts + self._axis
        total = np.concatenate([[0.0], np.cumsum(lengths)])

        def covered(at: Times) -> Times:
            idx = np.searchsorted(keys, at + self._axis, side="right") - 1
            inside = np.minimum(at + self._axis - keys[idx], lengths[idx])
            return np.where(idx < 0, 0.0, total[np.maximum(idx, 0)] + inside)

        return covered(end) - covered(begin)


def _latest(records: npt.NDArray[np.void], phase: str, slots: int, done: Times) -> tuple[Numbers, Times]:
    """Of each record's waits for this step, the counter that was complete last, and when."""
    best = np.full(len(records), -1)
    best_done = np.full(len(records), -1.0)
    for slot in range(slots):
        waits = records[f"{phase}_waits"][:, slot]
        counters = waits["counter"].astype(np.int64)
        valid = (records[f"num_{phase}_waits"] > slot) & (waits["lag"] == 0)
        later = valid & (done[counters] > best_done)
        best = np.where(later, counters, best)
        best_done = np.where(later, done[counters], best_done)
    return best, best_done
