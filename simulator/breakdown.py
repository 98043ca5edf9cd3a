"""What a simulated step spent its time on: task kinds, hand-offs whose cost nothing hid, and why the memory idled.

Owns the definition of *exposed* time. A hand-off lasts, on one SM, from the moment its consumers turn to a record
until they use its first copy: the wait, and the serial work behind it. It is exposed while the SM's stream of copies
stands still meanwhile, because the ring is full (estimated: the stream fills it at the SM's share of the memory) or
because the producer stands at a load wait. A load wait is exposed too from the last landing before it to its end,
outside the former. So what a deep ring hides counts as waited, not as exposed. All times are means over the SMs, in
nanoseconds, but for those on the critical path, which is one chain. The memory's idle time is more than the hand-offs':
`Idle` says what of it no hand-off owns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np

from megakernel.counters import NONE
from simulator.critical import Critical, Link, Via
from simulator.exposure import Exposure
from simulator.step_run import StepRun
from simulator.walk import walk_of_run


@dataclass(frozen=True)
class KindTime:
    """All tasks of one operator over all layers: how long SMs ran them, data waits included, and waited before them.

    `critical_ns` is what runs of these tasks take on the critical path, once their copies are there; `slack_ns` is the
    sum of all tasks' slack.
    """

    name: str
    tasks: float
    load_bytes: float
    run_ns: float
    wait_ns: float
    critical_ns: float
    slack_ns: float


@dataclass(frozen=True)
class HandOff:
    """`waiter`'s runs (or loads) waiting for `source` over all layers; `exposed_ns` is the part that nothing hid.

    `critical_ns` is what the critical path spends in it, `on_path` how often it is on the path.
    """

    source: str
    waiter: str
    phase: str
    waited_ns: float
    exposed_ns: float
    critical_ns: float
    on_path: float


@dataclass(frozen=True)
class Idle:
    """Where the memory's idle time goes, as a mean over the SMs; the parts add up to it.

    `start_ns` is a first copy's latency, `hand_offs_ns` what hand-offs expose, `imbalance_ns` from an SM's last landing
    to the last of all, `end_ns` from there to the end of the step. `service_ns` is the rest: latencies in between, and
    copies served unevenly; it is negative where a stream catches up faster than its share.
    """

    start_ns: float
    hand_offs_ns: float
    imbalance_ns: float
    end_ns: float
    service_ns: float


@dataclass(frozen=True)
class CriticalPath:
    """The chain of tasks that the step's time is made of; the parts add up to the step.

    `run_ns` with all copies there, `copies_ns` waiting for copies, `hand_off_ns` from another task's arrival to the
    next run or copy, `turn_ns` from an SM's own last record to the next. `tasks` and `hand_offs` are counts.
    """

    run_ns: float
    copies_ns: float
    hand_off_ns: float
    turn_ns: float
    tasks: float
    hand_offs: float


@dataclass(frozen=True)
class Breakdown:
    """One simulated step."""

    total_ns: float
    memory_busy_ns: float
    kinds: tuple[KindTime, ...]
    hand_offs: tuple[HandOff, ...]
    idle: Idle
    critical: CriticalPath

    @property
    def memory_idle_ns(self) -> float:
        """Time that the memory's streaming rate leaves over."""
        return self.total_ns - self.memory_busy_ns


def blend(parts: Sequence[tuple[float, Breakdown]]) -> Breakdown:
    """Weighted sum: the mean of draws, or the line through two runs."""
    kinds: dict[str, list[float]] = {}
    hand_offs: dict[tuple[str, str, str], list[float]] = {}
    idle, critical = [0.0] * len(fields(Idle)), [0.0] * len(fields(CriticalPath))
    for weight, each in parts:
        for kind in each.kinds:
            name, *values = astuple(kind)
            _add(kinds.setdefault(name, [0.0] * len(values)), weight, values)
        for off in each.hand_offs:
            source, waiter, phase, *values = astuple(off)
            _add(hand_offs.setdefault((source, waiter, phase), [0.0] * len(values)), weight, values)
        _add(idle, weight, astuple(each.idle))
        _add(critical, weight, astuple(each.critical))
    return Breakdown(
        total_ns=sum(weight * each.total_ns for weight, each in parts),
        memory_busy_ns=sum(weight * each.memory_busy_ns for weight, each in parts),
        kinds=tuple(KindTime(name, *sums) for name, sums in kinds.items()),
        hand_offs=_ranked(HandOff(*names, *sums) for names, sums in hand_offs.items()),
        idle=Idle(*idle),
        critical=CriticalPath(*critical),
    )


def _add(sums: list[float], weight: float, values: Sequence[float]) -> None:
    for idx, value in enumerate(values):
        sums[idx] += weight * value


def _ranked(hand_offs: Iterable[HandOff]) -> tuple[HandOff, ...]:
    return tuple(sorted(hand_offs, key=lambda off: (-off.exposed_ns, off.source, off.waiter, off.phase)))


LONGEST_NS = 1e15
"""Eleven days a step: beyond it, sums of its times are no longer exact to a nanosecond."""


def break_down(run: StepRun) -> Breakdown:
    """Attribute the times of a simulated step; OverflowError when the chip's constants make them absurd."""
    if not run.result.total_ns < LONGEST_NS:
        raise OverflowError(f"the step takes {run.result.total_ns:g} ns")
    return _Attribution(run).breakdown()


