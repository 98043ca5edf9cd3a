"""Walks a packed table as the kernel's loop does, with any legal interleaving, and checks every counter.

Each SM has a producer and consumers; a seeded scheduler picks who moves next. A copy may land at any time between its
issue and its use: the scheduler also decides which of the two moments it shows. Nothing here reads the graph's
dependencies: waits and arrivals are the table's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import torch

from megakernel.counters import NONE, Wait
from megakernel.table import TaskTable, read_waits
from runtime.reference.memory import Memory
from runtime.reference.operands import Operands
from runtime.reference.tasks import Loaded, load, run
from runtime.weights import Weights

WRAP = 2**32
"""Counters are words; what is compared is their difference."""


class StuckError(RuntimeError):
    """No SM can move, or a counter does not add up: the table is wrong. Names the first task that should have run."""


@dataclass(frozen=True)
class _Entry:
    task: int
    operands: Operands
    load_waits: tuple[Wait, ...]
    run_waits: tuple[Wait, ...]
    early: int
    arrive: int


@dataclass
class _Sm:
    """Where one SM stands in its list: its producer, its consumers, and whether their early part is over."""

    entries: list[_Entry]
    produced: int = 0
    consumed: int = 0
    early_done: bool = False


class Interpreter:
    """Executes steps of one table on one memory; counters keep growing from step to step."""

    def __init__(
        self, table: TaskTable, memory: Memory, weights: Weights, seed: int = 0, *, first_step: int = 0
    ) -> None:
        """`seed` picks the interleaving, `first_step` where counters stand; the results must not depend on them."""
        self.memory, self.weights, self.table = memory, weights, table
        self.random = Random(seed)
        self.totals = [int(total) for total in table.totals]
        self.counters = [first_step * total % WRAP for total in self.totals]
        self.step_idx = self.first_step = first_step
        self.lists = [[_decode(record) for record in table.sm_records(sm)] for sm in range(table.num_sms)]
        self.deferred: dict[int, bool] = {}
        self.loaded: dict[int, Loaded] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Run one decode step; StuckError when the table can't finish it or a counter is not what it should be."""
        sms = [_Sm(entries) for entries in self.lists]
        movable = [sm for sm in sms if sm.entries]
        while movable:
            sm = self._pick(movable)
            if sm is None:
                self._stuck(sms)
            elif sm.consumed == len(sm.entries):
                movable.remove(sm)
        self.step_idx += 1
        for counter, (count, total) in enumerate(zip(self.counters, self.totals, strict=True)):
            if count != self.step_idx * total % WRAP:
                needed = self.step_idx * total % WRAP
                raise StuckError(f"after step {self.step_idx} counter {counter} stands at {count}, needed {needed}")

    def _pick(self, movable: list[_Sm]) -> _Sm | None:
        """Let a random SM's producer or consumers make one move; None when none of them can."""
        start = self.random.randrange(len(movable))
        for offset in range(len(movable)):
            sm = movable[(start + offset) % len(movable)]
            moves = [self._produce, self._consume]
            if self.random.random() < 0.5:
                moves.reverse()
            if any(move(sm) for move in moves):
                return sm
        return None

    def _met(self, waits: tuple[Wait, ...]) -> bool:
        return all(
            (self.counters[wait.counter] - self._target(wait)) % WRAP < WRAP // 2
            for wait in waits
            if self.step_idx - self.first_step >= wait.lag
        )

    def _target(self, wait: Wait) -> int:
        return ((self.step_idx - wait.lag) * self.totals[wait.counter] + wait.need) % WRAP

    def _arrive(self, counter: int) -> None:
        self.counters[counter] = (self.counters[counter] + 1) % WRAP

    def _produce(self, sm: _Sm) -> bool:
        if sm.produced == len(sm.entries):
            return False
        entry = sm.entries[sm.produced]
        if not self._met(entry.load_waits):
            return False
        # a copy reads until it has landed: show either what it would read first or what it would read last
        self.deferred[entry.task] = self.random.random() < 0.5
        if not self.deferred[entry.task]:
            self.loaded[entry.task] = load(entry.operands, self.memory)
        sm.produced += 1
        return True

    def _consume(self, sm: _Sm) -> bool:
        if sm.consumed == sm.produced:
            return False
        entry = sm.entries[sm.consumed]
        if not sm.early_done:
            if not self._met(entry.run_waits):
                return False
            if entry.early != NONE:
                run(entry.operands, self.memory, self.weights, None, early=True)
                self._arrive(entry.early)
                sm.early_done = True
                return True
        loaded = load(entry.operands, self.memory) if self.deferred[entry.task] else self.loaded.pop(entry.task)
        run(entry.operands, self.memory, self.weights, loaded, early=False)
        if entry.arrive != NONE:
            self._arrive(entry.arrive)
        sm.consumed += 1
        sm.early_done = False
        return True

    def _stuck(self, sms: list[_Sm]) -> None:
        waiting = [
            (entry.task, sm_idx, entry, wait)
            for sm_idx, sm in enumerate(sms)
            for entry, waits in _heads(sm)
            for wait in waits
            if not self._met((wait,))
        ]
        task, sm_idx, entry, wait = min(waiting, key=lambda item: (item[0], item[1]))
        target = self._target(wait)
        raise StuckError(
            f"step {self.step_idx}: task {task} ({entry.operands.kind.name.lower()}, layer {entry.operands.layer}) "
            f"on SM {sm_idx} should have run first; it waits for counter {wait.counter} = {target}, which stands at "
            f"{self.counters[wait.counter]}"
        )


def _heads(sm: _Sm) -> Iterator[tuple[_Entry, tuple[Wait, ...]]]:
    if sm.produced < len(sm.entries):
        yield sm.entries[sm.produced], sm.entries[sm.produced].load_waits
    if sm.consumed < sm.produced:
        yield sm.entries[sm.consumed], sm.entries[sm.consumed].run_waits


def _decode(record: np.void) -> _Entry:
    return _Entry(
        task=int(record["task"]),
        operands=Operands.decode(record),
        load_waits=tuple(read_waits(record, "load")),
        run_waits=tuple(read_waits(record, "run")),
        early=int(record["early"]),
        arrive=int(record["arrive"]),
    )
