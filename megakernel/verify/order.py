"""What must have happened before each load and each run: exact, for counters that only grow.

An event a must precede b iff b cannot be reached while a is held back. With waits of the form 'at least k of these arrivals',
what a wait must know of an SM is the k-th smallest of what the arrivals know of it: fewer than k of them can happen while
any event beyond that is held back. Lists run in order, so what is known of an SM is a prefix of its list, and knowledge is
one integer per SM. The rule is a greatest fixed point: it starts from one greedy execution (which also finds deadlocks)
and is lowered until arrivals of later steps are taken into account; in a sound table they change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from megakernel.counters import NONE
from megakernel.graph import TaskGraph
from megakernel.table import TaskTable
from megakernel.verify.finding import Finding, TaskNames

Prefix = npt.NDArray[np.int32]
"""Per SM, how many points of its list; record i of a list has point 2i + 1 (early part over) and 2i + 2 (run over)."""

Head = tuple[int, int, bool]
"""Where an SM stands: step, index in its list, and whether it is the producer that waits."""

Target = tuple[int, int]
"""A counter and the count, over all steps, that a wait asks for."""


@dataclass(frozen=True)
class Knowledge:
    """What is known at the start of the load and of the run of every record, for each step; rows are records.

    `load[step]` and `run[step]` are [records, SMs] prefixes that count points through all steps, `points[sm]` a step.
    """

    load: list[Prefix]
    run: list[Prefix]
    points: Prefix
    row_of: npt.NDArray[np.int64]
    sm_of: npt.NDArray[np.int64]
    index_of: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Entry:
    """One record of a list, decoded."""

    row: int
    load: tuple[tuple[int, int, int], ...]
    run: tuple[tuple[int, int, int], ...]
    early: int
    arrive: int


def must_precede(graph: TaskGraph, table: TaskTable, steps: int) -> tuple[Knowledge | None, list[Finding]]:
    """Knowledge of every record in `steps` consecutive steps, or the deadlock that keeps it from running."""
    return _Execution(graph, table, steps).run()


class _Execution:
    def __init__(self, graph: TaskGraph, table: TaskTable, steps: int) -> None:
        self.graph, self.table, self.steps = graph, table, steps
        self.totals = [int(total) for total in table.totals]
        self.lists = _decode(table)
        self.num_sms = table.num_sms
        self.counts = [0] * table.num_counters
        self.order: list[tuple[int, int, int, bool]] = []
        self.arrivals: dict[int, list[Prefix]] = {counter: [] for counter in range(table.num_counters)}
        shape = (len(table.records), self.num_sms)
        self.load = [np.zeros(shape, dtype=np.int32) for _ in range(steps)]
        self.runs = [np.zeros(shape, dtype=np.int32) for _ in range(steps)]

    def run(self) -> tuple[Knowledge | None, list[Finding]]:
        stuck = self._execute()
        if stuck:
            return None, [self._deadlock(stuck)]
        targets = self._targets()
        known = {target: self._known_first(target) for target in targets}
        while True:
            self._propagate(known)
            lowered = {target: self._known(target) for target in targets}
            if all(np.array_equal(known[target], lowered[target]) for target in targets):
                break
            known = {target: np.minimum(known[target], lowered[target]) for target in targets}
        records = self.table.records
        row_of = np.empty(len(records), dtype=np.int64)
        row_of[records["task"]] = np.arange(len(records))
        lengths = np.diff(self.table.offsets.astype(np.int64))
        sm_of = np.repeat(np.arange(self.num_sms), lengths)
        index_of = np.arange(len(records)) - self.table.offsets[:-1].astype(np.int64)[sm_of]
        points = (2 * lengths).astype(np.int32)
        return Knowledge(self.load, self.runs, points, row_of, sm_of, index_of), []

    def _execute(self) -> dict[int, Head]:
        """Run everything that can run; the heads (SM -> step, index, is a load) that never can."""
        waiting: dict[int, list[tuple[int, int]]] = {}
        at = [[0, 0, 0, 0] for _ in range(self.num_sms)]  # step, index of the producer; step, index of the consumers
        ready = list(range(self.num_sms - 1, -1, -1))
        queued = set(ready)
        registered: set[tuple[int, int, int]] = set()
        blocked: dict[int, Head] = {}
        while ready:
            sm = ready.pop()
            queued.discard(sm)
            blocked.pop(sm, None)
            arrived, missing, head = self._advance(sm, at[sm])
            if head is not None:
                blocked[sm] = head
            for counter, target in missing:
                if (counter, target, sm) not in registered:
                    registered.add((counter, target, sm))
                    heappush(waiting.setdefault(counter, []), (target, sm))
            for counter in arrived:
                queue = waiting.get(counter, [])
                while queue and queue[0][0] <= self.counts[counter]:
                    entry = heappop(queue)
                    registered.discard((counter, *entry))
                    if entry[1] not in queued:
                        queued.add(entry[1])
                        ready.append(entry[1])
        return blocked

    def _advance(self, sm: int, at: list[int]) -> tuple[set[int], list[Target], Head | None]:
        """Run one SM as far as it goes: counters it arrived at, what it then waits for, and where it stands."""
        entries = self.lists[sm]
        arrived: set[int] = set()
        progress = bool(entries)
        load_missing = run_missing = None
        while progress:
            progress = False
            load_missing = run_missing = None
            if at[0] < self.steps:
                load_missing = self._missing(entries[at[1]].load, at[0])
                if load_missing is None:
                    self.order.append((at[0], sm, at[1], True))
                    at[0], at[1] = (at[0], at[1] + 1) if at[1] + 1 < len(entries) else (at[0] + 1, 0)
                    progress = True
            if (at[2], at[3]) < (at[0], at[1]):
                entry = entries[at[3]]
                run_missing = self._missing(entry.run, at[2])
                if run_missing is None:
                    self.order.append((at[2], sm, at[3], False))
                    for counter in (entry.early, entry.arrive):
                        if counter != NONE:
                            self.counts[counter] += 1
                            arrived.add(counter)
                    at[2], at[3] = (at[2], at[3] + 1) if at[3] + 1 < len(entries) else (at[2] + 1, 0)
                    progress = True
        head: Head | None = None
        if load_missing is not None:
            head = (at[0], at[1], True)
        if run_missing is not None:
            head = (at[2], at[3], False)
        return arrived, [missing for missing in (load_missing, run_missing) if missing is not None], head

    def _missing(self, waits: tuple[tuple[int, int, int], ...], step: int) -> Target | None:
        for counter, lag, need in waits:
            target = self._count(counter, lag, need, step)
            if self.counts[counter] < target:
                return counter, target
        return None

    def _count(self, counter: int, lag: int, need: int, step: int) -> int:
        """Absolute count that a wait asks for; the previous step's are met in the first."""
        return (step - lag) * self.totals[counter] + need if step >= lag else 0

    def _targets(self) -> set[Target]:
        return {
            (counter, self._count(counter, lag, need, step))
            for step in range(self.steps)
            for entries in self.lists
            for entry in entries
            for counter, lag, need in (*entry.load, *entry.run)
        }

    def _known_first(self, target: Target) -> Prefix:
        """Start of the fixed point: everything, which `_propagate` brings down to one execution's knowledge."""
        return np.full(self.num_sms, np.iinfo(np.int32).max, dtype=np.int32)

    def _known(self, target: Target) -> Prefix:
        """The `count`-th smallest, per SM, of what all arrivals at the counter know."""
        counter, count = target
        if count <= 0:
            return np.zeros(self.num_sms, dtype=np.int32)
        arrivals = np.stack(self.arrivals[counter])
        return np.partition(arrivals, count - 1, axis=0)[count - 1]

    def _propagate(self, known: dict[Target, Prefix]) -> None:
        """Knowledge of every event, in executed order, given what waits know (or, at first, what has arrived so far)."""
        for arrivals in self.arrivals.values():
            arrivals.clear()
        highest = {counter: np.zeros(self.num_sms, dtype=np.int32) for counter in self.arrivals}
        unknown = np.iinfo(np.int32).max
        producers = np.zeros((self.num_sms, self.num_sms), dtype=np.int32)
        consumers = np.zeros((self.num_sms, self.num_sms), dtype=np.int32)
        length = [2 * len(entries) for entries in self.lists]
        for step, sm, index, is_load in self.order:
            entry = self.lists[sm][index]
            state = producers[sm] if is_load else consumers[sm]
            if not is_load:
                np.maximum(state, self.load[step][entry.row], out=state)
            for counter, lag, need in entry.load if is_load else entry.run:
                target = (counter, self._count(counter, lag, need, step))
                value = known[target]
                if value[0] == unknown:
                    value = highest[counter] if len(self.arrivals[counter]) == target[1] else self._known(target)
                    known[target] = value = value.copy()
                np.maximum(state, value, out=state)
            if is_load:
                self.load[step][entry.row] = state
                continue
            self.runs[step][entry.row] = state
            base = step * length[sm] + 2 * index
            for counter, point in ((entry.early, base + 1), (entry.arrive, base + 2)):
                if counter != NONE:
                    state[sm] = point
                    self.arrivals[counter].append(state.copy())
                    np.maximum(highest[counter], state, out=highest[counter])
            state[sm] = base + 2

    def _deadlock(self, heads: dict[int, Head]) -> Finding:
        """The shortest ring of SMs that wait for each other, or the first wait that nothing left can meet."""
        names = TaskNames(self.graph)
        tasks = self.table.records["task"]

        def title(sm: int, index: int) -> str:
            return names[int(tasks[self.table.offsets[sm] + index])]

        def blocker(sm: int) -> tuple[str, int | None]:
            step, index, is_load = heads[sm]
            entry = self.lists[sm][index]
            missing = self._missing(entry.load if is_load else entry.run, step)
            assert missing is not None
            counter, target = missing
            text = (
                f"step {step}: SM {sm} waits to {'load' if is_load else 'run'} {title(sm, index)} for counter {counter} "
                f"= {target}, it stands at {self.counts[counter]}"
            )
            for other in sorted(heads):
                behind = heads[other][1] if not heads[other][2] else 0
                for later in range(behind, len(self.lists[other])):
                    if counter in (self.lists[other][later].early, self.lists[other][later].arrive):
                        return f"{text}; {title(other, later)} of SM {other} would arrive", other
            return f"{text}; nothing that is left arrives there", None

        best: list[str] = []
        for start in sorted(heads):
            path: list[int] = []
            texts: list[str] = []
            sm: int | None = start
            while sm is not None and sm not in path:
                path.append(sm)
                text, sm = blocker(sm)
                texts.append(text)
            ring = texts if sm is None else texts[path.index(sm) :]
            if not best or len(ring) < len(best):
                best = ring
        first = min(int(tasks[self.table.offsets[sm] + head[1]]) for sm, head in heads.items())
        return Finding("deadlock", f"{names[first]} never starts; {len(heads)} of {self.num_sms} SMs stop", tuple(best))


def _decode(table: TaskTable) -> list[list[_Entry]]:
    """Lists of plain integers: numpy records are slow to read one by one."""
    records = table.records
    columns = {name: records[name].tolist() for name in ("early", "arrive", "num_load_waits", "num_run_waits")}
    waits = {phase: records[f"{phase}_waits"].tolist() for phase in ("load", "run")}
    entries = [
        _Entry(
            row,
            tuple(tuple(wait) for wait in waits["load"][row][: columns["num_load_waits"][row]]),
            tuple(tuple(wait) for wait in waits["run"][row][: columns["num_run_waits"][row]]),
            columns["early"][row],
            columns["arrive"][row],
        )
        for row in range(len(records))
    ]
    return [entries[table.offsets[sm] : table.offsets[sm + 1]] for sm in range(table.num_sms)]
