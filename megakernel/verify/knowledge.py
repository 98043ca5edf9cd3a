"""What must have happened before each load and each run: exact, for counters that only grow.

An event a must precede b iff b cannot be reached while a is held back. With waits of the form 'at least k of these
arrivals', what a wait must know of an SM is the k-th smallest of what the arrivals know of it: fewer than k of them can
happen while any event beyond that is held back. Lists run in order, so what is known of an SM is a prefix of its list,
and knowledge is one integer per SM. The rule is a greatest fixed point: it starts from the knowledge of one execution,
where only arrivals before a wait can have met it, and is lowered until all arrivals are taken into account.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.counters import NONE
from megakernel.graph import TaskGraph
from megakernel.table import TaskTable
from megakernel.verify.finding import Finding, TaskNames
from megakernel.verify.order import Execution, Target, Turns, take_turns

Prefixes = npt.NDArray[np.int32]
"""[..., SMs]: how many points of each SM's list are known to be over; `Turn` says what a point is."""

Ints = npt.NDArray[np.int64]


_AS_BEFORE = -1
_ROOM = 256  # states, to begin with


@dataclass(frozen=True)
class Overtaking:
    """Record `arriver` of step `steps[1]` may arrive at `counter` before `waiter` of `steps[0]` has waited there."""

    counter: int
    waiter: int
    arriver: int
    steps: tuple[int, int]


class Knowledge:
    """What is known at the start of the load and of the run of every record: prefixes [steps, records, SMs].

    `points` are an SM's points in a step; record `row` is number `index_of[row]` of list `sm_of[row]`.
    """

    def __init__(self, table: TaskTable, turns: Turns, execution: Execution, steps: int) -> None:
        """Find out what is known in `execution`; `settle` makes that what is known in every one."""
        self.table, self.turns, self.steps = table, turns, steps
        lengths = np.diff(table.offsets.astype(np.int64))
        self.points = 2 * lengths
        self.sm_of = np.repeat(np.arange(len(lengths)), lengths)
        self.index_of = np.arange(len(table.records)) - table.offsets[:-1].astype(np.int64)[self.sm_of]
        self._order = execution.order
        self._arrivals: list[list[tuple[int, int, int, int, int]]] = []
        self._states: Prefixes = np.zeros((_ROOM, len(lengths)), dtype=np.int32)
        self._known: dict[Target, Prefixes] = {}
        self._sweep()

    def _sweep(self) -> None:  # noqa: C901 - one pass over everything that happens
        """Knowledge of every event, in executed order, given what is known once each target is reached.

        Many SMs know the same of all others, so each distinct state is kept once, and what an SM's consumers know of
        their own list, all of it so far, is written in at the end.
        """
        arrivals = self._arrivals = [[] for _ in self.table.totals]
        turns, num_sms = self.turns, len(self.turns)
        number_of = {self._states[0].tobytes(): 0}
        learnt: dict[tuple[int, int | tuple[Target, ...]], int] = {}

        def learn(state: int, more: int | tuple[Target, ...]) -> int:
            """The state that joins `state` with another one or with what targets tell."""
            if (found := learnt.get((state, more))) is None:
                parts = [self._states[more]] if isinstance(more, int) else [self._reached(target) for target in more]
                joined = np.maximum.reduce([self._states[state], *parts])
                found = learnt[state, more] = number_of.setdefault(joined.tobytes(), len(number_of))
                if found == len(self._states):
                    self._states = np.concatenate([self._states, np.empty_like(self._states)])
                self._states[found] = joined
            return found

        load, run = ([[_AS_BEFORE] * len(self.table.records) for _ in range(self.steps)] for _ in range(2))
        producers, consumers = [0] * num_sms, [0] * num_sms
        for sm, index, is_load in self._order:
            row, step, end, load_targets, run_targets, early, arrive = turns[sm][index]
            if is_load:
                load[step][row] = producers[sm] = learn(producers[sm], load_targets)
                continue
            if load_targets:
                consumers[sm] = learn(consumers[sm], load[step][row])
            if run_targets:
                consumers[sm] = learn(consumers[sm], run_targets)
            state = run[step][row] = consumers[sm]
            if early != NONE:
                arrivals[early].append((step, row, sm, end - 1, state))
            if arrive != NONE:
                arrivals[arrive].append((step, row, sm, end, state))
        self.load, self.run = self._states[self._filled(np.array(load))], self._states[np.array(run)]
        for step in range(self.steps):
            self.run[step, np.arange(len(self.sm_of)), self.sm_of] = step * self.points[self.sm_of] + 2 * self.index_of

    def _filled(self, load: Ints) -> Ints:
        """Numbers of states [steps, records] with those of the loads before written in for _AS_BEFORE."""
        places = np.argsort(self.sm_of[None, :] + np.zeros_like(load), axis=None, kind="stable")
        listed = load.ravel()[places]  # list after list, step after step
        first = np.searchsorted(np.repeat(self.sm_of, self.steps), np.unique(self.sm_of))
        listed[first] = np.maximum(listed[first], 0)
        known = np.maximum.accumulate(np.where(listed == _AS_BEFORE, 0, np.arange(len(listed))))
        filled = np.empty_like(listed)
        filled[places] = listed[known]
        return filled.reshape(load.shape)

    def _reached(self, target: Target) -> Prefixes:
        """What is known once `target` is reached: at first, given the arrivals so far."""
        if target not in self._known:
            self._known[target] = self._smallest(target)
        return self._known[target]

    def _smallest(self, target: Target) -> Prefixes:
        """Per SM, the `count`-th smallest of what the arrivals know of it."""
        counter, count = target
        if count <= 0:
            return np.zeros(len(self.turns), dtype=np.int32)
        known, _, _ = self._arrived(counter)
        return known.max(axis=0) if count == len(known) else np.partition(known, count - 1, axis=0)[count - 1]

    def _arrived(self, counter: int) -> tuple[Prefixes, Ints, Ints]:
        """Arrivals at a counter: what each knows, with its step and its record."""
        steps, rows, sms, points, states = np.array(self._arrivals[counter], dtype=np.int64).reshape(-1, 5).T
        known = self._states[states]
        known[np.arange(len(known)), sms] = points
        return known, steps, rows

    def settle(self) -> None:
        """Lower to the fixed point."""
        while True:
            lowered = {target: np.minimum(known, self._smallest(target)) for target, known in self._known.items()}
            if all(np.array_equal(known, lowered[target]) for target, known in self._known.items()):
                return
            self._known = lowered
            self._sweep()

    def overtaking(self, distance: int) -> Iterator[Overtaking]:
        """Arrivals that may come before a wait at their counter for a step `distance` earlier has been met."""
        if distance >= self.steps:
            return
        waiters, counters, lags, _ = _waits(self.table)
        by_counter = np.argsort(counters, kind="stable")
        used, begins = np.unique(counters[by_counter], return_index=True)
        for counter, places in zip(used.tolist(), np.split(by_counter, begins)[1:], strict=True):
            known, steps, arrivers = self._arrived(counter)
            rows, lag = waiters[places], lags[places]
            sms = self.sm_of[rows]
            for step in range(self.steps - distance):
                later = np.nonzero(steps == step + distance)[0]
                if not len(later):
                    continue
                # a wait is known to be met once its own record has signalled something
                met = (step + lag) * self.points[sms] + 2 * self.index_of[rows] + 1
                for wait in np.nonzero((known[later].min(axis=0)[sms] < met) & (step + lag < self.steps))[0]:
                    first = later[known[later, sms[wait]].argmin()]
                    pair = int(step + lag[wait]), step + distance
                    yield Overtaking(counter, int(rows[wait]), int(arrivers[first]), pair)


