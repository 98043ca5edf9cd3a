"""What `runtime microbench` measured, as steps that can be simulated, and as costs.

Owns the names of its samples: `VARIANT | ORDER,LOADS,CAP_KB,WORK_CYCLES[,BYTES B x STAGES]` is a skeleton, `streaming |
BYTES B x STAGES,PHASES x COPIES,CAP_KB,WORK_CYCLES` has equal phases; signals, fan-in and issue are costs. Refuses to
fit. Called by `calibrate`.
"""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from megakernel.arrival import Arrival
from megakernel.config import ConfigError, load_json
from megakernel.hardware import HardwareSpec
from megakernel.measurement import Card
from simulator.points import COPIES, COPY_BYTES, SMS, STAGES, EvenPoint, Point, SkeletonPoint

CARDS_MEMORY = 0.1
"""A card's memory is its chip's when it differs by no more than this share."""

VARIANTS: dict[str, Arrival] = {
    "default": "release",
    "fence, relaxed add": "release",
    "read-back arrival": "read_back",
    "relaxed arrival": "relaxed",
}
"""Variants that the simulator can tell apart; the others differ in what it does not model."""

_CELL = re.compile(
    r"(?P<order>[A-Z ]+),(?P<loads>free|load_ahead|load_after_wait),(?P<cap>\d*),(?P<work>\d*)"
    r"(,(?P<bytes>\d+) B x (?P<stages>\d+))?"
)


_EVEN_CELL = re.compile(
    r"(?P<bytes>\d+) B x (?P<stages>\d+),(?P<phases>\d+) x (?P<copies>\d+),(?P<cap>\d*),(?P<work>\d*|none)"
)


class _File(BaseModel):
    """What is read of a measurement; the rest is for people."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class Sample(_File):
    """Milliseconds of one variant."""

    name: str
    ms: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, strict=False)]

    @property
    def median_ms(self) -> float:
        """Median."""
        return statistics.median(self.ms)


class Measurement(_File):
    """A record of `runtime microbench`."""

    what: str
    date: str
    card: Card
    samples: Annotated[tuple[Sample, ...], Field(strict=False)]


def read_measurement(path: str | Path) -> tuple[Measurement, list[tuple[Point, float]]]:
    """The file, and its steps with their median times in ms; ConfigError when there are none."""
    found = load_json(path, Measurement)
    points: list[tuple[Point, float]] = []
    for sample in found.samples:
        variant, bar, cell = sample.name.partition(" | ")
        source = f"{path}: sample `{sample.name}`"
        if bar and variant == "streaming":
            points.append((_even(cell, source), sample.median_ms))
        elif bar and variant in VARIANTS:
            points.append((_skeleton(cell, VARIANTS[variant], source), sample.median_ms))
    if not any(point.is_free for point, _ in points) or all(point.is_free for point, _ in points):
        raise ConfigError(
            f"{path}: no free stream and skeletons among its samples; needed: a file of `runtime microbench`"
        )
    return found, points


def check_card(card: Card, chip: HardwareSpec, source: str) -> None:
    """ConfigError when the card that `source` was measured on is another chip.

    Not by name: people name chips, drivers cards. An H100 and an H200 have equally many SMs and differ in memory.
    """
    if card.num_sms != chip.num_sms or abs(card.memory_bytes / chip.memory_bytes - 1) > CARDS_MEMORY:
        found, needed = (f"{each.name} ({each.num_sms} SMs, {each.memory_bytes / 1e9:.0f} GB)" for each in (card, chip))
        raise ConfigError(f"{source}: measured on {found}, wanted for {needed}; needed a record of that chip")


def _skeleton(cell: str, arrival: Arrival, source: str) -> SkeletonPoint:
    found = _CELL.fullmatch(cell)
    names = tuple(found["order"].split()) if found else ()
    if found is None or sorted(names) != sorted(COPIES):
        raise ConfigError(f"{source} is not ORDER,LOADS,CAP_KB,WORK_CYCLES[,BYTES B x STAGES] of `runtime microbench`")
    return SkeletonPoint(
        order=names,
        after_wait=found["loads"] == "load_after_wait",
        cap_kb=int(found["cap"]) if found["cap"] else None,
        work_cycles=None if found["loads"] == "free" else int(found["work"] or 0),
        copy_bytes=int(found["bytes"] or COPY_BYTES),
        stages=int(found["stages"] or STAGES),
        arrival=arrival,
    )


def _even(cell: str, source: str) -> EvenPoint:
    found = _EVEN_CELL.fullmatch(cell)
    if found is None:
        raise ConfigError(
            f"{source} is not BYTES B x STAGES,PHASES x COPIES,CAP_KB,WORK_CYCLES of `runtime microbench`"
        )
    return EvenPoint(
        copy_bytes=int(found["bytes"]),
        stages=int(found["stages"]),
        phases_per_layer=int(found["phases"]),
        copies=int(found["copies"]),
        cap_kb=int(found["cap"]) if found["cap"] else None,
        work_cycles=int(found["work"]) if found["work"].isdigit() else None,
    )


def measured_costs(found: Measurement) -> dict[str, float]:
    """Costs in ns by name that a measurement tells without a fit; those alone whose samples it has."""
    ns = {sample.name: 1e6 * sample.median_ms for sample in found.samples}
    costs = {cost: round(ns[name], 1) for cost, name in COST_SAMPLES.items() if name in ns}
    one, all_sms = (ns.get(f"{group} | release, 0 KB in flight") for group in ("signal", "fan-in"))
    if one is not None and all_sms is not None and all_sms > one:
        costs["arrive_serial_ns"] = round((all_sms - one) / (SMS - 1), 2)
    return costs


COST_SAMPLES = {
    "handoff_ns": "signal | release, 0 KB in flight",
    "issue_ns": "issue | 4096 B x 48, no cap",
    "issue_capped_ns": "issue | 4096 B x 48, a cap of all but one",
}
"""Samples that are a cost: one SM to another in idle memory; a copy of one SM, too small to fill its port."""
