"""A whole search: bucket after bucket, and the plan that comes of it.

Owns what buckets share: processes, and choices that change rounding, settled over all buckets before any is searched in
full. Refuses to propose or to score. Called by the `tuner` command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from megakernel.build import build_step
from megakernel.config import ConfigError, canonical_json, digest
from megakernel.plan import Plan, PlanEntry, Provenance, Score, lowering_digest
from megakernel.tiling import Rounding
from megakernel.workload import Bucket, Workload
from simulator.bounds import bounds
from tuner.evaluate import Evaluator, SimulatorEvaluator
from tuner.finals import Finals, Stadium, contenders, hold_finals
from tuner.journal import BucketJournal, Journal
from tuner.measure import MeasurerFor
from tuner.outcome import Rung, Scored
from tuner.problem import Problem
from tuner.queue import RemoteWorkers
from tuner.race import Standing
from tuner.request import request_toml
from tuner.rounding import common, settle
from tuner.search_config import Budget, SearchConfig
from tuner.space import Space
from tuner.study import BucketStudy, Course, Ended, Progress, Raced
from tuner.workers import NotedWorkers, Workers

LOSERS = 4
"""Searched candidates that a plan keeps beside the baselines."""


@dataclass(frozen=True)
class BucketResult:
    """One bucket's race: `floor_ns` is what no choices can beat, whatever the plan."""

    bucket: Bucket
    baselines: tuple[Standing, ...]
    raced: Raced
    floor_ns: float
    finals: Finals | None = None

    @property
    def best(self) -> Standing:
        """The winner: on the card, if that was asked and could say."""
        if self.finals is not None and self.finals.winner is not None:
            return self.finals.winner
        return self.raced.standings[0]


Watch = Callable[[int, Progress], None]
"""Told the bucket's number and where its search stands."""

EvaluatorFor = Callable[[Problem, Bucket], Evaluator]


def simulator_evaluator(problem: Problem, bucket: Bucket) -> Evaluator:
    """The evaluator that asks the simulator, every row at the bucket's nominal context."""
    config = problem.config
    return SimulatorEvaluator(
        model=problem.model,
        bucket=bucket,
        chip=problem.chip,
        workload=Workload.nominal(bucket).model_copy(update={"routing": config.routing}),
        seed=config.proposals.seed,
        draws=config.ladder.draws,
    )


def search(
    problem: Problem,
    watch: Watch,
    evaluator_for: EvaluatorFor = simulator_evaluator,
    journal: Journal | None = None,
    measurer_for: MeasurerFor = lambda _: None,
    remote: RemoteWorkers | None = None,
) -> tuple[BucketResult, ...]:
    """Search every bucket, from where `journal` ends; an interrupt or a lost worker leaves the buckets with a result.

    Candidates are scored in processes of this machine, or by `remote` workers. The last result says why there is no
    more. KeyboardInterrupt or BrokenExecutor when there is none yet.
    """
    with remote or Workers(problem.config.proposals.jobs) as workers:
        whole = _Search(problem, workers, watch, evaluator_for, journal or Journal.in_memory(), measurer_for)
        if len(problem.config.buckets) == 1:
            return whole.buckets(None)
        settled = whole.settled_rounding()
        results = whole.buckets(settled)
        try:
            for each in problem.baselines:
                own = each.choices.rounding
                if own != settled and whole.lose_against(results, own):
                    again = whole.buckets(own)
                    return again if len(again) == len(results) else _cut_short(results, again[-1].raced.ended)
        except (KeyboardInterrupt, BrokenExecutor) as error:
            return _cut_short(results, _ended_by(error))
        return results


def plan_of(problem: Problem, results: tuple[BucketResult, ...], command: str) -> Plan:
    """The plan of the winners; `command` is what the user typed."""
    config = problem.config
    return Plan(
        model=problem.model,
        model_digest=digest(problem.model),
        hardware=problem.chip,
        hardware_digest=digest(problem.chip),
        code_digest=lowering_digest(),
        entries=tuple(_entry(problem, result) for result in results),
        provenance=Provenance(
            command=command,
            search=canonical_json(config),
            seed=config.proposals.seed,
            candidates=sum(len(result.raced.attempts) for result in results),
            routing=config.routing,
            draws=config.ladder.draws,
            measured_on=next((each.finals.card for each in results if each.finals), ""),
        ),
    )


def contest_toml(problem: Problem, result: BucketResult, folder: Path) -> str:
    """A measurement file, to lie in `folder`, of those whom a card should be asked about."""
    racing = contenders(result.raced.standings, result.baselines, problem.config.ladder.measured)
    return request_toml(problem, result.bucket, {each.name: each.choices for each in racing}, folder)


def study_name(idx: int, bucket: Bucket, rounding: Rounding | None) -> str:
    """Name of a bucket's study; several buckets are searched for one rounding."""
    settled = "" if rounding is None else f", rounding {digest(rounding).removeprefix('sha256:')[:8]}"
    return f"bucket {idx + 1}: {bucket.rows} x {bucket.max_context_tokens}{settled}"


