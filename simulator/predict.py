"""Predicts what a step costs: expected and p95 time over routings, and what it is made of.

Owns the way from a built step, or from choices, to a `Prediction`. Refuses to search, to read files or to print. Called
by the `simulator` command and by the tuner.
"""

from __future__ import annotations

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.build import BuiltStep, assemble
from megakernel.config import ConfigError
from megakernel.cost import LiveState
from megakernel.hardware import HardwareSpec
from megakernel.model import ModelSpec
from megakernel.tiling import Choices
from megakernel.workload import Bucket, Workload
from simulator.bounds import bounds
from simulator.breakdown import Breakdown, blend, break_down
from simulator.few_layers import runs, truncated
from simulator.prediction import Prediction
from simulator.routing import draw_states, mean_state, upper_quantile
from simulator.step_run import run_step

__all__ = ["Prediction", "predict", "predict_few_layers"]


def predict(  # noqa: PLR0913
    step: BuiltStep,
    chip: HardwareSpec,
    workload: Workload,
    *,
    draws: int = 1,
    seed: int = 0,
    layers: int | None = None,
    exact: bool = False,
    arrival: Arrival = DEFAULT_ARRIVAL,
) -> Prediction:
    """Simulate `step` on `chip` under `draws` seeded routings of `workload`; ConfigError if that is outside its bucket.

    `arrival` is what orders an arrival after its results, a launch's option. `layers` asks for the few-layer rung
    instead, from at least that many layers and with mean routing.
    """
    if layers is not None:
        return predict_few_layers(
            step.model, step.bucket, step.choices, chip, workload, layers=layers, exact=exact, arrival=arrival
        )
    _check(workload, step.bucket)
    states = draw_states(step.model, workload, draws=draws, seed=seed)
    known: dict[LiveState, Breakdown] = {}
    for state in states:  # one row always hits as many experts, whichever they are
        if state not in known:
            known[state] = break_down(run_step(step, chip, state, exact=exact, arrival=arrival))
    parts = [known[state] for state in states]
    totals = tuple(each.total_ns for each in parts)
    distinct = [sum(layer) / draws for layer in zip(*(state.distinct_experts for state in states), strict=True)]
    return Prediction(
        total_ns=sum(totals) / draws,
        p95_ns=upper_quantile(totals, 0.95),
        draws_ns=totals,
        rows=len(workload.contexts),
        bounds=bounds(step, chip, workload, distinct_experts=distinct),
        breakdown=blend([(1.0 / draws, each) for each in parts]),
    )


def predict_few_layers(  # noqa: PLR0913
    model: ModelSpec,
    bucket: Bucket,
    choices: Choices,
    chip: HardwareSpec,
    workload: Workload,
    *,
    layers: int = 1,
    exact: bool = False,
    arrival: Arrival = DEFAULT_ARRIVAL,
) -> Prediction:
    """Predict all layers from two runs of fewer (see `few_layers`); no more than those is lowered.

    The choices must be legal. Routing is the mean one, and p95 the mean too.
    """
    _check(workload, bucket)
    parts: list[tuple[float, Breakdown]] = []
    for num_layers, weight in runs(model, layers).items():
        fewer = truncated(model, num_layers)
        step = assemble(fewer, bucket, choices, chip.num_sms)
        run = run_step(step, chip, mean_state(fewer, workload), exact=exact, arrival=arrival)
        parts.append((weight, break_down(run)))
    breakdown = blend(parts)
    return Prediction(
        total_ns=breakdown.total_ns,
        p95_ns=breakdown.total_ns,
        draws_ns=(breakdown.total_ns,),
        rows=len(workload.contexts),
        bounds=bounds(model, chip, workload, choices),
        breakdown=breakdown,
    )


def _check(workload: Workload, bucket: Bucket) -> None:
    try:
        workload.check(bucket)
    except ValueError as error:
        raise ConfigError(f"the workload lies outside the bucket: {error}") from None
