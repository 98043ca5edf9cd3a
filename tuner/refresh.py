"""Brings a stale plan up to date: the same choices, lowered, verified and scored by the code as it is now.

Owns what may change in a refresh: digests and predicted times, never a choice. Called by `tuner refresh`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megakernel.build import build_step
from megakernel.config import ConfigError
from megakernel.plan import Plan, PlanEntry, Score, lowering_digest
from megakernel.workload import Workload
from simulator.bounds import bounds
from tuner.evaluate import Evaluator, SimulatorEvaluator
from tuner.outcome import Illegal, Refused, Rung, Scored


@dataclass(frozen=True)
class EntryChange:
    """What a refresh did to one entry; `dropped` names losers that can't run any more."""

    before: PlanEntry
    after: PlanEntry
    dropped: tuple[str, ...]

    @property
    def faster_losers(self) -> tuple[Score, ...]:
        """Losers that are now predicted to be faster than the choices of the plan: reasons to search again.

        Where a card has timed those, no prediction is.
        """
        predicted_ns = self.after.predicted_ns
        assert predicted_ns is not None
        if self.after.measured_ns is not None:
            return ()
        return tuple(each for each in self.after.losers if each.predicted_ns < predicted_ns)


@dataclass(frozen=True)
class Refreshed:
    """The plan as it is now, and what changed."""

    plan: Plan
    changes: tuple[EntryChange, ...]


EvaluatorFor = Callable[[Plan, PlanEntry], Evaluator]
Watch = Callable[[str], None]
"""Told the name of what is scored next."""


def simulator_evaluator(plan: Plan, entry: PlanEntry) -> Evaluator:
    """The evaluator that asks the simulator, under the routing that the plan was searched for."""
    how = plan.provenance
    workload = Workload.nominal(entry.bucket).model_copy(update={"routing": how.routing})
    return SimulatorEvaluator(plan.model, entry.bucket, plan.hardware, workload, how.seed, how.draws)


def refresh(plan: Plan, watch: Watch, evaluator_for: EvaluatorFor = simulator_evaluator) -> Refreshed:
    """Lower, verify and score all of `plan` again; ConfigError when its choices can't run any more."""
    changes = tuple(_refresh_entry(plan, entry, watch, evaluator_for(plan, entry)) for entry in plan.entries)
    entries = tuple(change.after for change in changes)
    return Refreshed(plan.model_copy(update={"entries": entries, "code_digest": lowering_digest()}), changes)


def _refresh_entry(plan: Plan, entry: PlanEntry, watch: Watch, evaluator: Evaluator) -> EntryChange:
    bucket = f"{entry.bucket.rows} x {entry.bucket.max_context_tokens}"
    watch(f"bucket {bucket}: the plan's choices")
    score = evaluator.evaluate(entry.choices, Rung.ALL_LAYERS)
    match score:
        case Illegal(faults) | Refused(faults):
            listed = "".join(f"\n  {fault}" for fault in faults)
            raise ConfigError(f"bucket {bucket}: these choices can't run any more, search again:{listed}")
        case Scored():
            pass
    losers: list[Score] = []
    for loser in entry.losers:
        watch(f"bucket {bucket}: {loser.name}")
        losers += _rescored(loser, evaluator)
    losers.sort(key=lambda each: each.predicted_ns)
    table_digest = build_step(plan.model, entry.bucket, entry.choices, plan.hardware).table.digest
    workload = Workload.nominal(entry.bucket).model_copy(update={"routing": plan.provenance.routing})
    after = PlanEntry(
        bucket=entry.bucket,
        choices=entry.choices,
        table_digest=table_digest,
        predicted_ns=score.expected_ns,
        p95_ns=score.p95_ns,
        bound_ns=score.bound_ns,
        floor_ns=bounds(plan.model, plan.hardware, workload).lower_ns,
        measured_ns=entry.measured_ns if table_digest == entry.table_digest else None,
        losers=tuple(losers),
    )
    kept = {each.name for each in losers}
    return EntryChange(entry, after, tuple(each.name for each in entry.losers if each.name not in kept))


def _rescored(loser: Score, evaluator: Evaluator) -> list[Score]:
    """The loser with its time as it is now, or nothing when it can't run any more.

    A loser's table has no digest. One that is predicted as before is the one that a card has timed; what another is, a
    card hasn't said.
    """
    outcome = evaluator.evaluate(loser.choices, Rung.ALL_LAYERS)
    if not isinstance(outcome, Scored):
        return []
    predicted_ns = outcome.expected_ns
    measured_ns = loser.measured_ns if predicted_ns == loser.predicted_ns else None
    return [Score(name=loser.name, predicted_ns=predicted_ns, choices=loser.choices, measured_ns=measured_ns)]
