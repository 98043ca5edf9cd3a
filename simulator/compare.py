"""Where a measured step and the simulated one differ: by task, and in what the gap between their times is made of.

Owns the split of the gap. The critical path of either timeline is followed in both: what its runs took differently is
*duration*, its waits after the last arrival *wait*, its copies *contention*; what remains is *order*, that other tasks
came last, on other SMs or in another order than in the timeline that the path is of. The parts add up to the gap along
both paths, and their means over the two are given, so that neither timeline is favoured. Refuses timelines of other
tasks. Called by the `simulator` command.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import cast

import numpy as np

from megakernel.timeline import Timeline
from simulator.critical import Critical, Link
from simulator.exposure import Exposure
from simulator.step_run import StepRun
from simulator.trace_file import begin_at_zero
from simulator.walk import Numbers, Times, Walk, demand_of, walk_of_timeline


@dataclass(frozen=True)
class Gap:
    """Measured less simulated step time, in ns, and its parts, which add up to it."""

    total_ns: float
    duration_ns: float
    wait_ns: float
    order_ns: float
    contention_ns: float


@dataclass(frozen=True)
class KindGap:
    """All tasks of one operator: mean times of a task in ns, and how many run on another SM than simulated."""

    name: str
    tasks: int
    measured_run_ns: float
    simulated_run_ns: float
    measured_copies_ns: float
    simulated_copies_ns: float
    measured_wait_ns: float
    simulated_wait_ns: float
    moved: int


@dataclass(frozen=True)
class Comparison:
    """Two timelines of one step, each counted from its first event, and what the gap between them is made of."""

    measured: Timeline
    simulated: Timeline
    gap: Gap
    kinds: tuple[KindGap, ...]
    walks: tuple[Walk, Walk]
    criticals: tuple[Critical, Critical]

    def to_json(self) -> dict[str, object]:
        """Plain data; units are in the names."""
        return {
            "measured": self.measured.source,
            "simulated": self.simulated.source,
            "measured_ms": self.measured.total_ns / 1e6,
            "simulated_ms": self.simulated.total_ns / 1e6,
            "gap": asdict(self.gap),
            "kinds": [asdict(kind) for kind in self.kinds],
        }


def compare(run: StepRun, measured: Timeline) -> Comparison:
    """Compare a measured timeline of the step with its simulated run; the timeline has every task once."""
    demand = demand_of(run)
    simulated, measured = begin_at_zero(run.timeline()), begin_at_zero(measured)
    walks = [walk_of_timeline(run.step, each, demand) for each in (measured, simulated)]
    sides = [_Side(walk, Critical(walk, Exposure(walk, run.step.choices.ring, run.chip))) for walk in walks]
    gap = sides[0].walk.total_ns - sides[1].walk.total_ns
    along = [_parts(sides, of) for of in sides]
    parts = [(first + second) / 2.0 for first, second in zip(*along, strict=True)]
    return Comparison(
        measured=measured,
        simulated=simulated,
        gap=Gap(gap, *parts),
        kinds=tuple(_kinds(run, *walks)),
        walks=(walks[0], walks[1]),
        criticals=(sides[0].critical, sides[1].critical),
    )


class _Side:
    """One walk, and where each task stands in it."""

    def __init__(self, walk: Walk, critical: Critical) -> None:
        self.walk = walk
        self.critical = critical
        self.record_of: Numbers = np.empty(len(walk.task), dtype=np.int64)
        self.record_of[walk.task] = np.arange(len(walk.task))

    def lengths_along(self, links: tuple[Link, ...], of: Walk) -> tuple[float, float, float, float]:
        """Duration, wait, order and contention in this walk along a chain of `of`; they add up to this walk's time."""

        def here(record: int) -> int:
            return int(self.record_of[of.task[record]]) if record >= 0 else -1

        duration = wait = order = contention = 0.0
        for link in links:
            moved = Link(
                here(link.record), link.at, link.via, here(link.held), here(link.source), link.since, link.counter
            )
            lengths = self.critical.lengths(moved)
            duration += lengths.run
            wait += lengths.wait
            order += lengths.order
            contention += lengths.copies
        last = here(links[0].record)
        return duration, wait, order + self.walk.total_ns - self.critical.moment(last, links[0].at), contention


def _parts(sides: list[_Side], of: _Side) -> list[float]:
    """Measured less simulated parts along the chain of one side."""
    links = of.critical.chain()
    measured, simulated = (side.lengths_along(links, of.walk) for side in sides)
    return [one - other for one, other in zip(measured, simulated, strict=True)]


def _kinds(run: StepRun, measured: Walk, simulated: Walk) -> Iterable[KindGap]:
    ops = run.step.graph.ops
    names = list(dict.fromkeys(op.name for op in ops))
    name_of_op = np.array([names.index(op.name) for op in ops])
    tasks = np.bincount(name_of_op[measured.op], minlength=len(names))

    def means(walk: Walk, values: Times) -> list[float]:
        return (np.bincount(name_of_op[walk.op], values, len(names)) / tasks).tolist()

    columns: list[list[float]] = []
    for start, end in (("run_start", "end"), ("load_start", "landed"), ("turned", "run_start")):
        columns += [means(walk, getattr(walk, end) - getattr(walk, start)) for walk in (measured, simulated)]
    sms = [np.empty(len(measured.task), dtype=np.int64) for _ in range(2)]
    for sm, walk in zip(sms, (measured, simulated), strict=True):
        sm[walk.task] = walk.sm
    moved = np.bincount(name_of_op[measured.op], (sms[0] != sms[1])[measured.task], len(names))
    for idx, name in enumerate(names):
        ran, ran_simulated, copies, copies_simulated, wait, wait_simulated = (column[idx] for column in columns)
        yield KindGap(
            name=name,
            tasks=int(tasks[idx]),
            measured_run_ns=ran,
            simulated_run_ns=ran_simulated,
            measured_copies_ns=copies,
            simulated_copies_ns=copies_simulated,
            measured_wait_ns=wait,
            simulated_wait_ns=wait_simulated,
            moved=int(moved[idx]),
        )


def both_in_perfetto(found: Comparison) -> str:
    """One Perfetto file with a process per SM and timeline, the two of an SM side by side."""
    events: list[dict[str, object]] = []
    others: dict[str, object] = {}
    for side, (name, timeline) in enumerate((("measured", found.measured), ("simulated", found.simulated))):
        trace = json.loads(timeline.to_perfetto())
        others[name] = trace["otherData"]
        for event in cast("list[dict[str, object]]", trace["traceEvents"]):
            sm = cast("int", event["pid"])
            event["pid"] = process = 2 * sm + side
            if event["name"] == "process_name":
                event["args"] = {"name": f"SM {sm} {name}"}
                order = {"sort_index": process}
                events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": order})
            events.append(event)
    return json.dumps({"displayTimeUnit": "ns", "otherData": others, "traceEvents": events})
