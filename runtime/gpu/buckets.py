"""Which tables a server decodes over: one for each number of rows, all with one rounding, so that they share one copy.

Owns the choice where no plan was searched for the model: what a card ran fastest, with as much of a ring as fits, else
small cuts. Says why a model can't be served rather than trying. Needs no card.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from megakernel import limits, live
from megakernel.assets import asset
from megakernel.build import BuiltStep, build_step
from megakernel.config import ConfigError, load_json, load_toml
from megakernel.hardware import HardwareSpec
from megakernel.lowering import lower
from megakernel.model import ModelSpec
from megakernel.plan import Plan, PlanEntry
from megakernel.tiling import Choices, Cut, Interleave, Ring, Rounding
from megakernel.workload import ROW_TILE, Bucket

ROWS = (1, 2, 4, 8)
"""Of buckets without a plan: rows that nobody sits in cost a step time too."""


@dataclass(frozen=True)
class Served:
    """A bucket's step, and what a plan says that it takes, in nanoseconds."""

    step: BuiltStep
    predicted_ns: float | None = None
    measured_ns: float | None = None


def planned(plan: Plan, rows: int, max_tokens: int) -> tuple[Served, ...]:
    """Steps of a plan's buckets for up to `rows` rows of `max_tokens` tokens; ConfigError when it has none for them."""
    entries = [entry for entry in plan.entries if entry.bucket.max_context_tokens >= max_tokens]
    enough = [entry.bucket.rows for entry in entries if entry.bucket.rows >= rows]
    if not enough:
        raise ConfigError(f"the plan has no bucket for {rows} rows of {max_tokens} tokens")
    taken = {entry.bucket.rows: entry for entry in entries if entry.bucket.rows <= min(enough)}
    return tuple(_of(plan, entry) for _, entry in sorted(taken.items()))


def fitting(model: ModelSpec, rows: int, max_tokens: int, chip: HardwareSpec) -> tuple[Served, ...]:
    """Steps for up to `rows` rows, of the first choices that the chip can run them all with.

    ConfigError says why the last ones can't.
    """
    if rows > ROW_TILE:
        raise ConfigError(f"`max_num_seqs` is {rows}; the kernel decodes at most {ROW_TILE} rows at once")
    buckets = [
        Bucket(rows=count, max_context_tokens=max_tokens, nominal_context_tokens=-(-max_tokens // 2))
        for count in sorted({*(count for count in ROWS if count < rows), rows})
    ]
    last = ""
    for base in _bases(model):
        choices = [for_rows(model, bucket, base, chip) for bucket in buckets]
        found = [
            reason
            for bucket, each in zip(buckets, choices, strict=True)
            for reason in limits.reasons(model, bucket, each, chip)
        ]
        if not found:
            try:
                return tuple(
                    _measured(model, bucket, each.rounding) or Served(build_step(model, bucket, each, chip))
                    for bucket, each in zip(buckets, choices, strict=True)
                )
            except ConfigError as error:
                raise ConfigError(f"{error}{_what_fits(model, buckets[-1], choices[-1], chip)}") from None
        last = "\n".join(f"  {reason}" for reason in dict.fromkeys(found))
    raise ConfigError(f"no choices fit this model on {chip.name}:\n{last}")


def _what_fits(model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> str:
    """Which lengths the memory has room for beside the weights, where it is short of it; in thousands of tokens."""

    def lacks(kilo: int, rows: int) -> bool:
        asked = Bucket(rows=rows, max_context_tokens=1024 * kilo, nominal_context_tokens=1024 * kilo)
        return bool(limits.check_memory(lower(model, asked, choices), chip))

    most = range(1, bucket.max_context_tokens // 1024 + 1)
    counts = sorted({1, -(-bucket.rows // 2), bucket.rows})
    fits = [(rows, 1024 * bisect_left(most, x=True, key=lambda kilo: lacks(kilo, rows))) for rows in counts]
    there = " or ".join(f"{tokens} with `max_num_seqs` {rows}" for rows, tokens in fits if tokens)
    return f"\nas `max_model_len`, there is room for {there}" if there else ""


def _of(plan: Plan, entry: PlanEntry) -> Served:
    return Served(plan.build(entry), entry.predicted_ns, entry.measured_ns)


def _measured(model: ModelSpec, bucket: Bucket, rounding: Rounding) -> Served | None:
    """The step of a shipped plan that a card has timed; what was only predicted does not win over what was."""
    for path in sorted(asset("configs/plans").glob("*.json")):
        plan = load_json(path, Plan)
        if plan.model == model and not plan.stale:
            for entry in plan.entries:
                is_of = (entry.bucket, entry.choices.rounding) == (bucket, rounding)
                if is_of and entry.measured_ns is not None:
                    return _of(plan, entry)
    return None


def for_rows(model: ModelSpec, bucket: Bucket, base: Choices, chip: HardwareSpec) -> Choices:
    """The choices with as many tasks that merge as rows bring heads, and as many stages as rows leave room for.

    Attention is dealt to no more SMs than it has units at the bucket's nominal length: a share without one is a record
    all the same, and its SM is late for what follows.
    """
    chunks = live.chunk_end(bucket.nominal_context_tokens - 1, base.rounding.chunk_tokens)
    units = chunks * model.num_kv_heads * bucket.rows
    merge = min(base.cut.merge * bucket.rows, chip.num_sms)
    cut = base.cut.model_copy(update={"attend": min(base.cut.attend, units), "merge": merge})
    return limits.fitting_ring(model, bucket, base.model_copy(update={"cut": cut}), chip)


def _bases(model: ModelSpec) -> Iterator[Choices]:
    name = "attention-first" if model.block == "parallel" else "sequential-hand"
    yield load_toml(asset(f"configs/choices/{name}.toml"), Choices)
    if model.block == "parallel":
        interleave = Interleave(order=("project", "up", "attend", "merge", "down", "output"))
    else:
        order = ("project", "attend", "merge", "output", "route", "up", "down")
        interleave = Interleave(order=order, router_with_project=False)
    yield Choices(
        rounding=Rounding(chunk_tokens=16, page_tokens=16, slice_columns=32),
        cut=Cut(project=5, attend=4, merge=3, output=3, up=4, down=4, head=5, route=2),
        ring=Ring(copy_bytes=4096, stages=12, in_flight_cap_bytes=16384),
        interleave=interleave,
    )
