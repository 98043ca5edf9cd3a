"""Why a launch stopped, in words: the first task that should have fired, and what kept it.

Owns the reading of a report, the counters and every SM's progress against the table. Pure: arrays in, text out. The
block that gave up first is only a witness - it may wait for one that waits for another; the cause is found by following
who should have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from megakernel.abi import Place, Stop
from megakernel.graph import TaskGraph
from megakernel.kinds import TaskKind
from megakernel.table import TaskTable, read_waits
from megakernel.verify.finding import TaskNames


class TaskTitles(Protocol):
    """Names of tasks by number, and of counters."""

    def task(self, number: int) -> str:
        """A task's name."""
        ...

    def counter(self, index: int) -> str:
        """A counter's name."""
        ...


class GraphTitles:
    """Titles from the graph that a table was packed from."""

    def __init__(self, graph: TaskGraph, counters: tuple[str, ...]) -> None:
        """Keep both."""
        self._tasks, self._counters = TaskNames(graph), counters

    def task(self, number: int) -> str:
        """`L3.up[17]`."""
        return self._tasks[number]

    def counter(self, index: int) -> str:
        """`counter 12 (L3.up)`."""
        title = f" ({self._counters[index]})" if index < len(self._counters) else ""
        return f"counter {index}{title}"


@dataclass(frozen=True)
class Evidence:
    """What a stopped launch left: its report, all counters, every SM's progress, and its first step."""

    report: np.void
    counters: np.ndarray
    progress: np.ndarray
    first_step: int


@dataclass(frozen=True)
class _Head:
    """Where an SM stands: the first record that did not run."""

    sm: int
    step: int
    index: int


@dataclass(frozen=True)
class _Lack:
    """A wait that is not met."""

    phase: str
    counter: int
    need: int
    total: int
    wanted: int
    seen: int


def explain(table: TaskTable, titles: TaskTitles, evidence: Evidence) -> str:
    """Message of a stop."""
    return _Autopsy(table, titles, evidence).explain()


class _Autopsy:
    def __init__(self, table: TaskTable, titles: TaskTitles, evidence: Evidence) -> None:
        self.table, self.titles, self.evidence = table, titles, evidence
        self.steps = self._begun()
        self.heads = {
            sm: head for sm in range(table.num_sms) if (head := self._head(sm)) is not None
        }  # SMs that are not done

    def explain(self) -> str:
        report = self.evidence.report
        witness = self._witness()
        if report["stop"] == Stop.UNBUILT:
            kind = int(report["wanted"])
            known = {int(each) for each in TaskKind}
            name = TaskKind(kind).name.lower() if kind in known else "unknown"
            task = self.titles.task(int(report["task"]))
            place = f"SM {int(report['sm'])}, step {int(report['step'])}, record {int(report['record'])}"
            return (
                f"the first task that should have fired is {task} ({place}): its kind {kind} ({name}) was not built "
                f"into this kernel; {witness}"
            )
        blocked = [(head.step, self._task(head), head) for head in self.heads.values()]
        roots = [(step, task, head) for step, task, head in blocked if self._is_root(head)]
        if not roots:
            return f"no task is without a reason to wait; {witness}"
        _, task, head = min(roots, key=lambda root: root[:2])
        place = f"SM {head.sm}, step {head.step}, record {head.index}"
        lack = self._lack(head)
        first = f"the first task that should have fired is {self.titles.task(task)} ({place})"
        if lack is None:
            return f"{first}: all its waits are met, its copies or its run did not end; {witness}"
        return f"{first}: {self._reason(lack)}; {witness}"

    def _witness(self) -> str:
        report = self.evidence.report
        place = Place(int(report["place"])).name.lower().replace("_", " ")
        where = f"at its {place} in step {int(report['step'])}, record {int(report['record'])}"
        if self._reported() < 0:
            where = "before its first record"
        waited_us = int(report["waited_cycles"]) / 1980
        return (
            f"SM {int(report['sm'])} gave up first, {where}, after about {waited_us:.0f} us; {int(report['present'])} "
            f"of {self.table.num_sms} blocks were present, {len(self.heads)} had not ended"
        )

    def _head(self, sm: int) -> _Head | None:
        records = int(self.table.offsets[sm + 1] - self.table.offsets[sm])
        if records == 0:
            return None
        done = int(self.evidence.progress["arrived"][sm])
        step, index = divmod(done, records)
        return _Head(sm, self.evidence.first_step + step, index) if step < self.steps else None

    def _begun(self) -> int:
        """Steps of the launch that some SM has begun, or the report names; no later one is known to be asked for."""
        records = np.maximum(np.diff(self.table.offsets.astype(np.int64)), 1)
        begun = int((-(-self.evidence.progress["arrived"].astype(np.int64) // records)).max())
        return max(begun, self._reported() + 1)

    def _reported(self) -> int:
        """The report's step, counted from the launch's first; below 0 where its block had nothing to do as yet."""
        behind = (int(self.evidence.report["step"]) - self.evidence.first_step) % 2**32
        return behind - 2**32 * (behind >= 2**31)

    def _record(self, head: _Head) -> np.void:
        return self.table.records[int(self.table.offsets[head.sm]) + head.index]

    def _task(self, head: _Head) -> int:
        return int(self._record(head)["task"])

    def _lack(self, head: _Head) -> _Lack | None:
        """First wait of a head that the counters do not meet."""
        record = self._record(head)
        for phase in ("load", "run"):
            for wait in read_waits(record, phase):
                total = int(self.table.totals[wait.counter])
                wanted = ((head.step - wait.lag) * total + wait.need) % 2**32
                seen = int(self.evidence.counters[wait.counter])
                if (seen - wanted + 2**31) % 2**32 < 2**31:
                    return _Lack(phase, wait.counter, wait.need, total, wanted, seen)
        return None

    def _is_root(self, head: _Head) -> bool:
        """Whether nobody else who has still to run would arrive where this head waits."""
        lack = self._lack(head)
        return lack is None or not self._late(lack.counter)

    def _late(self, counter: int) -> list[_Head]:
        """Heads of SMs that still have a record of their present step that arrives at `counter`."""
        records = self.table.records
        late: list[_Head] = []
        for head in self.heads.values():
            begin, end = int(self.table.offsets[head.sm]) + head.index, int(self.table.offsets[head.sm + 1])
            rest = records[begin:end]
            if ((rest["arrive"] == counter) | (rest["early"] == counter)).any():
                late.append(head)
        return late

    def _reason(self, lack: _Lack) -> str:
        arriving = int(
            ((self.table.records["arrive"] == lack.counter) | (self.table.records["early"] == lack.counter)).sum()
        )
        counter = self.titles.counter(lack.counter)
        text = f"it waits to {lack.phase} for {counter} = {lack.wanted}, which stands at {lack.seen}"
        if lack.need > lack.total:
            return f"{text}: it asks for {lack.need} arrivals a step and {lack.total} are made, a wrong target"
        if arriving < lack.total:
            return f"{text}: only {arriving} records arrive there instead of {lack.total}, an arrival is missing"
        return f"{text}: all {arriving} tasks that arrive there have run, so an arrival was lost"
