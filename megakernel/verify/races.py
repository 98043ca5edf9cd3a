"""Are all clashing accesses ordered as in the reference order: read after write, write after read, write after write.

Walks two or three steps in reference order and compares each operator with those that touched its buffers since they
were last overwritten; older ones are ordered through these. Where all tasks of one operator clash with all of another,
one comparison per SM settles all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.graph import Op, TaskGraph, When
from megakernel.regions import covers, overlap
from megakernel.table import TaskTable
from megakernel.verify.finding import Finding, TaskNames
from megakernel.verify.knowledge import Knowledge

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class _Accesses:
    """Accesses of one operator to one buffer; `tasks[i]` is the task (index in the operator) of access i.

    `covers`: the writes leave nothing of the buffer as it was.
    """

    tasks: Ints
    boxes: Ints
    early: Bools
    load: Bools
    write: Bools
    partitioned: Bools
    writes: bool
    covers: bool


@dataclass(frozen=True)
class _Clash:
    """Pairs of tasks that clash: past ones (over early or at their end) and present ones (from load or run on).

    With `complete`, every task of `past` clashes with every task of `now`.
    """

    past: Ints
    now: Ints
    early: bool
    load: bool
    complete: bool


@dataclass(frozen=True)
class _Use:
    """An operator's accesses to a buffer, in one step."""

    step: int
    op: int
    accesses: _Accesses


def find_races(graph: TaskGraph, table: TaskTable, knowledge: Knowledge) -> Iterator[Finding]:
    """Unordered pairs of clashing accesses."""
    return _Races(graph, table, knowledge).search()


class _Races:
    def __init__(self, graph: TaskGraph, table: TaskTable, knowledge: Knowledge) -> None:
        self.graph, self.table, self.knowledge = graph, table, knowledge
        self.first = graph.first_task
        self.row_of = np.empty(len(table.records), dtype=np.int64)
        self.row_of[table.records["task"]] = np.arange(len(table.records))
        self.cached: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _Accesses] = {}
        self.clashes: dict[tuple[int, int, bool], list[_Clash]] = {}
        self.known: dict[tuple[int, int, bool, bytes], Ints] = {}
        self.needed: dict[tuple[int, int, bool, bytes], Ints] = {}

    def search(self) -> Iterator[Finding]:
        accesses = [self._accesses(op) for op in self.graph.ops]
        history: dict[int, list[_Use]] = {}
        for step in range(self.knowledge.steps):
            for op_idx, touched in enumerate(accesses):
                for buffer, mine in touched:
                    now = _Use(step, op_idx, mine)
                    past = history.setdefault(buffer, [])
                    for use in (*past, now):
                        if use.accesses.writes or mine.writes:
                            yield from self._pair(buffer, use, now)
                    if mine.covers:
                        past.clear()
                    past.append(now)

    def _accesses(self, op: Op) -> list[tuple[int, _Accesses]]:
        """Buffers that an operator touches and a step may write, with its accesses to them."""
        return [
            (buffer, self._of(op, buffer))
            for buffer in sorted(set(op.buffers))
            if buffer >= 0 and not self.graph.buffers[buffer].read_only
        ]

    def _of(self, op: Op, buffer: int) -> _Accesses:
        slots = tuple(slot for slot, bound in enumerate(op.buffers) if bound == buffer)
        shape = self.graph.buffers[buffer].shape
        key = (id(op.tasks), slots, shape)
        if key not in self.cached:
            found = [(idx, a) for idx, task in enumerate(op.tasks) for a in task.accesses if a.slot in slots]
            boxes = np.array([a.box for _, a in found])
            write = np.array([a.write for _, a in found])
            self.cached[key] = _Accesses(
                tasks=np.array([idx for idx, _ in found]),
                boxes=boxes,
                early=np.array([a.when is When.EARLY for _, a in found]),
                load=np.array([a.when is When.LOAD for _, a in found]),
                write=write,
                partitioned=np.array([a.partitioned for _, a in found]),
                writes=bool(write.any()),
                covers=covers(boxes[write], shape),
            )
        return self.cached[key]

    def _clash(self, past: _Accesses, now: _Accesses, *, same_op: bool) -> list[_Clash]:
        key = (id(past), id(now), same_op)
        if key not in self.clashes:
            self.clashes[key] = list(_clashes(past, now, same_op=same_op))
        return self.clashes[key]

    def _pair(self, buffer: int, past: _Use, now: _Use) -> Iterator[Finding]:
        know = self.knowledge
        for clash in self._clash(past.accesses, now.accesses, same_op=past is now):
            if clash.complete and (self._known(now, clash) >= self._needed(past, clash)).all():
                continue
            before = self.row_of[self.first[past.op] + clash.past]
            after = self.row_of[self.first[now.op] + clash.now]
            sms, points = self._points(past, before, early=clash.early)
            known = (know.load if clash.load else know.run)[now.step]
            if clash.complete:
                bad_after, bad_before = np.nonzero(known[np.ix_(after, sms)] < points[None, :])
            else:
                bad_before = bad_after = np.nonzero(known[after, sms] < points)[0]
            for one, other in zip(bad_before[:3], bad_after[:3], strict=True):
                pair = (past.step, int(before[one])), (now.step, int(after[other]))
                yield self._finding(buffer, *pair, load=clash.load)

    def _known(self, now: _Use, clash: _Clash) -> Ints:
        """Per SM, what all present tasks of a clash know of it. Many past operators ask."""
        key = (now.step, now.op, clash.load, clash.now.tobytes())
        if key not in self.known:
            after = self.row_of[self.first[now.op] + clash.now]
            know = self.knowledge
            self.known[key] = (know.load if clash.load else know.run)[now.step][after].min(axis=0)
        return self.known[key]

    def _needed(self, past: _Use, clash: _Clash) -> Ints:
        """Per SM, the point at which all past tasks of a clash are over."""
        key = (past.step, past.op, clash.early, clash.past.tobytes())
        if key not in self.needed:
            needed = self.needed[key] = np.zeros(self.table.num_sms, dtype=np.int64)
            before = self.row_of[self.first[past.op] + clash.past]
            np.maximum.at(needed, *self._points(past, before, early=clash.early))
        return self.needed[key]

    def _points(self, past: _Use, before: Ints, *, early: bool) -> tuple[Ints, Ints]:
        """SMs of past records, and the points at which they are over."""
        know = self.knowledge
        sms = know.sm_of[before]
        return sms, past.step * know.points[sms] + 2 * know.index_of[before] + (1 if early else 2)

    def _finding(self, buffer: int, past: tuple[int, int], now: tuple[int, int], *, load: bool) -> Finding:
        names, know = TaskNames(self.graph), self.knowledge
        tasks = self.table.records["task"]
        before, after = (f"{names[int(tasks[row])]} of step {step}" for step, row in (past, now))
        known = (know.load if load else know.run)[now]
        ahead = ", ".join(f"SM {sm}: {int(points) // 2}" for sm, points in enumerate(known[:8]))
        verb = "load" if load else "run"
        sm, other = int(know.sm_of[past[1]]), int(know.sm_of[now[1]])
        return Finding(
            "race",
            f"{after} may {verb} while {before} has not finished with {self.graph.buffers[buffer].name}",
            (
                f"hold SM {sm} back in {before}, record {know.index_of[past[1]]} of its list",
                f"run only what {after} must follow (records of {ahead}{', ...' if len(known) > 8 else ''})",
                f"SM {other} then starts to {verb} {after}: nothing it has waited for needs {before}",
            ),
        )


