"""The kernel's walk through a table, as states and moves; `oracle` tells it which accesses must not meet.

Arrivals are all that SMs tell each other, counts only grow and waits ask for 'at least': nothing that may happen is
ever prevented by something else that happens. Loads and runs are therefore taken to begin as soon as they may, and a
copy to land only with the end of its run, which makes every access as long as it gets. What is left to choose is whose
consumers move next. `literal` does without that argument, and a test compares the two.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megakernel.counters import NONE
from megakernel.table import TaskTable, read_waits

if TYPE_CHECKING:
    from support.oracle import Oracle

Target = tuple[int, int]
"""A counter and the count, over all steps, that a wait asks for."""

Before = tuple[tuple[int, int], ...]
"""What must be over when something happens: (SM, beats)."""


@dataclass(frozen=True)
class Harm:
    """What goes wrong: `deadlock`, `clash`, `reuse`, `counters`, `tasks`, `operands` or `ring`."""

    kind: str
    detail: str


@dataclass(frozen=True)
class Turn:
    """One record in one step: what load and run wait for, and what must be over when they begin."""

    title: str
    load_waits: tuple[Target, ...]
    run_waits: tuple[Target, ...]
    before_load: Before
    before_run: Before


@dataclass(frozen=True)
class Beat:
    """What consumers do next: end the early part or the run of `turn`, and arrive; the first of them begins the run."""

    turn: int
    step: int
    begins: bool
    counter: int


@dataclass
class State:
    """Beats that every SM has done, and what follows from them: counts, and turns whose loads have begun."""

    done: tuple[int, ...]
    counts: list[int]
    loads: list[int]


class Walk:
    """A table laid out in time: per SM its turns and the beats of its consumers, for all steps."""

    def __init__(self, oracle: Oracle, table: TaskTable) -> None:
        """Lay out `table` for the oracle's steps."""
        self.totals = table.totals.tolist()
        self.steps, self.num_sms = oracle.steps, table.num_sms
        self.lists = [list(table.sm_records(sm)) for sm in range(self.num_sms)]
        publishers = {clash.first for clash in oracle.clashes if clash.over_early}
        over: dict[tuple[int, int, bool], tuple[int, int]] = {}
        self.beats: list[list[Beat]] = [[] for _ in self.lists]
        for sm, step, turn, record in self._turns():
            task, early, arrive = (int(record[name]) for name in ("task", "early", "arrive"))
            beats = self.beats[sm]
            first = len(beats) + 1
            if early != NONE or task in publishers:
                beats.append(Beat(turn, step, begins=True, counter=early))
            beats.append(Beat(turn, step, begins=len(beats) < first, counter=arrive))
            over[task, step, True], over[task, step, False] = (sm, first), (sm, len(beats))

        before: dict[tuple[int, int, bool], dict[int, int]] = {}
        for clash in oracle.clashes:
            for step in range(self.steps):
                for past in range(step) if clash.lag else (step,):
                    _raise(before, (clash.then, step, clash.loads), over[clash.first, past, clash.over_early])
        waiters: dict[tuple[int, int], dict[int, int]] = {}
        self.turns: list[list[Turn]] = [[] for _ in self.lists]
        for sm, step, _, record in self._turns():
            task = int(record["task"])
            needed = [tuple(before.get((task, step, loads), {}).items()) for loads in (True, False)]
            targets: list[tuple[Target, ...]] = []
            for phase in ("load", "run"):
                waits = [(wait.counter, step - wait.lag, wait.need) for wait in read_waits(record, phase)]
                targets.append(
                    tuple((counter, of * self.totals[counter] + need) for counter, of, need in waits if of >= 0)
                )
                for counter, of, _ in waits:
                    _raise(waiters, (counter, of), over[task, step, True])
            self.turns[sm].append(Turn(f"{oracle.title(task)} of step {step}", *targets, *needed))
        self.waiters = {key: tuple(beats.items()) for key, beats in waiters.items()}

    def _turns(self) -> Iterator[tuple[int, int, int, np.void]]:
        for sm, records in enumerate(self.lists):
            for turn in range(self.steps * len(records)):
                step, idx = divmod(turn, len(records))
                yield sm, step, turn, records[idx]

    def start(self) -> State:
        """Nothing done."""
        return State((0,) * self.num_sms, [0] * len(self.totals), [0] * self.num_sms)

    def explore(self) -> Harm | None:
        """Visit every state that some interleaving reaches."""
        pending = [self.start()]
        seen = {pending[0].done}
        while pending:
            state = pending.pop()
            moves, harm = self.look(state)
            if harm:
                return harm
            for sm in moves:
                after = (*state.done[:sm], state.done[sm] + 1, *state.done[sm + 1 :])
                if after not in seen:
                    seen.add(after)
                    pending.append(self.move(state, sm))
        return None

    def follow(self, rng: random.Random) -> Harm | None:
        """Follow one interleaving: the first SM of a random order that can move does; the order changes a few times."""
        state = self.start()
        beats = sum(map(len, self.beats))
        order = rng.sample(range(self.num_sms), self.num_sms)
        changes = {rng.randrange(beats) for _ in range(rng.randrange(1, 6))}
        for beat in range(beats):
            moves, harm = self.look(state)
            if harm:
                return harm
            if beat in changes:
                rng.shuffle(order)
            state = self.move(state, min(moves, key=order.index))
        return self.look(state)[1]

    def look(self, state: State) -> tuple[list[int], Harm | None]:
        """SMs whose consumers can move; harm if something happens too early, or if nothing does before the end."""
        moves: list[int] = []
        for sm, beats in enumerate(self.beats):
            if harm := self._load(sm, state):
                return [], harm
            if state.done[sm] == len(beats):
                continue
            beat = beats[state.done[sm]]
            turn = self.turns[sm][beat.turn]
            if beat.begins:
                if state.loads[sm] <= beat.turn or not _met(turn.run_waits, state.counts):
                    continue
                if not _over(turn.before_run, state.done):
                    return [], Harm("clash", f"{turn.title} runs too early")
            if not _over(self.waiters.get((beat.counter, beat.step - 2), ()), state.done):
                return [], Harm(
                    "reuse", f"{turn.title} arrives at counter {beat.counter}, waited at for two steps before"
                )
            moves.append(sm)
        return moves, None if moves else self._end(state)

    def _load(self, sm: int, state: State) -> Harm | None:
        """Begin, in place, the loads of an SM that may."""
        turns = self.turns[sm]
        while state.loads[sm] < len(turns) and _met(turns[state.loads[sm]].load_waits, state.counts):
            turn = turns[state.loads[sm]]
            if not _over(turn.before_load, state.done):
                return Harm("clash", f"{turn.title} loads too early")
            state.loads[sm] += 1
        return None

    def _end(self, state: State) -> Harm | None:
        """What is wrong with a state in which nothing moves."""
        behind = [sm for sm, beats in enumerate(self.beats) if state.done[sm] < len(beats)]
        if behind:
            titles = [self.turns[sm][self.beats[sm][state.done[sm]].turn].title for sm in behind]
            return Harm("deadlock", f"left to run: {', '.join(titles)}")
        if state.counts != [self.steps * total for total in self.totals]:
            return Harm("counters", f"{state.counts} after {self.steps} steps of {self.totals}")
        return None

    def move(self, state: State, sm: int) -> State:
        """The state after the next beat of `sm`."""
        done, counts = list(state.done), state.counts
        counter = self.beats[sm][done[sm]].counter
        done[sm] += 1
        if counter != NONE:
            counts = counts.copy()
            counts[counter] += 1
        return State(tuple(done), counts, state.loads.copy())


def _raise(before: dict, key: tuple, over: tuple[int, int]) -> None:
    sm, beats = over
    needed = before.setdefault(key, {})
    needed[sm] = max(needed.get(sm, 0), beats)


def _met(waits: tuple[Target, ...], counts: list[int]) -> bool:
    return all(counts[counter] >= count for counter, count in waits)


def _over(before: Before, done: tuple[int, ...]) -> bool:
    return all(done[sm] >= beat for sm, beat in before)
