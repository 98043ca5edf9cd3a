"""Scores choices: the protocol that a search asks, and the evaluator that asks the simulator.

Owns what each rung of the ladder costs and checks: limits at every rung, closed forms at the first, a few layers at the
second, the whole step, verified, at the last. Refuses to decide who climbs; that is the race's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megakernel import limits
from megakernel.build import build_step
from megakernel.hardware import HardwareSpec
from megakernel.model import ModelSpec
from megakernel.tiling import Choices
from megakernel.verify import verify
from megakernel.workload import Bucket, Workload
from simulator.bounds import bounds
from simulator.estimate import estimate_step_ns
from simulator.predict import predict
from tuner.outcome import Illegal, Outcome, Refused, Rung, Scored


class Evaluator(Protocol):
    """Gives every choice an outcome at every rung.

    Equal choices get equal outcomes, whatever was asked before; an outcome is never an exception, as long as the
    choices are well formed. An evaluator is pickled when several processes share the work.
    """

    def evaluate(self, choices: Choices, rung: Rung) -> Outcome:
        """Score `choices` at `rung`."""
        ...


@dataclass(frozen=True)
class SimulatorEvaluator:
    """Predicts the step time of one bucket of one model on one chip; `draws` routings from `seed` at the last rung."""

    model: ModelSpec
    bucket: Bucket
    chip: HardwareSpec
    workload: Workload
    seed: int
    draws: int

    def evaluate(self, choices: Choices, rung: Rung) -> Outcome:
        """Score `choices` at `rung`; what can't run is not scored at any."""
        found = limits.reasons(self.model, self.bucket, choices, self.chip)
        if found:
            return Illegal(tuple(found))
        if rung is Rung.ALL_LAYERS:
            return self._all_layers(choices)
        bound = bounds(self.model, self.chip, self.workload, choices)
        ns = bound.lower_ns
        if rung is Rung.FEW_LAYERS:
            ns = estimate_step_ns(self.model, self.bucket, choices, self.chip, self.workload)
        return Scored(rung, ns, ns, bound.lower_ns, bound.roofline_ns)

    def _all_layers(self, choices: Choices) -> Outcome:
        step = build_step(self.model, self.bucket, choices, self.chip)
        findings = verify(step.graph, step.table)
        if findings:
            return Refused(tuple(str(finding) for finding in findings))
        found = predict(step, self.chip, self.workload, draws=self.draws, seed=self.seed)
        return Scored(Rung.ALL_LAYERS, found.total_ns, found.p95_ns, found.bounds.lower_ns, found.roofline_ns)
