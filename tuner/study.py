"""The search of one bucket: Optuna proposes, the race answers, until the budget is spent.

Owns the loop of ask and tell. Candidates are asked in batches and told in batches, in the order in which they were
asked, and every ask is seeded by its number, so that seed and number of trials alone decide the result, however often
the search was ended and taken up again. Proposals come from a study in memory; the journal keeps the same trials, each
written whole. Called by `search.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from random import Random
from time import monotonic

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import InMemoryStorage
from optuna.trial import Trial, TrialState, create_trial

from tuner.journal import BATCH, BucketJournal, tell
from tuner.neighbours import Neighbours
from tuner.problem import Baseline
from tuner.race import Race, Standing
from tuner.search_config import Proposals, SearchConfig
from tuner.space import Point, Space
from tuner.workers import NotedWorkers


@dataclass(frozen=True)
class Attempt:
    """A proposed candidate: its time as screened, None when it did not get that far."""

    trial: int
    screened_ns: float | None


@dataclass(frozen=True)
class Course:
    """What a bucket's search runs on: `floor_ns` is what no choices can beat.

    A comparison of ways to search gives each a sampler by seed, and a clock of its own.
    """

    space: Space
    baselines: tuple[Baseline, ...]
    config: SearchConfig
    floor_ns: float
    sampler_for: Callable[[Proposals, int], BaseSampler] | None = None
    clock: Callable[[], float] = monotonic


@dataclass(frozen=True)
class Progress:
    """Where a bucket's search stands; `phase` is `heats`, `baselines`, `search` or `finals`."""

    phase: str
    elapsed_s: float
    num_trials: int
    counts: Counter[str]
    standings: tuple[Standing, ...]


class Ended(Enum):
    """Why a search ended."""

    COMPLETE = "complete"
    INTERRUPTED = "interrupted"
    WORKER_LOST = "a worker was lost"


@dataclass(frozen=True)
class Raced:
    """What a bucket's search came to: everybody scored on all layers, best first, and the way there."""

    standings: tuple[Standing, ...]
    counts: Counter[str]
    attempts: tuple[Attempt, ...]
    elapsed_s: float
    ended: Ended = Ended.COMPLETE


@dataclass(frozen=True)
class _Asked:
    """A candidate in its trial; `is_told` where an earlier run ended it."""

    number: int
    point: Point
    is_told: bool = False


Watch = Callable[[Progress], None]


