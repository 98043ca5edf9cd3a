"""The search of one bucket: Optuna proposes, the race answers, until the budget is spent.

Owns the loop of ask and tell. Candidates are asked in batches and told in batches, in the order in which they were
asked, so that seed and number of trials alone decide the result. The study lives in memory: it is cheaper to search
again than to keep. Called by `search.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from time import monotonic

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.trial import Trial, TrialState

from tuner.neighbours import Neighbours
from tuner.outcome import Outcome, Rung, Scored, few_layers_ns
from tuner.problem import Baseline
from tuner.race import Race, Standing
from tuner.search_config import Proposals, SearchConfig
from tuner.space import Space
from tuner.workers import Workers


@dataclass(frozen=True)
class Attempt:
    """A proposed candidate: its few-layer time, None when it did not get that far."""

    trial: int
    few_layers_ns: float | None


@dataclass(frozen=True)
class Progress:
    """Where a bucket's search stands; `phase` is `baselines`, `search` or `finals`."""

    phase: str
    elapsed_s: float
    num_trials: int
    counts: Counter[str]
    standings: tuple[Standing, ...]


@dataclass(frozen=True)
class Raced:
    """What a bucket's search came to: everybody scored on all layers, best first, and the way there."""

    standings: tuple[Standing, ...]
    counts: Counter[str]
    attempts: tuple[Attempt, ...]
    elapsed_s: float
    is_interrupted: bool


Watch = Callable[[Progress], None]


class BucketStudy:
    """One search; `run` may be called once."""

    def __init__(
        self, space: Space, baselines: tuple[Baseline, ...], config: SearchConfig, workers: Workers, watch: Watch
    ) -> None:
        """Take what the search needs; nothing is proposed or scored yet."""
        self._space, self._baselines, self._config, self._watch = space, baselines, config, watch
        self._race = Race(workers)
        self._neighbours = Neighbours(space, config.proposals.seed)
        self._distributions = _distributions(space)
        self._attempts: list[Attempt] = []
        self._started_s = monotonic()

    def run(self) -> Raced:
        """Search; an interrupt after the baselines are scored ends it early with what there is."""
        self._report("baselines")
        self._race.enter_baselines(self._baselines)
        is_interrupted = False
        try:
            self._propose()
            self._report("finals")
            self._race.enter_finals(self._config.ladder.finalists)
        except (KeyboardInterrupt, BrokenExecutor):  # a lost worker costs the rest of the search, not its result
            is_interrupted = True
        race = self._race
        return Raced(race.standings, race.counts, tuple(self._attempts), self._elapsed_s, is_interrupted)

    @property
    def _elapsed_s(self) -> float:
        return monotonic() - self._started_s

    def _propose(self) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)  # the command shows progress of its own
        study = optuna.create_study(sampler=_sampler(self._config.proposals))
        for baseline in self._baselines:
            study.enqueue_trial(self._params(baseline))
        took_s = 0.0
        while batch := self._next_batch(took_s):
            began_s = self._elapsed_s
            trials = [self._ask(study) for _ in range(batch)]
            named = {f"candidate {trial.number}": self._space.choices(trial.params) for trial in trials}
            for trial, outcome in zip(trials, self._race.enter(named), strict=True):
                _tell(study, trial, outcome)
                ns = few_layers_ns(outcome)
                if ns is not None:
                    self._neighbours.learn(ns, trial.params)
                self._attempts.append(Attempt(trial.number, ns))
            took_s = self._elapsed_s - began_s
            self._report("search")

    def _ask(self, study: optuna.Study) -> Trial:
        if self._neighbours.wants(self._config.proposals.step_percent):
            study.enqueue_trial(self._neighbours.step(self._race.knows))
        return study.ask(self._distributions)

    def _params(self, baseline: Baseline) -> dict[str, int]:
        point = self._space.nearest(baseline.choices)
        return {name: point[name] for name in self._distributions}

    def _next_batch(self, took_s: float) -> int:
        """How many candidates to propose next: none if that (last: `took_s`) and the finals would take too long."""
        budget, batch = self._config.budget, self._config.proposals.batch
        needed_s = took_s + self._race.finals_s(self._config.ladder.finalists)
        if budget.seconds is not None and self._elapsed_s + needed_s > budget.seconds:
            return 0
        return batch if budget.trials is None else min(batch, budget.trials - len(self._attempts))

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


def _sampler(proposals: Proposals) -> BaseSampler:
    match proposals.sampler:
        case "tpe":
            return TPESampler(seed=proposals.seed, n_startup_trials=proposals.startup_trials)
        case "random":
            return RandomSampler(seed=proposals.seed)


def _tell(study: optuna.Study, trial: Trial, outcome: Outcome) -> None:
    """A bound is no time: such a trial counts as pruned, which ranks it behind all that were scored."""
    match outcome:
        case Scored(rung=Rung.BOUND):
            trial.report(outcome.expected_ns, step=0)
            study.tell(trial, state=TrialState.PRUNED)
        case Scored():
            study.tell(trial, outcome.expected_ns)
        case _:
            study.tell(trial, state=TrialState.FAIL)
