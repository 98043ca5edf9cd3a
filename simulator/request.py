"""Which bucket and live state a command's flags mean, for a given plan, and the machine's form of the answer.

Owns the defaults: without flags the plan's first bucket at its nominal state; with some, the smallest bucket that
serves them. Refuses states outside every bucket. Called by the `simulator` command.
"""

from __future__ import annotations

from collections.abc import Sequence

from megakernel.assets import locate
from megakernel.config import ConfigError, digest
from megakernel.hardware import HardwareSpec
from megakernel.model import ModelSpec
from megakernel.plan import Plan, PlanEntry
from megakernel.workload import Routing, Workload
from simulator.prediction import Prediction
from simulator.recorded import Recorded, load_picks
from simulator.trust import uncalibrated

DRAWS = 5
"""Routings drawn for a prediction of several rows."""


def choose(plan: Plan, rows: int | None, contexts: Sequence[int], routing: Routing) -> tuple[PlanEntry, Workload]:
    """Bucket and live state; `contexts` is empty, one length for all rows, or one per row.

    ConfigError when no bucket of the plan serves it; it says which there are.
    """
    if len(contexts) > 1 and rows is not None and rows != len(contexts):
        raise ConfigError(f"--rows is {rows}, but --context is given for {len(contexts)} rows")
    if not contexts:
        entry = plan.entries[0] if rows is None else _smallest(plan, rows)
        lengths = (entry.bucket.nominal_context_tokens,) * (rows or entry.bucket.rows)
    else:
        lengths = tuple(contexts) if len(contexts) > 1 else tuple(contexts) * (rows or plan.entries[0].bucket.rows)
        entry = plan.entry_for(len(lengths), max(lengths))
    return entry, Workload(contexts=lengths, routing=routing)


def _smallest(plan: Plan, rows: int) -> PlanEntry:
    """Smallest bucket of at least `rows` rows, whatever its contexts."""
    fitting = [each for each in plan.entries if each.bucket.rows >= rows]
    if not fitting:
        there = ", ".join(f"{each.bucket.rows} x {each.bucket.max_context_tokens}" for each in plan.entries)
        raise ConfigError(f"no bucket for {rows} rows; the plan has rows x tokens {there}")
    return min(fitting, key=lambda each: (each.bucket.rows, each.bucket.max_context_tokens))


def check_model(plan: Plan, model: ModelSpec, source: str) -> None:
    """ConfigError unless the plan was made for this model; `source` names it."""
    found = digest(model)
    if found != plan.model_digest:
        raise ConfigError(f"the plan is for the model {plan.model_digest}, {source} is {found}; search a plan for it")


def routing_of(zipf: float | None, picks: str | None, model: ModelSpec) -> Routing:
    """The routing law that flags name; ConfigError for two of them, or for picks of another model."""
    if zipf is not None and picks is not None:
        raise ConfigError("--zipf and --picks are two routing laws; give one")
    if picks is not None:
        return load_picks(locate(picks), model)
    return Routing() if zipf is None else Routing(kind="zipf", exponent=zipf)


def routing_title(routing: Routing) -> str:
    """`uniform`, `zipf 1.2` or `picks of FILE`."""
    if isinstance(routing, Recorded):
        return f"picks of {routing.source}"
    return "uniform" if routing.kind == "uniform" else f"zipf {routing.exponent:g}"


def figures(prediction: Prediction, chip: HardwareSpec, workload: Workload) -> dict[str, object]:
    """Plain data of a prediction and of what it is for."""
    about = {
        "chip": chip.name,
        "uncalibrated_costs": uncalibrated(chip),
        "contexts": workload.contexts,
        "routing": routing_title(workload.routing),
    }
    return about | prediction.to_json()
