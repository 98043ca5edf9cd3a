"""Are all clashing accesses ordered as in the reference order: read after write, write after read, write after write.

Walks the unrolled steps in reference order and compares each operator with those that touched its buffers since they
were last overwritten; older ones are ordered through these. Where all tasks of one operator clash with all of another,
one comparison per SM settles all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.graph import Op, TaskGraph, When
from megakernel.hazards import overlap
from megakernel.table import TaskTable
from megakernel.verify.finding import Finding, TaskNames
from megakernel.verify.order import Knowledge

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Accesses:
    """Accesses of one operator to one buffer; `tasks[i]` is the task (index in the operator) of access i."""

    tasks: Ints
    boxes: Ints
    early: npt.NDArray[np.bool_]
    load: npt.NDArray[np.bool_]
    write: npt.NDArray[np.bool_]
    partitioned: npt.NDArray[np.bool_]

    @property
    def writes(self) -> bool:
        return bool(self.write.any())


@dataclass(frozen=True)
class _Clash:
    """Pairs of accesses that clash: of past tasks (over early or at their end) and present ones (load or run).

    With `complete`, every task of `past` clashes with every task of `now`.
    """

    past: Ints
    now: Ints
    early: bool
    load: bool
    complete: bool


def find_races(graph: TaskGraph, table: TaskTable, knowledge: Knowledge, most: int) -> list[Finding]:
    """At most `most` unordered pairs of clashing accesses."""
    findings: list[Finding] = []
    for finding in _Races(graph, table, knowledge).search():
        findings.append(finding)
        if len(findings) == most:
            break
    return findings


class _Races:
    def __init__(self, graph: TaskGraph, table: TaskTable, knowledge: Knowledge) -> None:
        self.graph, self.table, self.knowledge = graph, table, knowledge
        self.first = np.array([*graph.first_task, graph.num_tasks])
        self.accesses: dict[tuple[int, tuple[int, ...]], _Accesses] = {}
        self.clashes: dict[tuple[int, int, bool], list[_Clash]] = {}

    def search(self) -> Iterator[Finding]:
        history: dict[int, list[tuple[int, int]]] = {}
        for step in range(len(self.knowledge.run)):
            for op_idx, op in enumerate(self.graph.ops):
                for buffer in sorted(set(op.buffers)):
                    if buffer < 0 or self.graph.buffers[buffer].read_only:
                        continue
                    past = history.setdefault(buffer, [])
                    for past_step, past_idx in [*past, (step, op_idx)]:
                        yield from self._pair(buffer, (past_step, past_idx), (step, op_idx))
                    if self._covers(op, buffer):
                        past.clear()
                    past.append((step, op_idx))

    def _of(self, op: Op, buffer: int) -> _Accesses:
        slots = tuple(slot for slot, bound in enumerate(op.buffers) if bound == buffer)
        key = (id(op.tasks), slots)
        if key not in self.accesses:
            found = [(idx, a) for idx, task in enumerate(op.tasks) for a in task.accesses if a.slot in slots]
            self.accesses[key] = _Accesses(
                np.array([idx for idx, _ in found]),
                np.array([a.box for _, a in found]),
                np.array([a.when is When.EARLY for _, a in found]),
                np.array([a.when is When.LOAD for _, a in found]),
                np.array([a.write for _, a in found]),
                np.array([a.partitioned for _, a in found]),
            )
        return self.accesses[key]

    def _covers(self, op: Op, buffer: int) -> bool:
        accesses = self._of(op, buffer)
        if not accesses.writes:
            return False
        boxes = accesses.boxes[accesses.write]
        volume = np.prod(boxes[:, :, 1] - boxes[:, :, 0], axis=1)
        total = int(np.prod(np.array(self.graph.buffers[buffer].shape, dtype=np.int64)))
        return int(volume.max()) == total or int(volume.sum()) == total

    def _clash(self, past: _Accesses, now: _Accesses, *, same_op: bool) -> list[_Clash]:
        key = (id(past), id(now), same_op)
        if key not in self.clashes:
            self.clashes[key] = list(_clashes(past, now, same_op=same_op))
        return self.clashes[key]

    def _pair(self, buffer: int, past: tuple[int, int], now: tuple[int, int]) -> Iterator[Finding]:
        (past_step, past_op), (step, op) = past, now
        theirs, mine = self._of(self.graph.ops[past_op], buffer), self._of(self.graph.ops[op], buffer)
        if not (theirs.writes or mine.writes):
            return
        know = self.knowledge
        for clash in self._clash(theirs, mine, same_op=past == now):
            before = know.row_of[self.first[past_op] + clash.past]
            after = know.row_of[self.first[op] + clash.now]
            sms = know.sm_of[before]
            points = past_step * know.points[sms] + 2 * know.index_of[before] + (1 if clash.early else 2)
            known = (know.load if clash.load else know.run)[step]
            if clash.complete:
                needed = np.zeros(self.table.num_sms, dtype=np.int64)
                np.maximum.at(needed, sms, points)
                if (known[after].min(axis=0) >= needed).all():
                    continue
                bad_after, bad_before = np.nonzero(known[np.ix_(after, sms)] < points[None, :])
            else:
                bad_before = bad_after = np.nonzero(known[after, sms] < points)[0]
            for one, other in zip(bad_before[:3], bad_after[:3], strict=True):
                yield self._finding(buffer, (past_step, int(before[one])), (step, int(after[other])), clash)

    def _finding(self, buffer: int, past: tuple[int, int], now: tuple[int, int], clash: _Clash) -> Finding:
        names, know = TaskNames(self.graph), self.knowledge
        tasks = self.table.records["task"]
        before, after = names[int(tasks[past[1]])], names[int(tasks[now[1]])]
        known = (know.load if clash.load else know.run)[now[0]][now[1]]
        ahead = ", ".join(f"SM {sm}: {int(points) // 2}" for sm, points in enumerate(known[:8]))
        verb = "load" if clash.load else "run"
        sm, other = int(know.sm_of[past[1]]), int(know.sm_of[now[1]])
        return Finding(
            "race",
            f"{after} (step {now[0]}) may {verb} while {before} (step {past[0]}) has not finished with "
            f"{self.graph.buffers[buffer].name}",
            (
                f"hold SM {sm} back in {before}, record {know.index_of[past[1]]} of its list",
                f"run only what {after} must follow (records of {ahead}{', ...' if len(known) > 8 else ''})",
                f"SM {other} then starts to {verb} {after}: nothing it has waited for needs {before}",
            ),
        )


def _clashes(past: _Accesses, now: _Accesses, *, same_op: bool) -> Iterator[_Clash]:
    """Clashing pairs by phase. Inside one operator of one step, a partition does not clash with itself."""
    for early in (True, False):
        for load in (True, False):
            theirs, mine = np.nonzero(past.early == early)[0], np.nonzero(now.load == load)[0]
            if not (len(theirs) and len(mine)):
                continue
            meets = overlap(past.boxes[theirs], now.boxes[mine])
            meets &= past.write[theirs][:, None] | now.write[mine][None, :]
            if same_op:
                meets &= past.tasks[theirs][:, None] != now.tasks[mine][None, :]
                meets &= ~(past.partitioned[theirs][:, None] & now.partitioned[mine][None, :])
            first, second = np.nonzero(meets)
            if not len(first):
                continue
            before, after = past.tasks[theirs[first]], now.tasks[mine[second]]
            lefts, rights = np.unique(before), np.unique(after)
            pairs = np.unique(before * (int(rights.max()) + 1) + after)
            if len(pairs) == len(lefts) * len(rights):
                yield _Clash(lefts, rights, early, load, complete=True)
            else:
                yield _Clash(before, after, early, load, complete=False)