class _Search:
    """What the searches of all buckets share."""

    def __init__(
        self,
        problem: Problem,
        workers: Workers | RemoteWorkers,
        watch: Watch,
        evaluator_for: EvaluatorFor,
        journal: Journal,
        measurer_for: MeasurerFor,
    ) -> None:
        self._problem, self._workers, self._watch = problem, workers, watch
        self._evaluator_for, self._measurer_for, self._journal = evaluator_for, measurer_for, journal

    def settled_rounding(self) -> Rounding:
        """The rounding that suits all buckets best; where a card has timed one, that of the fastest on record."""
        problem = self._problem
        for bucket in problem.config.buckets:
            fastest = problem.fastest_on_record(bucket)
            if fastest is not None:
                return fastest.rounding
        spaces = [Space(problem.model, each, problem.chip, problem.config.space) for each in problem.config.buckets]
        shared = common([each.roundings for each in spaces])
        if not shared:
            raise ConfigError(f"{problem.source}: no rounding of [space.rounding] is legal in every bucket")
        return settle(shared, len(spaces), problem.config.proposals.heat_trials, self._heat)

    def buckets(self, rounding: Rounding | None) -> tuple[BucketResult, ...]:
        """Results of as many buckets as the search came to."""
        results: list[BucketResult] = []
        for idx in range(len(self._problem.config.buckets)):
            try:
                results.append(self._bucket(idx, rounding))
            except (KeyboardInterrupt, BrokenExecutor) as error:
                if not results:
                    raise
                return _cut_short(results, _ended_by(error))
            if results[-1].raced.ended is not Ended.COMPLETE:
                break
        return tuple(results)

    def lose_against(self, results: Sequence[BucketResult], own: Rounding) -> bool:
        """Whether a plan that always races, in its own rounding, beats some bucket's result, once all are complete."""
        if results[-1].raced.ended is not Ended.COMPLETE:
            return False
        for idx, result in enumerate(results):
            if result.finals is not None:
                continue
            workers = self._noted(idx, self._study(idx, result.best.choices.rounding))
            bucket = self._problem.config.buckets[idx]
            racing = [each.choices for each in self._problem.racing(bucket) if each.choices.rounding == own]
            for outcome in workers.evaluate(racing, Rung.ALL_LAYERS):
                if isinstance(outcome, Scored) and outcome.expected_ns < result.best.score.expected_ns:
                    return True
        return False

    def _heat(self, rounding: Rounding, idx: int, trials: int) -> float:
        whole = self._problem.config
        most = trials if whole.budget.trials is None else min(trials, whole.budget.trials)
        config = whole.model_copy(update={"budget": Budget(trials=most)})
        course, study = self._course(idx, rounding, config), self._study(idx, rounding)
        heat = BucketStudy(course, self._noted(idx, study), study, lambda progress: self._watch(idx, progress))
        return heat.heat() / course.floor_ns

    def _bucket(self, idx: int, rounding: Rounding | None) -> BucketResult:
        config, bucket = self._problem.config, self._problem.config.buckets[idx]
        course, study = self._course(idx, rounding, config), self._study(idx, rounding)
        workers = self._noted(idx, study)
        raced = BucketStudy(course, workers, study, lambda progress: self._watch(idx, progress)).run()
        by_choices = {each.choices: each for each in raced.standings}
        racing = course.baselines
        baselines = tuple(Standing(each.name, each.choices, by_choices[each.choices].score) for each in racing)
        measurer = self._measurer_for(bucket)
        finals = None
        if measurer is not None and raced.ended is Ended.COMPLETE:
            how = config.ladder.measured
            try:
                finals = hold_finals(raced.standings, baselines, how, Stadium(measurer, how, study))
            except KeyboardInterrupt:  # predictions are there, and decide
                raced = replace(raced, ended=Ended.INTERRUPTED)
        return BucketResult(bucket, baselines, raced, course.floor_ns, finals)

    def _course(self, idx: int, rounding: Rounding | None, config: SearchConfig) -> Course:
        problem, bucket = self._problem, config.buckets[idx]
        workload = Workload.nominal(bucket).model_copy(update={"routing": config.routing})
        return Course(
            Space(problem.model, bucket, problem.chip, config.space, rounding),
            problem.racing(bucket, rounding),
            config,
            bounds(problem.model, problem.chip, workload).lower_ns,
        )

    def _study(self, idx: int, rounding: Rounding | None) -> BucketJournal:
        return self._journal.bucket(study_name(idx, self._problem.config.buckets[idx], rounding))

    def _noted(self, idx: int, study: BucketJournal) -> NotedWorkers:
        evaluator = self._evaluator_for(self._problem, self._problem.config.buckets[idx])
        return NotedWorkers(self._workers, evaluator, study)


def _cut_short(results: Sequence[BucketResult], ended: Ended) -> tuple[BucketResult, ...]:
    """Results after which a search ended."""
    *earlier, last = results
    return (*earlier, replace(last, raced=replace(last.raced, ended=ended)))


def _ended_by(error: BaseException) -> Ended:
    return Ended.WORKER_LOST if isinstance(error, BrokenExecutor) else Ended.INTERRUPTED


def _entry(problem: Problem, result: BucketResult) -> PlanEntry:
    best = result.best
    step = build_step(problem.model, result.bucket, best.choices, problem.chip)
    kept = {each.choices: each for each in (*result.baselines, *result.raced.standings[1 : LOSERS + 1])}
    losers = sorted((each for each in kept.values() if each.choices != best.choices), key=lambda e: e.score.expected_ns)
    measured = {} if result.finals is None else result.finals.measured_ns
    return PlanEntry(
        bucket=result.bucket,
        choices=best.choices,
        table_digest=step.table.digest,
        predicted_ns=best.score.expected_ns,
        p95_ns=best.score.p95_ns,
        bound_ns=best.score.bound_ns,
        floor_ns=result.floor_ns,
        measured_ns=measured.get(best.choices),
        losers=tuple(
            Score(
                name=e.name,
                predicted_ns=e.score.expected_ns,
                choices=e.choices,
                measured_ns=measured.get(e.choices),
            )
            for e in losers
        ),
    )
