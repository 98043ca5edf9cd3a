"""Mutants by the hundred: each is judged by the oracle, then shown to `verify`, and counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from support.mutants import MOSTLY_HARMLESS, OPERATORS
from support.oracle import Oracle
from support.tiny import Step, larger_step, random_step, toy_step

from megakernel.verify import verify

WANTED = 100
"""Mutants proved harmful, per operator."""


@dataclass
class Tally:
    """Mutants of one operator, by what the oracle proved; `missed` and `refused` are verify's mistakes, described.

    `doubted`: mutants without a verdict in which verify finds something.
    """

    operator: str
    harmful: int = 0
    harmless: int = 0
    unknown: int = 0
    doubted: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def visible(self) -> int:
        """Harmful mutants whose harm shows within the steps tried: all but counters that would run away in time."""
        return self.harmful - self.kinds.get("reuse", 0)

    def __str__(self) -> str:
        """One line."""
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items()))
        line = f"{self.operator}: {self.harmful} harmful ({kinds}), {len(self.missed)} of them missed; "
        line += f"{self.harmless} harmless, {len(self.refused)} of them refused"
        return line + (f"; {self.unknown} without a verdict, {self.doubted} of them refused" if self.unknown else "")


@lru_cache(maxsize=512)
def exhaustible(seed: int) -> tuple[Step, Oracle]:
    """A tiny legal step, known to be one, and its judge; one in four is lowered from a model."""
    step = (random_step if seed % 4 else toy_step)(seed)
    oracle = Oracle(step.graph)
    assert oracle.judge(step.table) is None, f"tiny step {seed} is not legal"
    assert verify(step.graph, step.table) == [], f"tiny step {seed} is legal"
    return step, oracle


@lru_cache(maxsize=64)
def larger(seed: int) -> tuple[Step, Oracle]:
    """A step too large to exhaust, and its judge."""
    step = larger_step(seed)
    assert verify(step.graph, step.table) == [], f"larger step {seed} is legal"
    return step, Oracle(step.graph)


def exhaust(operator: str, wanted: int = WANTED, most: int = 4000) -> Tally:
    """Try mutants until `wanted` are proved harmful and twice as many judged, or a few times as many judged."""
    tally = Tally(operator)
    enough = (2 if operator in MOSTLY_HARMLESS else 4) * wanted
    for seed, step, oracle in _steps(exhaustible, most):
        judged = tally.harmful + tally.harmless
        if judged >= enough or (judged >= 2 * wanted and tally.visible >= wanted):
            break
        table = OPERATORS[operator](step.table, _source(operator, seed))
        if table is None:
            continue
        harm, findings = oracle.judge(table), verify(step.graph, table)
        if harm is None:
            tally.harmless += 1
            if findings:
                tally.refused.append(f"step {seed}: {findings[0]}")
            continue
        tally.harmful += 1
        tally.kinds[harm.kind] = tally.kinds.get(harm.kind, 0) + 1
        if not findings:
            tally.missed.append(f"step {seed}: {harm}")
    return tally


def fuzz(operator: str, mutants: int, schedules: int) -> Tally:
    """Try mutants of larger steps under random schedules; where nothing goes wrong there is no verdict."""
    tally = Tally(operator)
    for seed, step, oracle in _steps(larger, mutants):
        table = OPERATORS[operator](step.table, _source(operator, seed))
        if table is None:
            continue
        harm, findings = oracle.fuzz(table, range(schedules)), verify(step.graph, table)
        if harm is None:
            tally.unknown += 1
            tally.doubted += bool(findings)
            continue
        tally.harmful += 1
        tally.kinds[harm.kind] = tally.kinds.get(harm.kind, 0) + 1
        if not findings:
            tally.missed.append(f"step {seed}: {harm}")
    return tally


def _steps(source, count: int) -> Iterator[tuple[int, Step, Oracle]]:
    for seed in range(count):
        yield (seed, *source(seed))


def _source(operator: str, seed: int) -> random.Random:
    return random.Random(f"{operator} {seed}")
