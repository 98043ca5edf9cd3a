"""What a step would cost: every point of a study, by every scheme.

Owns what a scheme means at a point. The point's bucket has the batch's rows and ends at its context. A plan's choices
are lowered again for the plan's own bucket that serves the point, and a plan that has none has no answer there; the
hand choices get as many ring stages as fit; the kernels have the hand choices' tiles. What can't run is a result too:
its reason. Called by the `simulator` command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace

from megakernel import limits
from megakernel.build import BuiltStep, assemble
from megakernel.config import ConfigError, digest
from megakernel.cost import LiveState
from megakernel.hardware import HardwareSpec
from megakernel.lowering import lower
from megakernel.model import ModelSpec
from megakernel.tiling import Choices
from megakernel.workload import Bucket, Workload
from simulator.baseline import kernel_step
from simulator.bounds import bounds
from simulator.predict import predict, predict_few_layers
from simulator.prediction import Prediction
from simulator.request import routing_title
from simulator.routing import draw_states, mean_state, upper_quantile
from simulator.study import NamedModel, Scheme, Sweep
from simulator.trust import check_finite, priced_with, uncalibrated


@dataclass(frozen=True)
class Answer:
    """What one scheme costs at one point, or why it has no answer there; `of` says what was priced."""

    model: str
    chip: str
    is_calibrated: bool
    batch: int
    context: int
    routing: str
    scheme: Scheme
    of: str = ""
    ms: float | None = None
    p95_ms: float | None = None
    routings: int = 0
    tokens_per_s: float | None = None
    percent_of_roofline: float | None = None
    bound_ms: float | None = None
    stopped_by: str = ""
    reason: str = ""


@dataclass(frozen=True)
class _Point:
    model: NamedModel
    chip: HardwareSpec
    bucket: Bucket
    workload: Workload


def answers(sweep: Sweep, report: Callable[[int], None] = lambda _: None) -> tuple[Answer, ...]:
    """Price every point by every scheme; `report` is told how many points are done."""
    found: list[Answer] = []
    known: dict[tuple[str, str, int, int, Scheme], Answer] = {}
    for done, (point, routing) in enumerate(_points(sweep)):
        report(done)
        for scheme in sweep.study.schemes:
            batch, context = point.bucket.rows, point.bucket.max_context_tokens
            key = (point.model.name, point.chip.name, batch, context, scheme)
            answer = known.get(key) if batch == 1 else None  # one row hits as many experts under every law
            if answer is None:
                with priced_with(point.chip):
                    answer = _answer(sweep, point, scheme)
                known[key] = answer
            found.append(replace(answer, routing=routing))
    return tuple(found)


def to_json(found: tuple[Answer, ...]) -> dict[str, object]:
    """Plain data: an object per answer, without what it lacks."""
    rows = [{key: value for key, value in asdict(each).items() if value not in (None, "")} for each in found]
    return {"answers": rows}


def _points(sweep: Sweep) -> Iterator[tuple[_Point, str]]:
    study = sweep.study
    for model in sweep.models:
        for chip in sweep.chips:
            for routing in model.routings:
                for batch in study.batches:
                    for context in study.contexts:
                        bucket = Bucket(rows=batch, max_context_tokens=context, nominal_context_tokens=context)
                        workload = Workload(contexts=(context,) * batch, routing=routing)
                        yield _Point(model, chip, bucket, workload), routing_title(routing)


def _answer(sweep: Sweep, point: _Point, scheme: Scheme) -> Answer:
    model, chip, bucket = point.model.spec, point.chip, point.bucket
    empty = Answer(
        model=point.model.name,
        chip=chip.name,
        is_calibrated=not uncalibrated(chip),
        batch=bucket.rows,
        context=bucket.max_context_tokens,
        routing="",
        scheme=scheme,
    )
    of = "hand choices"
    if scheme == "plan":
        found = _planned(sweep, point)
        if found is None:
            return replace(empty, reason="no plan of the study has a bucket for this point")
        of, bucket, choices = found
    else:
        choices = fitted(sweep.hands[model.block], model, bucket, chip)
    reasons = limits.reasons(model, bucket, choices, chip) or limits.check_memory(lower(model, bucket, choices), chip)
    if reasons:
        return replace(empty, of=of, reason="; ".join(reasons))
    if scheme == "kernels":
        return _kernels(sweep, point, choices, replace(empty, of="their tiles, one kernel per operator"))
    return _filled(replace(empty, of=of), _predicted(sweep, point, bucket, choices), chip)


def _predicted(sweep: Sweep, point: _Point, bucket: Bucket, choices: Choices) -> Prediction:
    model, chip, workload, study = point.model.spec, point.chip, point.workload, sweep.study
    if study.draws is None:
        return predict_few_layers(model, bucket, choices, chip, workload)
    step = assemble(model, bucket, choices, chip.num_sms)
    return predict(step, chip, workload, draws=study.draws, seed=study.seed)


def _filled(answer: Answer, prediction: Prediction, chip: HardwareSpec) -> Answer:
    check_finite(prediction, chip)
    return replace(
        answer,
        ms=prediction.total_ns / 1e6,
        p95_ms=prediction.p95_ns / 1e6,
        routings=len(prediction.draws_ns),
        tokens_per_s=prediction.tokens_per_s,
        percent_of_roofline=prediction.percent_of_roofline,
        bound_ms=prediction.bounds.lower_ns / 1e6,
        stopped_by=prediction.stopped_by,
    )


def _kernels(sweep: Sweep, point: _Point, choices: Choices, answer: Answer) -> Answer:
    model, chip, workload, study = point.model.spec, point.chip, point.workload, sweep.study
    step = assemble(model, point.bucket, choices, chip.num_sms)
    states = [mean_state(model, workload)]
    if study.draws is not None:
        states = list(draw_states(model, workload, draws=study.draws, seed=study.seed))
    known: dict[LiveState, float] = {}
    for state in states:
        if state not in known:
            known[state] = _kernel_ns(step, chip, state, study.gap_ns)
    totals = tuple(known[state] for state in states)
    mean = sum(totals) / len(totals)
    distinct = [sum(layer) / len(states) for layer in zip(*(state.distinct_experts for state in states), strict=True)]
    bound = bounds(step, chip, workload, distinct_experts=distinct)
    kernels = len(step.graph.ops)
    gaps = study.gap_ns * (kernels - 1)
    rest = mean - gaps - bound.bytes_ns
    return replace(
        answer,
        ms=mean / 1e6,
        p95_ms=upper_quantile(totals, 0.95) / 1e6,
        routings=len(totals),
        tokens_per_s=len(workload.contexts) * 1e9 / mean,
        percent_of_roofline=100.0 * bound.roofline_ns / mean,
        bound_ms=bound.bytes_ns / 1e6,
        stopped_by=f"{kernels} kernels: {100.0 * gaps / mean:.0f}% of the step are the gaps between them, "
        f"{100.0 * rest / mean:.0f}% ramp, drain and imbalance",
    )


def _kernel_ns(step: BuiltStep, chip: HardwareSpec, state: LiveState, gap_ns: float) -> float:
    return kernel_step(step, chip, state, gap_ns=gap_ns).total_ns


def _planned(sweep: Sweep, point: _Point) -> tuple[str, Bucket, Choices] | None:
    """The first plan for the model and chip with a bucket for the point: its name, the bucket, its choices."""
    wanted = digest(point.model.spec)
    for name, plan in sweep.plans:
        own = plan.hardware
        if plan.model_digest != wanted or (own.architecture, own.num_sms) != (
            point.chip.architecture,
            point.chip.num_sms,
        ):
            continue
        try:
            entry = plan.entry_for(point.bucket.rows, point.bucket.max_context_tokens)
        except ConfigError:
            continue
        return name, entry.bucket, entry.choices
    return None


def fitted(hand: Choices, model: ModelSpec, bucket: Bucket, chip: HardwareSpec) -> Choices:
    """Hand choices whose ring has at most the stages that fit beside the bucket's activations."""
    ring = hand.ring
    least = limits.least_stages(model, hand.rounding, ring.copy_bytes)
    stages = min(ring.stages, max(limits.most_stages(model, bucket, hand, chip), least))
    cap = None if ring.in_flight_cap_bytes is None else min(ring.in_flight_cap_bytes, stages * ring.copy_bytes)
    return hand.model_copy(update={"ring": ring.model_copy(update={"stages": stages, "in_flight_cap_bytes": cap})})
