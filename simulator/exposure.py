"""Where an SM's stream of copies stood still, and which wait of that SM it was.

Owns the arithmetic behind *exposed* time (defined in `breakdown`) on arrays over all records, SM after SM. An SM's
stream is idle before a record whose load wait ended after everything issued earlier had landed, and while the ring is
full. The latter is not recorded by the simulation: the copy that fills the ring is known, when it landed is estimated
at the SM's fair share of the memory, so a stream that runs faster, catching up, counts as idle a little late. Called
by `breakdown`.
"""

from __future__ import annotations

import numpy as np

from megakernel.hardware import HardwareSpec
from megakernel.tiling import Ring
from simulator.walk import Times, Walk


class Exposure:
    """Times per record of a walk; nanoseconds since the step began."""

    def __init__(self, walk: Walk, ring: Ring, chip: HardwareSpec) -> None:
        """Find the standstills of every SM's stream."""
        self._walk = walk
        # Later SMs lie beyond the end of earlier ones on one common axis, so that one sorted search serves all.
        self._axis = walk.sm * (2.0 * walk.total_ns + 1.0)
        before = walk.landed_before()
        self.load_gap = np.maximum(walk.load_start - before, 0.0)
        self.full = self._ring_full(ring, np.maximum(walk.load_start, before), chip)
        self.exposed_runs = np.maximum(walk.used - np.maximum(walk.turned, self.full), 0.0)
        self.exposed_runs += self._within(before, self.load_gap, walk.turned, walk.used)
        # A ring that is estimated to be full too early is also found idle before a load: the wait holds both.
        self.exposed_runs = np.minimum(self.exposed_runs, walk.used - walk.turned)
        self.exposed_loads = self.load_gap - self._within(
            walk.turned, walk.used - walk.turned, before, before + self.load_gap
        )

    def _ring_full(self, ring: Ring, first_start: Times, chip: HardwareSpec) -> Times:
        """When the ring has filled up behind each record, if its first copy is not used before."""
        walk = self._walk
        num_sms = int(walk.sm[-1]) + 1
        copy_ns = ring.copy_bytes * num_sms / chip.ceiling_bytes_per_ns(num_sms)  # at the SM's share
        behind = np.cumsum(walk.copies)
        first = behind - walk.copies
        last_of_sm = behind[np.searchsorted(walk.sm, walk.sm, side="right") - 1]
        filling = first + ring.stages - 1
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
