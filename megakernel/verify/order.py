"""One execution of a table, as far as it goes: does every task come to run, and which SMs wait for each other if not.

Counters only grow and waits ask for 'at least', so nothing that can happen is prevented by something else that happens:
one greedy execution reaches everything that any execution reaches, and it is stuck only where all of them are.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megakernel.counters import NONE
from megakernel.graph import TaskGraph
from megakernel.table import TaskTable
from megakernel.verify.finding import Finding, TaskNames

Target = tuple[int, int]
"""A counter and the count, over all steps, that a wait asks for; 0 where it asks for nothing, as in the first step."""


class Turn(NamedTuple):
    """One record in one step. `row` is the record's, `end` the point of its SM at which the run is over.

    Points number what an SM has done through all steps: `end - 1` is the end of the early part.
    """

    row: int
    step: int
    end: int
    load: tuple[Target, ...]
    run: tuple[Target, ...]
    early: int
    arrive: int


Turns = list[list[Turn]]
"""Per SM, its turns through all steps."""

Event = tuple[int, int, bool]
"""SM, index in its turns, and whether it is the load that begins (or the run that takes place)."""


def take_turns(table: TaskTable, steps: int) -> Turns:
    """Decode the lists of `table`, once for every step."""
    load, run = (_targets(table, phase, steps) for phase in ("load", "run"))
    early, arrive = table.records["early"].tolist(), table.records["arrive"].tolist()
    turns: Turns = []
    for begin, end in pairwise(table.offsets.tolist()):
        rows = ((step, row) for step in range(steps) for row in range(begin, end))
        turns.append(
            [
                Turn(row, step, 2 * index, load[row][step], run[row][step], early[row], arrive[row])
                for index, (step, row) in enumerate(rows, start=1)
            ]
        )
    return turns


def _targets(table: TaskTable, phase: str, steps: int) -> list[tuple[tuple[Target, ...], ...]]:
    """Per record, its targets in every step. Many records wait alike: each list of waits is decoded once."""
    totals = table.totals.tolist()
    waits = table.records[f"{phase}_waits"]
    raw, row_bytes, wait_bytes = waits.tobytes(), waits.itemsize * waits.shape[1], waits.itemsize
    decoded: dict[bytes, tuple[tuple[Target, ...], ...]] = {}
    targets: list[tuple[tuple[Target, ...], ...]] = []
    for row, used in enumerate(table.records[f"num_{phase}_waits"].tolist()):
        key = raw[row * row_bytes : row * row_bytes + used * wait_bytes]
        if key not in decoded:
            decoded[key] = tuple(
                tuple(
                    (counter, (step - lag) * totals[counter] + need if step >= lag else 0)
                    for counter, lag, need in np.frombuffer(key, waits.dtype).tolist()
                )
                for step in range(steps)
            )
        targets.append(decoded[key])
    return targets


class Execution:
    """A greedy execution: `order` is what happened, `stuck` what the SMs that stopped before their end wait for.

    An SM waits in one or two turns: for its next run, unless that stands behind its load, and for its next load.
    """

    def __init__(self, table: TaskTable, turns: Turns) -> None:
        """Execute all of `turns` that can be."""
        self.table, self.turns = table, turns
        self.counts = [0] * table.num_counters
        self.order: list[Event] = []
        self.loads = [0] * table.num_sms
        self.runs = [0] * table.num_sms
        self.stuck: dict[int, list[tuple[int, Target]]] = {}
        self._execute()

    def _execute(self) -> None:
        """Let an SM go as far as it can, then those that waited for what it brought."""
        waiting: list[list[tuple[int, int]]] = [[] for _ in self.counts]
        ready = list(range(len(self.turns) - 1, -1, -1))
        queued = [True] * len(self.turns)
        while ready:
            sm = ready.pop()
            queued[sm] = False
            arrived = self._advance(sm)
            for _, (counter, count) in self.stuck.get(sm, ()):
                heappush(waiting[counter], (count, sm))
            for counter in arrived:
                queue = waiting[counter]
                while queue and queue[0][0] <= self.counts[counter]:
                    _, waiter = heappop(queue)
                    if not queued[waiter]:
                        queued[waiter] = True
                        ready.append(waiter)

    def _advance(self, sm: int) -> set[int]:
        """Run one SM as far as it goes; the counters it arrived at."""
        turns, counts, order = self.turns[sm], self.counts, self.order
        loads, runs = self.loads[sm], self.runs[sm]
        arrived: set[int] = set()
        while True:
            load_lacks = None
            while loads < len(turns):
                targets = turns[loads].load
                if targets and (load_lacks := _unmet(targets, counts)) is not None:
                    break
                order.append((sm, loads, True))
                loads += 1
            run_lacks = None
            if runs == loads:
                break
            turn = turns[runs]
            if turn.run and (run_lacks := _unmet(turn.run, counts)) is not None:
                break
            order.append((sm, runs, False))
            runs += 1
            for counter in (turn.early, turn.arrive):
                if counter != NONE:
                    counts[counter] += 1
                    arrived.add(counter)
        self.loads[sm], self.runs[sm] = loads, runs
        self.stuck.pop(sm, None)
        if runs < len(turns):
            lacks = ((runs, run_lacks), (loads, load_lacks))
            self.stuck[sm] = [(turn, target) for turn, target in lacks if target is not None]
        return arrived

    def deadlock(self, graph: TaskGraph) -> Finding:
        """The shortest ring of SMs that wait for each other, or the first wait that nothing left can meet."""
        names = TaskNames(graph)
        tasks = self.table.records["task"]

        def title(sm: int, turn: int) -> str:
            return f"{names[int(tasks[self.turns[sm][turn].row])]} of step {self.turns[sm][turn].step}"

        def blocker(sm: int) -> tuple[str, int | None]:
            turn, (counter, count) = self.stuck[sm][0]
            verb = "run" if turn < self.loads[sm] else "load"
            text = f"SM {sm} waits to {verb} {title(sm, turn)} until counter {counter} is {count}"
            text += f", it stands at {self.counts[counter]}"
            for other in self.stuck:
                for later in range(self.runs[other], len(self.turns[other])):
                    if counter in (self.turns[other][later].early, self.turns[other][later].arrive):
                        return f"{text}; {title(other, later)} on SM {other} would arrive there", other
            return f"{text}; nothing that is left arrives there", None

        best: list[str] = []
        for start in self.stuck:
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
        left = (self.turns[sm][self.runs[sm]] for sm in self.stuck)
        step, task = min((turn.step, int(tasks[turn.row])) for turn in left)
        message = f"{names[task]} of step {step} never runs; {len(self.stuck)} of {len(self.turns)} SMs stop"
        return Finding("deadlock", message, tuple(best))


def _unmet(targets: tuple[Target, ...], counts: list[int]) -> Target | None:
    for target in targets:
        if counts[target[0]] < target[1]:
            return target
    return None
