"""Bandwidth and ring fill over the time of a step, from what each record did when.

Owns the reconstruction: an SM's copies land one after another, evenly from the record's first issue (or the landing
before it) to its last landing, and not while `exposure` finds the stream standing still at a full ring; they leave the
ring evenly from the first copy's use to the record's end; all together no faster than the memory streams. Copies within
a record are an estimate, records' ends are not, and no byte is lost. Called by `page`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simulator.exposure import Exposure
from simulator.step_run import StepRun
from simulator.walk import Numbers, Times, Walk

BINS = 1500
"""Points of a curve: a microsecond or so of a whole step."""


@dataclass(frozen=True)
class Curves:
    """Values at the ends of equal bins: bytes landed a nanosecond, and landed bytes in a ring (mean, least, most)."""

    bin_ns: float
    bytes_per_ns: npt.NDArray[np.float64]
    ring_mean: npt.NDArray[np.float64]
    ring_least: npt.NDArray[np.float64]
    ring_most: npt.NDArray[np.float64]


def curves(run: StepRun, walk: Walk, exposure: Exposure, bins: int = BINS) -> Curves:
    """Curves of a simulated step."""
    edges = np.linspace(0.0, walk.total_ns, bins + 1)
    ring = run.step.choices.ring
    load_bytes = run.lowered.cost.load_bytes[walk.task]
    begin = np.maximum(walk.load_start, walk.landed_before())
    landed = np.zeros(bins + 1)
    fills: list[Times] = []
    for sm in range(run.step.table.num_sms):
        own = np.flatnonzero((walk.sm == sm) & (walk.copies > 0))
        behind = np.cumsum(walk.copies[own])
        first = behind - walk.copies[own]
        stalls = exposure.full[own] < walk.used[own]
        held, filled = own[stalls], first[stalls] + ring.stages
        come = _at(
            edges,
            (begin[own], first),
            (exposure.full[held], filled),
            (walk.used[held], filled),
            (walk.landed[own], behind),
        )
        gone = _at(edges, (walk.used[own], first), (walk.end[own], behind))
        copies_behind, bytes_behind = np.append(0, behind), np.append(0, np.cumsum(load_bytes[own]))
        landed += np.interp(come, copies_behind, bytes_behind)
        fills.append(np.clip(come - gone, 0.0, ring.stages)[1:] * ring.copy_bytes)
    # What would have landed faster than the memory streams has come before.
    ceiling = edges * run.chip.ceiling_bytes_per_ns(run.step.table.num_sms)
    landed[1:] = (np.maximum.accumulate((landed - ceiling)[::-1])[::-1] + ceiling)[1:]
    fill = np.array(fills)
    bin_ns = float(edges[1]) if bins else 0.0
    return Curves(bin_ns, np.diff(landed) / bin_ns, fill.mean(0), fill.min(0), fill.max(0))


def _at(edges: Times, *knots: tuple[Times, Numbers]) -> Times:
    """Number of copies at each time, linear between knots; a number is reached no earlier than a lower one."""
    times, copies = (np.concatenate(part) for part in zip(*knots, strict=True))
    if not len(times):
        return np.zeros(len(edges))
    order = np.lexsort((times, copies))
    return np.interp(edges, np.maximum.accumulate(times[order]), copies[order])
