"""One execution of a table, as far as it goes: does every task come to run, and which SMs wait for each other if not.

Counters only grow and waits ask for 'at least', so nothing that can happen is prevented by something else that happens:
one greedy execution reaches everything that any execution reaches, and it is stuck only where all of them are.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import pairwise, repeat

import numpy as np

from megakernel.counters import NONE
from megakernel.graph import TaskGraph
from megakernel.table import TaskTable
from megakernel.verify.finding import Finding, TaskNames

Target = tuple[int, int]
"""A counter and the count, over all steps, that a wait asks for; 0 where it asks for nothing, as in the first step."""


Turn = tuple[int, int, int, tuple[Target, ...], tuple[Target, ...], int, int]
"""One record in one step: row, step, end, targets of its load and of its run, where it arrives early and at its end.

`end` is the point of its SM at which the run is over: points number what an SM has done through all steps, and
`end - 1` is the end of the early part. A plain tuple, since there are a hundred thousand of them.
"""

_LOAD = 3  # place of a load's targets in a turn

Turns = list[list[Turn]]
"""Per SM, its turns through all steps."""

Event = tuple[int, int, bool]
"""SM, index in its turns, and whether it is the load that begins (or the run that takes place).

A load that waits for nothing begins as soon as the one before it has, and is left out.
"""


def take_turns(table: TaskTable, steps: int) -> Turns:
    """Decode the lists of `table`, once for every step."""
    load, run = (_targets(table, phase, steps) for phase in ("load", "run"))
    early, arrive = table.records["early"].tolist(), table.records["arrive"].tolist()
    turns: Turns = []
    for begin, end in pairwise(table.offsets.tolist()):
        listed: list[Turn] = []
        for step in range(steps):
            ends = range(2 * (len(listed) + 1), 2 * (len(listed) + 1 + end - begin), 2)
            targets = (targets[step][begin:end] for targets in (load, run))
            listed += zip(range(begin, end), repeat(step), ends, *targets, early[begin:end], arrive[begin:end])
        turns.append(listed)
    return turns


def _targets(table: TaskTable, phase: str, steps: int) -> list[list[tuple[Target, ...]]]:
    """Per step and record, its targets. Many records wait alike: each list of waits is decoded once."""
    totals = table.totals.tolist()
    waits = table.records[f"{phase}_waits"]
    raw, row_bytes, wait_bytes = waits.tobytes(), waits.itemsize * waits.shape[1], waits.itemsize
    used = table.records[f"num_{phase}_waits"].tolist()
    keys = [raw[row * row_bytes : row * row_bytes + num * wait_bytes] for row, num in enumerate(used)]
    decoded = {key: np.frombuffer(key, waits.dtype).tolist() for key in dict.fromkeys(keys)}
    targets: list[list[tuple[Target, ...]]] = []
    for step in range(steps):
        of = {
            key: tuple(
                (counter, (step - lag) * totals[counter] + need if step >= lag else 0) for counter, lag, need in found
            )
            for key, found in decoded.items()
        }
        targets.append([of[key] for key in keys])
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
        # Loads that wait for something, of each SM in turn; only there a producer can stop.
        self._gates = [iter([index for index, turn in enumerate(each) if turn[_LOAD]] + [len(each)]) for each in turns]
        self.loads = [next(gates) for gates in self._gates]
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
        loads, runs, end = self.loads[sm], self.runs[sm], len(turns)
        arrived: set[int] = set()
        while True:
            load_lacks = run_lacks = None
            while loads < end and (load_lacks := _unmet(turns[loads][_LOAD], counts)) is None:
                order.append((sm, loads, True))
                loads = next(self._gates[sm])
            if runs == loads:
                break
            _, _, _, _, targets, early, arrive = turns[runs]
            if targets and (run_lacks := _unmet(targets, counts)) is not None:
                break
            order.append((sm, runs, False))
            runs += 1
            if early != NONE:
                counts[early] += 1
                arrived.add(early)
            if arrive != NONE:
                counts[arrive] += 1
                arrived.add(arrive)
        self.loads[sm], self.runs[sm] = loads, runs
        self.stuck.pop(sm, None)
        if runs < end:
            lacks = ((runs, run_lacks), (loads, load_lacks))
            self.stuck[sm] = [(turn, target) for turn, target in lacks if target is not None]
        return arrived

    def deadlock(self, graph: TaskGraph) -> Finding:
        """The shortest ring of SMs that wait for each other, or the first wait that nothing left can meet."""
        names = TaskNames(graph)
        tasks = self.table.records["task"]

        def title(sm: int, turn: int) -> str:
            row, step, *_ = self.turns[sm][turn]
            return f"{names[int(tasks[row])]} of step {step}"

        def blocker(sm: int) -> tuple[str, int | None]:
            turn, (counter, count) = self.stuck[sm][0]
            verb = "run" if turn < self.loads[sm] else "load"
            text = f"SM {sm} waits to {verb} {title(sm, turn)} until counter {counter} is {count}"
            text += f", it stands at {self.counts[counter]}"
            for other in self.stuck:
                for later in range(self.runs[other], len(self.turns[other])):
                    *_, early, arrive = self.turns[other][later]
                    if counter in (early, arrive):
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
        step, task = min((step, int(tasks[row])) for row, step, *_ in left)
        message = f"{names[task]} of step {step} never runs; {len(self.stuck)} of {len(self.turns)} SMs stop"
        return Finding("deadlock", message, tuple(best))


def _unmet(targets: tuple[Target, ...], counts: list[int]) -> Target | None:
    for target in targets:
        if counts[target[0]] < target[1]:
            return target
    return None
