"""Searches that are compared at equal budgets of one core's seconds, on a machine that others use too.

The clock counts the processor's seconds of this process. What was scored once, by whichever search, is not scored
again: its recorded price is put on the clock instead, so that a comparison can be interrupted and goes on where it was.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import process_time

from megakernel.config import digest
from megakernel.hardware import HardwareSpec
from megakernel.model import ModelSpec
from megakernel.tiling import Choices
from megakernel.workload import Bucket, Workload
from simulator.bounds import bounds
from tuner.evaluate import SimulatorEvaluator
from tuner.journal import OUTCOME, Journal, code_digest
from tuner.outcome import Outcome, Rung
from tuner.problem import Problem, load_problem
from tuner.search_config import SearchConfig
from tuner.space import Space
from tuner.study import BucketStudy, Course
from tuner.workers import NotedWorkers, Workers


class Cache:
    """Outcomes and their prices in a file of lines; those of other code are left alone."""

    def __init__(self, path: Path) -> None:
        """Read what is there."""
        self._path, self._code = path, code_digest("megakernel", "simulator")
        self._known: dict[str, tuple[float, Outcome]] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            entry = json.loads(line)
            self._known[entry["key"]] = entry["cpu_s"], OUTCOME.validate_python(entry["outcome"])

    @classmethod
    def of(cls, folder: Path, *what: object) -> Cache:
        """The file of one search among others in `folder`, so that no two processes write to one."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder / f"{digest(what).removeprefix('sha256:')[:16]}.jsonl")

    def get(self, key: str) -> tuple[float, Outcome] | None:
        """Price and outcome."""
        return self._known.get(key)

    def put(self, key: str, cpu_s: float, outcome: Outcome) -> None:
        """Note them, at once."""
        self._known[key] = cpu_s, outcome
        line = {"key": key, "cpu_s": cpu_s, "outcome": OUTCOME.dump_python(outcome, mode="json")}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def key(self, *what: object) -> str:
        """A key of this code."""
        return digest([self._code, *what])


@dataclass
class Metered:
    """A simulator's evaluator with a clock."""

    evaluator: SimulatorEvaluator
    cache: Cache
    credit_s: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)

    def clock(self) -> float:
        """Processor seconds, those of remembered scores included."""
        return process_time() + self.credit_s

    def evaluate(self, choices: Choices, rung: Rung) -> Outcome:
        """Score, or remember."""
        if rung is Rung.BOUND:
            return self.evaluator.evaluate(choices, rung)
        asked = self.evaluator
        key = self.cache.key(asked.model, asked.bucket, asked.chip, asked.workload, asked.draws, int(rung), choices)
        known = self.cache.get(key)
        if known is not None:
            self.credit_s += known[0]
            return known[1]
        began_s = process_time()
        outcome = self.evaluator.evaluate(choices, rung)
        self.cache.put(key, process_time() - began_s, outcome)
        return outcome


def metered(model: ModelSpec, bucket: Bucket, chip: HardwareSpec, cache: Cache, *, draws: int = 3) -> Metered:
    """The simulator on one bucket, every row at its nominal length."""
    return Metered(SimulatorEvaluator(model, bucket, chip, Workload.nominal(bucket), 0, draws), cache)


def study_of(
    problem: Problem, config: SearchConfig, meter: Metered, *, frozen: tuple[str, ...] = (), **course: object
) -> BucketStudy:
    """A search of the problem's first bucket on that clock, in this process.

    Choices whose names begin with one of `frozen` stay as the hand plan has them.
    """
    bucket = config.buckets[0]
    journal = Journal.in_memory().bucket("compared")
    floor_ns = bounds(problem.model, problem.chip, Workload.nominal(bucket)).lower_ns
    space = Space(problem.model, bucket, problem.chip, config.space)
    racing = problem.racing(bucket)
    freeze(space, racing[0].choices, frozen)
    whole = Course(space, racing, config, floor_ns, clock=meter.clock, **course)
    return BucketStudy(whole, NotedWorkers(Workers(1), meter, journal), journal, lambda _: None)


def freeze(space: Space, choices: Choices, prefixes: tuple[str, ...]) -> None:
    """Leave those dimensions of a space one value, the one that means `choices`."""
    at = space.nearest(choices)
    for name, dimension in space._by_name.items():
        if name.startswith(prefixes) and prefixes:
            space._by_name[name] = replace(dimension, values=(dimension.values[at.get(name, 0)],))


def from_scratch(name: str, *overrides: str) -> Problem:
    """A shipped search with keys set, told nothing of what a card has timed: only hand and reference plans race."""
    untold = ("baselines.also=[]", "ladder.measured.records=[]")
    return load_problem(f"configs/search/{name}.toml", (*untold, *overrides))
