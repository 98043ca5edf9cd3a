"""The oracle without its shortcuts: every event of the kernel loop is a move of its own, and every access has a state.

Slow, and only for tables of a few tasks: a test lets it and `oracle` judge the same tables.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megakernel.counters import NONE
from megakernel.graph import Access, TaskGraph, When
from megakernel.table import TaskTable, read_waits

NOT_BEGUN, IN_PROGRESS, OVER = range(3)


@dataclass(frozen=True)
class SmState:
    """Where one SM stands: loads begun, which of them have landed, runs ended, and how far the present run is."""

    loads: int = 0
    landed: frozenset[int] = frozenset()
    runs: int = 0
    phase: int = 0  # of the run at `runs`: 0 not begun, 1 begun, 2 early part over


class Literal:
    """All interleavings of one table for `steps` steps."""

    def __init__(self, graph: TaskGraph, table: TaskTable, steps: int) -> None:
        """Lay out `table` for `steps` steps."""
        self.graph, self.steps = graph, steps
        self.totals = table.totals.tolist()
        self.lists = [list(table.sm_records(sm)) for sm in range(table.num_sms)]
        self.tasks = [(op_idx, task) for op_idx, op in enumerate(graph.ops) for task in op.tasks]
        self.turns = [
            [(step, record, int(record["task"])) for step in range(steps) for record in records]
            for records in self.lists
        ]
        self.where = {
            (step, task): (sm, at) for sm, turns in enumerate(self.turns) for at, (step, _, task) in enumerate(turns)
        }

    def is_harmful(self) -> bool:
        """Whether some interleaving ends early, or lets clashing accesses meet or change places."""
        start = (SmState(),) * len(self.lists)
        seen, pending = {start}, [start]
        while pending:
            state = pending.pop()
            successors = list(self._successors(state))
            if not successors and any(sm.runs < len(turns) for sm, turns in zip(state, self.turns, strict=True)):
                return True
            for after in successors:
                if after not in seen:
                    if self._begun_too_early(state, after):
                        return True
                    seen.add(after)
                    pending.append(after)
        return False

    def _counts(self, state: tuple[SmState, ...]) -> list[int]:
        counts = [0] * len(self.totals)
        for sm, turns in zip(state, self.turns, strict=True):
            for at, (_, record, _) in enumerate(turns[: sm.runs + 1]):
                if record["early"] != NONE and (at < sm.runs or sm.phase == 2):
                    counts[record["early"]] += 1
                if record["arrive"] != NONE and at < sm.runs:
                    counts[record["arrive"]] += 1
        return counts

    def _met(self, step: int, record, phase: str, counts: list[int]) -> bool:
        return all(
            step < wait.lag or counts[wait.counter] >= (step - wait.lag) * self.totals[wait.counter] + wait.need
            for wait in read_waits(record, phase)
        )

    def _successors(self, state: tuple[SmState, ...]):
        counts = self._counts(state)
        for idx, (sm, turns) in enumerate(zip(state, self.turns, strict=True)):
            for after in self._moves(sm, turns, counts):
                yield (*state[:idx], after, *state[idx + 1 :])

    def _moves(self, sm: SmState, turns, counts: list[int]):
        if sm.loads < len(turns) and self._met(*turns[sm.loads][:2], "load", counts):
            yield replace(sm, loads=sm.loads + 1)
        for at in range(sm.runs, sm.loads):
            if at not in sm.landed:
                yield replace(sm, landed=sm.landed | {at})
        if sm.phase == 0 and sm.runs < sm.loads and self._met(*turns[sm.runs][:2], "run", counts):
            yield replace(sm, phase=1)
        elif sm.phase == 1:
            yield replace(sm, phase=2)
        elif sm.phase == 2 and sm.runs in sm.landed:
            yield SmState(sm.loads, sm.landed - {sm.runs}, sm.runs + 1, 0)

    def _access_state(self, state: tuple[SmState, ...], step: int, task: int, when: When) -> int:
        sm_idx, at = self.where[step, task]
        sm = state[sm_idx]
        if at < sm.runs:
            return OVER
        if when is When.LOAD:
            return NOT_BEGUN if at >= sm.loads else OVER if at in sm.landed else IN_PROGRESS
        if at > sm.runs or sm.phase == 0:
            return NOT_BEGUN
        return OVER if when is When.EARLY and sm.phase == 2 else IN_PROGRESS

    def _begun_too_early(self, before: tuple[SmState, ...], after: tuple[SmState, ...]) -> bool:
        """Whether an access that the move begins meets one in progress, or comes after one that it should precede."""
        for step, task in self.where:
            op, lowered = self.tasks[task]
            for access in lowered.accesses:
                was, now = (self._access_state(state, step, task, access.when) for state in (before, after))
                if was == NOT_BEGUN != now and self._harms(after, (step, task, op, access)):
                    return True
        return False

    def _harms(self, state: tuple[SmState, ...], begun: tuple[int, int, int, Access]) -> bool:
        step, task, op, access = begun
        for other_step, other in self.where:
            if (other_step, other) == (step, task):
                continue
            other_op, lowered = self.tasks[other]
            for theirs in lowered.accesses:
                same_step = step == other_step
                if not self._clash((op, access), (other_op, theirs), same_step=same_step):
                    continue
                there = self._access_state(state, other_step, other, theirs.when)
                if there == IN_PROGRESS or (there == OVER and (other_step, other) > (step, task)):
                    return True
        return False

    def _clash(self, one: tuple[int, Access], other: tuple[int, Access], *, same_step: bool) -> bool:
        (op, a), (other_op, b) = one, other
        if self.graph.ops[op].buffers[a.slot] != self.graph.ops[other_op].buffers[b.slot] or not (a.write or b.write):
            return False
        if same_step and op == other_op and a.partitioned and b.partitioned:
            return False
        return all(x[0] < y[1] and y[0] < x[1] for x, y in zip(a.box, b.box, strict=True))