def _clashes(past: _Accesses, now: _Accesses, *, same_op: bool) -> Iterator[_Clash]:
    """Clashing pairs by phase. Tasks of one operator and step go by number, and don't meet in what they partition."""
    for early in (True, False):
        for load in (True, False):
            theirs, mine = np.nonzero(past.early == early)[0], np.nonzero(now.load == load)[0]
            if not (len(theirs) and len(mine)):
                continue
            writes, written = past.write[theirs], now.write[mine]
            if not (writes.any() or written.any()):
                continue
            meets = overlap(past.boxes[theirs], now.boxes[mine])
            if not (writes.all() or written.all()):
                meets &= writes[:, None] | written[None, :]
            if same_op:
                meets &= past.tasks[theirs][:, None] < now.tasks[mine][None, :]
                meets &= ~(past.partitioned[theirs][:, None] & now.partitioned[mine][None, :])
            lefts, pairs = _by_task(past.tasks[theirs], meets)
            rights, pairs = _by_task(now.tasks[mine], pairs.T)
            pairs = pairs.T
            before, after = pairs.any(axis=1), pairs.any(axis=0)
            if not before.any():
                continue
            if np.count_nonzero(pairs) == np.count_nonzero(before) * np.count_nonzero(after):
                yield _Clash(lefts[before], rights[after], early, load, complete=True)
            else:
                before, after = np.nonzero(pairs)
                yield _Clash(lefts[before], rights[after], early, load, complete=False)


def _by_task(tasks: Ints, meets: Bools) -> tuple[Ints, Bools]:
    """Tasks, and rows of [accesses, n] joined by the task whose access a row is; accesses come in order of tasks."""
    distinct, starts = np.unique(tasks, return_index=True)
    return distinct, meets if len(distinct) == len(meets) else np.logical_or.reduceat(meets, starts, axis=0)