class _Attribution:
    """Names of operators beside the times of their records."""

    def __init__(self, run: StepRun) -> None:
        self.run = run
        self.walk = walk_of_run(run)
        self.exposure = Exposure(self.walk, run.step.choices.ring, run.chip)
        self.critical = Critical(self.walk, self.exposure)
        self.chain = self.critical.chain()
        ops, records = run.step.graph.ops, run.step.table.records
        self.names = list(dict.fromkeys(op.name for op in ops))
        self.name_of = np.array([self.names.index(op.name) for op in ops])[run.lowered.op_of]
        self.titles = [""] * run.step.table.num_counters
        for early in (True, False):
            counters = records["early" if early else "arrive"]
            for counter, first in zip(*np.unique(counters, return_index=True), strict=True):
                if counter != NONE:
                    self.titles[counter] = self.names[self.name_of[first]] + (".early" if early else "")

    def breakdown(self) -> Breakdown:
        result = self.run.result
        return Breakdown(
            total_ns=result.total_ns,
            memory_busy_ns=result.memory_busy_ns,
            kinds=self._kinds(),
            hand_offs=_ranked(self._hand_offs()),
            idle=self._idle(),
            critical=self._critical_path(),
        )

    def _kinds(self) -> tuple[KindTime, ...]:
        walk, run = self.walk, self.run
        num_sms = run.step.table.num_sms
        on_path = np.zeros(len(walk.end))
        for link in self.chain:
            on_path[link.record] += self.critical.lengths(link).run
        columns = (
            np.ones(len(walk.end)),
            run.lowered.cost.load_bytes[walk.task],
            (walk.end - walk.run_start) / num_sms,
            (walk.run_start - walk.turned) / num_sms,
            on_path,
            self.critical.slack(),
        )
        sums = [np.bincount(self.name_of, column, len(self.names)).tolist() for column in columns]
        return tuple(KindTime(name, *values) for name, *values in zip(self.names, *sums, strict=True))

    def _hand_offs(self) -> Iterable[HandOff]:
        """Hand-offs by the operator that arrived last of those waited for."""
        sums: dict[tuple[str, str, str], list[float]] = {}
        walk, exposure, num_sms = self.walk, self.exposure, self.run.step.table.num_sms
        load, run = self.critical.load_gate, self.critical.run_gate
        cause = np.where(load.done > run.done, load.counter, run.counter)
        sources = sorted(set(self.titles))
        source_of = np.array([sources.index(title) for title in self.titles] + [-1])
        for phase, counter, waited, exposed in (
            ("run", cause, walk.used - walk.turned, exposure.exposed_runs),
            ("load", load.counter, exposure.load_gap, exposure.exposed_loads),
        ):
            known = counter >= 0
            pair = source_of[counter[known]] * len(self.names) + self.name_of[known]
            totals = [np.bincount(pair, values[known], len(sources) * len(self.names)) for values in (waited, exposed)]
            for key in np.flatnonzero(totals[0] > 0.0).tolist():
                source, waiter = divmod(key, len(self.names))
                values = [float(total[key]) / num_sms for total in totals]
                sums[sources[source], self.names[waiter], phase] = [*values, 0.0, 0.0]
        for link in self.chain:
            if link.counter >= 0:
                found = sums.setdefault(self._key(link), [0.0] * 4)
                found[2] += self.critical.lengths(link).wait
                found[3] += 1.0
        return (HandOff(*names, *values) for names, values in sums.items())

    def _key(self, link: Link) -> tuple[str, str, str]:
        phase = "load" if link.via is Via.LOAD_WAIT else "run"
        return self.titles[link.counter], self.names[int(self.name_of[link.held])], phase

    def _idle(self) -> Idle:
        walk, chip, result = self.walk, self.run.chip, self.run.result
        num_sms, copy_bytes = self.run.step.table.num_sms, self.run.step.choices.ring.copy_bytes
        has_copies = walk.copies > 0
        last = np.zeros(num_sms)  # landing of each SM
        np.maximum.at(last, walk.sm[has_copies], walk.landed[has_copies])
        streams = walk.load_start <= last[walk.sm]
        exposed = float((self.exposure.exposed_runs + self.exposure.exposed_loads)[streams].sum()) / num_sms
        costs, end = chip.costs, float(last.max(initial=0.0))
        latency = costs.copy_latency_ns + costs.queue_ramp_ns + copy_bytes / chip.sm_bytes_per_ns
        start = min(latency, end)
        imbalance, tail = float((end - last).mean()), result.total_ns - end
        idle = result.total_ns - result.memory_busy_ns
        return Idle(start, exposed, imbalance, tail, idle - start - exposed - imbalance - tail)

    def _critical_path(self) -> CriticalPath:
        run = copies = hand_off = turn = 0.0
        for link in self.chain:
            lengths = self.critical.lengths(link)
            run += lengths.run
            copies += lengths.copies
            hand_off += lengths.wait if link.counter >= 0 else 0.0
            turn += lengths.wait if link.counter < 0 else 0.0
        hand_offs = sum(link.counter >= 0 for link in self.chain)
        return CriticalPath(run, copies, hand_off, turn, len(self.chain), hand_offs)