class BucketStudy:
    """One search; `run` or `heat` may be called once."""

    def __init__(self, course: Course, workers: NotedWorkers, journal: BucketJournal, watch: Watch) -> None:
        """Take what the search needs; nothing is proposed or scored yet."""
        self._space, self._baselines, self._config = course.space, course.baselines, course.config
        self._floor_ns, self._watch = course.floor_ns, watch
        self._journal, self._known = journal, journal.trials
        self._race = Race(workers, course.config.ladder, course.clock)
        self._neighbours = Neighbours(course.space)
        self._distributions = _distributions(course.space)
        self._attempts: list[Attempt] = []
        self._clock, self._sampler_for = course.clock, course.sampler_for or _sampler
        self._started_s = course.clock() - journal.elapsed_s
        self._storage = InMemoryStorage()
        self._study = optuna.create_study(storage=self._storage)

    def run(self) -> Raced:
        """Search; an interrupt or a lost worker after the baselines are scored ends it early with what there is."""
        self._report("baselines")
        self._journal.describe({each.name: each.values for each in self._space.dimensions})
        self._race.enter_baselines(self._baselines)
        ended = Ended.COMPLETE
        try:
            self._propose()
            self._report("finals")
            self._race.enter_finals(self._config.ladder.finalists)
        except KeyboardInterrupt:
            ended = Ended.INTERRUPTED
        except BrokenExecutor:
            ended = Ended.WORKER_LOST
        race = self._race
        return Raced(race.standings, race.counts, tuple(self._attempts), self._elapsed_s, ended)

    def heat(self) -> float:
        """Search without proving anybody, the trials of the budget and no more; the best time as screened, in ns."""
        most = self._config.budget.trials
        assert most is not None
        self._known = tuple(trial for trial in self._known if trial.number < most)
        self._report("heats")
        self._journal.describe({each.name: each.values for each in self._space.dimensions})
        self._race.enter_baselines(self._baselines, prove=False)
        self._propose()
        return self._race.leader_ns

    @property
    def _elapsed_s(self) -> float:
        return self._clock() - self._started_s

    def _propose(self) -> None:
        left: list[_Asked] = []
        for _, batch in groupby(self._known, key=lambda trial: trial.user_attrs[BATCH]):
            trials = list(batch)
            points = [{name: int(idx) for name, idx in trial.params.items()} for trial in trials]
            for trial, point in zip(trials, points, strict=True):
                self._journal.resume(trial, self._space.choices(point))
                self._study.add_trial(
                    create_trial(state=TrialState.RUNNING, params=point, distributions=self._of(point))
                )
            asked = [
                _Asked(trial.number, point, trial.state.is_finished())
                for trial, point in zip(trials, points, strict=True)
            ]
            if any(each.is_told for each in asked):
                self._enter(asked)
            else:  # the last batch: it may have been cut short while it was asked
                left = asked
        took_s = 0.0
        while (size := self._next_batch(took_s)) or left:
            began_s = self._elapsed_s
            first = len(self._attempts)
            for number in range(first + len(left), first + size):
                left.append(_Asked(number, self._ask(number, first)))
            self._enter(left)
            left = []
            took_s = self._elapsed_s - began_s
            self._journal.spent(self._elapsed_s)
            self._report("search")

    def _ask(self, number: int, batch: int) -> Point:
        """Propose candidate `number`: what it is depends on the seed and on all that was told and asked before."""
        seed = Random(f"{self._config.proposals.seed} {number}").getrandbits(32)
        self._neighbours.turn(number, seed)
        self._study.sampler = self._sampler_for(self._config.proposals, seed)
        if number < len(self._baselines):
            self._study.enqueue_trial(self._space.nearest(self._baselines[number].choices))
        elif self._neighbours.wants(self._config.proposals.step_percent):
            self._study.enqueue_trial(self._neighbours.step(self._race.knows))
        point = self._suggested(self._study.ask())
        self._journal.begin(point, self._of(point), batch, self._space.choices(point))
        return point

    def _suggested(self, trial: Trial) -> Point:
        """What the sampler suggests, dimension by dimension: those that don't act beside the others are not drawn."""
        point: Point = {}
        for each in self._space.dimensions:
            if each.name in self._distributions and self._space.acts(each, point):
                last = len(each.values) - 1
                point[each.name] = (
                    trial.suggest_int(each.name, 0, last)
                    if each.is_ordered
                    else trial.suggest_categorical(each.name, range(last + 1))
                )
        return point

    def _of(self, point: Point) -> dict[str, BaseDistribution]:
        return {name: self._distributions[name] for name in point}

    def _enter(self, batch: list[_Asked]) -> None:
        """Let a batch race, and tell both studies what became of it."""
        named = {f"candidate {each.number}": self._space.choices(each.point) for each in batch}
        outcomes = self._race.enter(named)
        for asked, choices, outcome in zip(batch, named.values(), outcomes, strict=True):
            tell(self._study, self._storage, asked.number, outcome)
            if not asked.is_told:
                self._journal.tell(asked.number, choices, outcome)
            ns = self._race.screened_ns(outcome)
            if ns is not None:
                self._neighbours.learn(ns, asked.point)
            self._attempts.append(Attempt(asked.number, ns))

    def _next_batch(self, took_s: float) -> int:
        """How many candidates to propose next: none if that (last: `took_s`) and the finals would take too long."""
        budget, batch = self._config.budget, self._config.proposals.batch
        if self._is_near_enough():
            return 0
        needed_s = took_s + self._race.finals_s(self._config.ladder.finalists)
        if budget.seconds is not None and self._elapsed_s + needed_s > budget.seconds:
            return 0
        return batch if budget.trials is None else max(min(batch, budget.trials - len(self._attempts)), 0)

    def _is_near_enough(self) -> bool:
        """Whether a proven plan is so near the bound of any that the search may stop."""
        within, proven = self._config.budget.within_percent, self._race.standings
        if within is None or not proven:
            return False
        return self._race.rank_ns(proven[0].score) <= self._floor_ns * (1.0 + within / 100.0)

    def _report(self, phase: str) -> None:
        race = self._race
        self._watch(Progress(phase, self._elapsed_s, len(self._attempts), race.counts, race.standings))


def _distributions(space: Space) -> dict[str, BaseDistribution]:
    """What Optuna samples: indices, of those dimensions that leave a choice."""
    return {
        each.name: IntDistribution(0, len(each.values) - 1)
        if each.is_ordered
        else CategoricalDistribution(tuple(range(len(each.values))))
        for each in space.dimensions
        if len(each.values) > 1
    }


def _sampler(proposals: Proposals, seed: int) -> BaseSampler:
    match proposals.sampler:
        case "tpe":
            return TPESampler(seed=seed, n_startup_trials=proposals.startup_trials)
        case "random":
            return RandomSampler(seed=seed)
