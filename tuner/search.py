"""A whole search: bucket after bucket, and the plan that comes of it.

Owns what buckets share: choices that change rounding are settled by the first bucket, for all. Refuses to propose or to
score. Called by the `tuner` command.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass, replace

from megakernel.build import build_step
from megakernel.config import canonical_json, digest
from megakernel.plan import Plan, PlanEntry, Provenance, Score, lowering_digest
from megakernel.tiling import Rounding
from megakernel.workload import Bucket, Workload
from simulator.bounds import bounds
from tuner.evaluate import Evaluator, SimulatorEvaluator
from tuner.journal import Journal
from tuner.problem import Baseline, Problem
from tuner.race import Standing
from tuner.space import Space
from tuner.study import BucketStudy, Ended, Progress, Raced
from tuner.workers import Workers

LOSERS = 4
"""Searched candidates that a plan keeps beside the baselines."""


@dataclass(frozen=True)
class BucketResult:
    """One bucket's race: `floor_ns` is what no choices can beat, whatever the plan."""

    bucket: Bucket
    baselines: tuple[Standing, ...]
    raced: Raced
    floor_ns: float

    @property
    def best(self) -> Standing:
        """The winner."""
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
) -> tuple[BucketResult, ...]:
    """Search every bucket, from where `journal` ends; an interrupt or a lost worker leaves the buckets with a result.

    The last result says why there is no more. KeyboardInterrupt or BrokenExecutor when there is none yet.
    """
    results: list[BucketResult] = []
    kept = journal or Journal.in_memory()
    for idx in range(len(problem.config.buckets)):
        rounding = results[0].best.choices.rounding if results else None
        try:
            results.append(_search_bucket(problem, idx, rounding, watch, evaluator_for, kept))
        except (KeyboardInterrupt, BrokenExecutor) as error:
            if not results:
                raise
            ended = Ended.WORKER_LOST if isinstance(error, BrokenExecutor) else Ended.INTERRUPTED
            results[-1] = replace(results[-1], raced=replace(results[-1].raced, ended=ended))
        if results[-1].raced.ended is not Ended.COMPLETE:
            break
    return tuple(results)


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
        ),
    )


def study_name(idx: int, bucket: Bucket, rounding: Rounding | None) -> str:
    """Name of a bucket's study; buckets after the first are searched for one rounding."""
    settled = "" if rounding is None else f", rounding {digest(rounding).removeprefix('sha256:')[:8]}"
    return f"bucket {idx + 1}: {bucket.rows} x {bucket.max_context_tokens}{settled}"


def _search_bucket(
    problem: Problem, idx: int, rounding: Rounding | None, watch: Watch, evaluator_for: EvaluatorFor, journal: Journal
) -> BucketResult:
    config, bucket = problem.config, problem.config.buckets[idx]
    racing = tuple(_with_rounding(each, rounding) for each in problem.baselines)
    space = Space(problem.model, bucket, problem.chip, config.space, rounding)
    evaluator = evaluator_for(problem, bucket)
    study = journal.bucket(study_name(idx, bucket, rounding))
    with Workers(evaluator, config.proposals.jobs) as workers:
        raced = BucketStudy(space, racing, config, workers, study, lambda progress: watch(idx, progress)).run()
    by_choices = {each.choices: each for each in raced.standings}
    baselines = tuple(Standing(each.name, each.choices, by_choices[each.choices].score) for each in racing)
    workload = Workload.nominal(bucket).model_copy(update={"routing": config.routing})
    floor = bounds(problem.model, problem.chip, workload)
    return BucketResult(bucket, baselines, raced, floor.lower_ns)


def _with_rounding(baseline: Baseline, rounding: Rounding | None) -> Baseline:
    if rounding is None:
        return baseline
    return Baseline(baseline.name, baseline.choices.model_copy(update={"rounding": rounding}))


def _entry(problem: Problem, result: BucketResult) -> PlanEntry:
    best = result.best
    step = build_step(problem.model, result.bucket, best.choices, problem.chip)
    kept = {each.choices: each for each in (*result.baselines, *result.raced.standings[1 : LOSERS + 1])}
    losers = sorted((each for each in kept.values() if each.choices != best.choices), key=lambda e: e.score.expected_ns)
    return PlanEntry(
        bucket=result.bucket,
        choices=best.choices,
        table_digest=step.table.digest,
        predicted_ns=best.score.expected_ns,
        bound_ns=best.score.bound_ns,
        losers=tuple(Score(name=e.name, predicted_ns=e.score.expected_ns, choices=e.choices) for e in losers),
    )