def know(table: TaskTable) -> tuple[Knowledge | None, Execution]:
    """Knowledge of every record, or only the execution if that gets stuck.

    If every wait is for all arrivals of a step and is met before any arrival of the next step, then only those arrivals
    ever meet it: one execution tells what is known in all, and two steps, the first of which has nothing to
    wait for in a step before, tell what is known in any two. `counters` wires such tables. For others the fixed point
    is taken, over one step more.
    """
    knowledge, execution = _execute(table, 2)
    if knowledge is None or (_asks_for_all(table) and not any(knowledge.overtaking(1))):
        return knowledge, execution
    knowledge, execution = _execute(table, 3)
    if knowledge is not None:
        knowledge.settle()
    return knowledge, execution


def _execute(table: TaskTable, steps: int) -> tuple[Knowledge | None, Execution]:
    turns = take_turns(table, steps)
    execution = Execution(table, turns)
    return None if execution.stuck else Knowledge(table, turns, execution, steps), execution


def find_overtaking(graph: TaskGraph, knowledge: Knowledge) -> Iterator[Finding]:
    """Counters that may run two steps ahead of a wait: nothing then keeps their difference below what they can hold."""
    names = TaskNames(graph)
    tasks = knowledge.table.records["task"]
    for found in knowledge.overtaking(2):
        waiter, arriver = (
            f"{names[int(tasks[row])]} of step {step}"
            for row, step in zip((found.waiter, found.arriver), found.steps, strict=True)
        )
        sm = int(knowledge.sm_of[found.waiter])
        yield Finding(
            "counter reuse",
            f"{arriver} may arrive at counter {found.counter} while {waiter} still waits there",
            (f"hold SM {sm} back in {waiter}", f"run the rest: {arriver} needs nothing that comes after it"),
        )


def _asks_for_all(table: TaskTable) -> bool:
    _, counters, _, needs = _waits(table)
    return bool((needs == table.totals[counters]).all())


def _waits(table: TaskTable) -> tuple[Ints, Ints, Ints, Ints]:
    """All waits as columns: record, counter, lag, need."""
    columns: list[Ints] = []
    for phase in ("load", "run"):
        waits = table.records[f"{phase}_waits"]
        used: Ints = table.records[f"num_{phase}_waits"].astype(np.int64)
        room: int = waits.shape[1]
        rows, slots = np.nonzero(np.arange(room) < used[:, None])
        fields = (waits[name][rows, slots] for name in ("counter", "lag", "need"))
        columns.append(np.stack([rows, *fields]).astype(np.int64))
    rows, counters, lags, needs = np.concatenate(columns, axis=1)
    return rows, counters, lags, needs
