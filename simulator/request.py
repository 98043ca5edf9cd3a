"""Which bucket and live state a command's flags mean, for a given plan.

Owns the defaults: without flags the plan's first bucket at its nominal state; with some, the smallest bucket that
serves them. Refuses states outside every bucket. Called by the `simulator` command.
"""

from __future__ import annotations

from collections.abc import Sequence

from megakernel.config import ConfigError, digest
from megakernel.model import ModelSpec
from megakernel.plan import Plan, PlanEntry
from megakernel.workload import Routing, Workload


def choose(plan: Plan, rows: int | None, contexts: Sequence[int], routing: Routing) -> tuple[PlanEntry, Workload]:
    """Bucket and live state; `contexts` is empty, one length for all rows, or one per row.

    ConfigError when no bucket of the plan serves it; it says which there are.
    """
    if len(contexts) > 1 and rows is not None and rows != len(contexts):
        raise ConfigError(f"--rows is {rows}, but --context is given for {len(contexts)} rows")
    if not contexts:
        entry = plan.entries[0] if rows is None else plan.entry_for(rows, 1)
        lengths = (entry.bucket.nominal_context_tokens,) * (rows or entry.bucket.rows)
    else:
        lengths = tuple(contexts) if len(contexts) > 1 else tuple(contexts) * (rows or plan.entries[0].bucket.rows)
        entry = plan.entry_for(len(lengths), max(lengths))
    return entry, Workload(contexts=lengths, routing=routing)


def check_model(plan: Plan, model: ModelSpec, source: str) -> None:
    """ConfigError unless the plan was made for this model; `source` names it."""
    found = digest(model)
    if found != plan.model_digest:
        raise ConfigError(f"the plan is for the model {plan.model_digest}, {source} is {found}; search a plan for it")
