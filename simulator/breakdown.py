"""What a simulated step spent its time on: task kinds, and hand-offs whose cost nothing hid.

Owns the definition of *exposed* time. A hand-off lasts, on one SM, from the moment its consumers turn to a record
until they use its first copy: the wait, and the serial work behind it. It is exposed while the SM's stream of copies
stands still meanwhile, because the ring is full (estimated: the stream fills it at the SM's share of the memory) or
because the producer stands at a load wait. A load wait is exposed too from the last landing before it to its end,
outside the former. So what a deep ring hides counts as waited, not as exposed. All times are means over the SMs, in
nanoseconds. Their sum is near the memory's idle time, not equal to it: start, tail, latency and imbalance are in no
hand-off, and a stream that was held up runs faster than its share afterwards, which makes good a part of what is
called exposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.counters import NONE
from simulator.exposure import Exposure
from simulator.step_run import StepRun

Times = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class KindTime:
    """All tasks of one operator over all layers: how long SMs ran them, data waits included, and waited before them."""

    name: str
    tasks: float
    load_bytes: float
    run_ns: float
    wait_ns: float


@dataclass(frozen=True)
class HandOff:
    """`waiter`'s runs (or loads) waiting for `source` over all layers; `exposed_ns` is the part that nothing hid."""

    source: str
    waiter: str
    phase: str
    waited_ns: float
    exposed_ns: float


@dataclass(frozen=True)
class Breakdown:
    """One simulated step."""

    total_ns: float
    memory_busy_ns: float
    kinds: tuple[KindTime, ...]
    hand_offs: tuple[HandOff, ...]

    @property
    def memory_idle_ns(self) -> float:
        """Time that the memory's streaming rate leaves over."""
        return self.total_ns - self.memory_busy_ns


def blend(parts: Sequence[tuple[float, Breakdown]]) -> Breakdown:
    """Weighted sum: the mean of draws, or the line through two runs."""
    kinds: dict[str, list[float]] = {}
    hand_offs: dict[tuple[str, str, str], list[float]] = {}
    for weight, each in parts:
        for kind in each.kinds:
            sums = kinds.setdefault(kind.name, [0.0] * 4)
            _add(sums, weight, (kind.tasks, kind.load_bytes, kind.run_ns, kind.wait_ns))
        for off in each.hand_offs:
            sums = hand_offs.setdefault((off.source, off.waiter, off.phase), [0.0] * 2)
            _add(sums, weight, (off.waited_ns, off.exposed_ns))
    return Breakdown(
        total_ns=sum(weight * each.total_ns for weight, each in parts),
        memory_busy_ns=sum(weight * each.memory_busy_ns for weight, each in parts),
        kinds=tuple(KindTime(name, *sums) for name, sums in kinds.items()),
        hand_offs=_ranked(HandOff(*names, *sums) for names, sums in hand_offs.items()),
    )


def _add(sums: list[float], weight: float, values: tuple[float, ...]) -> None:
    for idx, value in enumerate(values):
        sums[idx] += weight * value


def _ranked(hand_offs: Iterable[HandOff]) -> tuple[HandOff, ...]:
    return tuple(sorted(hand_offs, key=lambda off: (-off.exposed_ns, off.source, off.waiter, off.phase)))


def break_down(run: StepRun) -> Breakdown:
    """Attribute the times of a simulated step."""
    step, lowered = run.step, run.lowered
    exposure = Exposure(run)
    names = list(dict.fromkeys(op.name for op in step.graph.ops))
    name_of = np.array([names.index(op.name) for op in step.graph.ops])[lowered.op_of]
    loads = lowered.cost.load_bytes[lowered.task_of]
    num_sms = step.table.num_sms

    def by_name(values: Times | Numbers) -> list[float]:
        return np.bincount(name_of, values, len(names)).tolist()

    columns = (
        by_name(np.ones(len(name_of))),
        by_name(loads),
        by_name((exposure.end - exposure.run_start) / num_sms),
        by_name((exposure.run_start - exposure.turned) / num_sms),
    )
    return Breakdown(
        total_ns=run.result.total_ns,
        memory_busy_ns=run.result.memory_busy_ns,
        kinds=tuple(KindTime(name, *values) for name, *values in zip(names, *columns, strict=True)),
        hand_offs=_ranked(_hand_offs(run, exposure, names, name_of)),
    )


def _hand_offs(run: StepRun, exposure: Exposure, names: list[str], name_of: Numbers) -> Iterable[HandOff]:
    """Hand-offs by the operator that arrived last of those waited for."""
    step = run.step
    records, num_sms = step.table.records, step.table.num_sms
    titles = [""] * step.table.num_counters
    for early in (True, False):
        counters = records["early" if early else "arrive"]
        for counter, op_idx in zip(*np.unique(counters, return_index=True), strict=True):
            if counter != NONE:
                titles[counter] = step.graph.ops[run.lowered.op_of[op_idx]].name + (".early" if early else "")
    sources = sorted(set(titles))
    source_of = np.array([sources.index(title) for title in titles] + [-1])
    loads_cause, runs_cause = exposure.causes()
    for phase, cause, waited, exposed in (
        ("run", runs_cause, exposure.used - exposure.turned, exposure.exposed_runs),
        ("load", loads_cause, exposure.load_gap, exposure.exposed_loads),
    ):
        known = cause >= 0
        pair = source_of[cause[known]] * len(names) + name_of[known]
        sums = [np.bincount(pair, values[known], len(sources) * len(names)) / num_sms for values in (waited, exposed)]
        for key in range(len(sources) * len(names)):
            source, waiter = divmod(key, len(names))
            if sums[0][key] > 0.0:
                yield HandOff(sources[source], names[waiter], phase, float(sums[0][key]), float(sums[1][key]))
