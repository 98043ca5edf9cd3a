"""Fits a chip's costs to a card's measurements, and writes them down with intervals and where they come from.

Owns the choice of what is fitted: the streaming rate comes from the free streams alone, costs that have samples of
their own from these, and then those costs whose sources say that they are fitted or carried over are fitted to some of
the other steps. Costs that were measured before stay, and so do those that the measurements cannot tell within a factor
of two: they keep the base's value and say so. Called by the `simulator` command.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

from megakernel.config import ConfigError
from megakernel.hardware import Costs, HardwareSpec
from simulator.fit import Fitted, Times, Values, fit, most_simulations
from simulator.microbench import Measurement, measured_costs
from simulator.points import LAYERS, EvenPoint, Point
from simulator.stream import StreamProgram
from simulator.trust import TRANSFERRED

ROUNDS = 2
EVERY = 5
"""Skeletons stand in runs of four works, of which a fit needs all."""
STREAMS_EVERY = 3
"""One in so many times `EVERY` of the steps of equal phases, which are three times as many."""
NOT_TOLD = ("arrive_serial_ns", "fence_ns", "handoff_ns", "issue_capped_ns", "issue_ns", "l2_bytes_per_ns")
"""Costs that whole steps do not tell apart from others, or not at all: samples of their own do."""


@dataclass(frozen=True)
class Calibrated:
    """A chip with measured and fitted costs; errors are relative, `unseen` those of the steps that were not fitted."""

    chip: HardwareSpec
    measured: dict[str, float]
    fitted: Fitted
    rate_bytes_per_ns: float
    unseen: tuple[float, ...]

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        unseen = np.abs(np.array(self.unseen))
        return {
            "chip": self.chip.name,
            "streaming_bytes_per_ns": self.rate_bytes_per_ns,
            "measured": self.measured,
            "constants": [
                {"name": each.name, "value": each.value, "low": each.low, "high": each.high, "known": each.is_known}
                for each in self.fitted.constants
            ],
            "fitted": {"samples": len(self.fitted.errors), "mape": self.fitted.mape,
                       "worst": float(np.abs(self.fitted.errors).max())},
            "unseen": {"samples": len(unseen), "mape": float(unseen.mean()) if len(unseen) else None,
                       "worst": float(unseen.max()) if len(unseen) else None},
        }  # fmt: skip


def fitted_costs(chip: HardwareSpec) -> tuple[str, ...]:
    """Names of the costs that a calibration from `chip` moves: fitted or carried over, positive, and told."""
    return tuple(
        name
        for name in Costs.model_fields
        if name not in NOT_TOLD
        and chip.sources[f"costs.{name}"].startswith(("fitted", TRANSFERRED))
        and getattr(chip.costs, name) > 0.0
    )


def calibrate(  # noqa: PLR0913 - settings of one fit
    base: HardwareSpec,
    measurement: Measurement,
    points: list[tuple[Point, float]],
    source: str,
    *,
    rounds: int = ROUNDS,
    every: int = EVERY,
    watch: Callable[[float], None] | None = None,
) -> Calibrated:
    """Fit `base` to the measured times of `points`; `source` names the file in the new sources.

    `watch` is told now and then which share of the work is done; fits that need less of it end before.
    """
    free = [_bytes(point) / (ms * 1e6) for point, ms in points if point.is_free]
    rate = float(np.median(free))
    where = f"{source}, {measurement.card.name}, {measurement.date[:10]}"
    own = measured_costs(measurement)
    chip = _with(_with_rate(base, rate, f"measured: free stream of {where}; fewer SMs as in the base chip"), own)
    chosen, others = split([pair for pair in points if not pair[0].is_free], every)
    names = fitted_costs(base)
    if len(chosen) <= len(names):
        raise ConfigError(
            f"{source}: {len(chosen)} steps for {len(names)} constants; measure more, or take a smaller --every"
        )
    measured = np.array([ms for _, ms in chosen])
    expected = most_simulations(len(names), rounds) * len(chosen) + len(others)
    simulated = 0
    with ProcessPoolExecutor(os.cpu_count()) as pool:

        def times(candidate: HardwareSpec, pairs: list[tuple[Point, float]]) -> Times:
            nonlocal simulated
            found: list[float] = []
            for ms in pool.map(partial(Point.estimated_ms, chip=candidate), [point for point, _ in pairs]):
                found.append(ms)
                simulated += 1
                if watch is not None:
                    watch(simulated / expected)
            return np.array(found)

        start = {name: getattr(chip.costs, name) for name in names}

        def chosen_times(values: Values) -> Times:
            return times(_with(chip, values), chosen)

        found = fit(start, measured, chosen_times, rounds=rounds)
        known = {each.name: each.value for each in found.constants if each.is_known}
        sources = {f"costs.{name}": f"measured: {where}" for name in own}
        sources |= {
            f"costs.{each.name}": f"fitted to {where}: 95% within {each.low:.3g} to {each.high:.3g}"
            if each.is_known
            else f"not told by {where}; the base's, which was: {base.sources[f'costs.{each.name}']}"
            for each in found.constants
        }
        fitted_chip = _with(chip, known)
        done = fitted_chip.model_copy(update={"sources": {**chip.sources, **sources}})
        unseen = times(done, others) / np.array([ms for _, ms in others]) - 1.0 if others else np.array([])
    return Calibrated(done, own, found, rate, tuple(unseen.tolist()))


def split(paced: Sequence[tuple[Point, float]], every: int) -> tuple[list[tuple[Point, float]], ...]:
    """Steps to fit, and the others: every so many of the skeletons, and a draw of the steps of equal phases.

    These are drawn, always alike, because they stand in runs of five works and of seven caps.
    """
    even = [idx for idx, (point, _) in enumerate(paced) if isinstance(point, EvenPoint)]
    skeletons = [idx for idx, (point, _) in enumerate(paced) if not isinstance(point, EvenPoint)]
    drawn = random.Random(0).sample(even, len(even) // (STREAMS_EVERY * every))
    chosen = {*skeletons[::every], *drawn}
    return [paced[idx] for idx in sorted(chosen)], [pair for idx, pair in enumerate(paced) if idx not in chosen]


def _with(chip: HardwareSpec, values: Values) -> HardwareSpec:
    rounded = {name: float(f"{value:.4g}") for name, value in values.items()}
    return chip.model_copy(update={"costs": chip.costs.model_copy(update=rounded)})


def _with_rate(chip: HardwareSpec, rate: float, source: str) -> HardwareSpec:
    """The chip with all rates below its streaming ceiling in proportion, but none above an SM's port."""
    factor = rate / chip.streaming_bytes_per_ns
    ceilings = tuple(
        each.model_copy(
            update={"bytes_per_ns": round(min(each.bytes_per_ns * factor, each.num_sms * chip.sm_bytes_per_ns), 1)}
        )
        for each in chip.ceilings
    )
    return chip.model_copy(update={"ceilings": ceilings, "sources": {**chip.sources, "ceilings": source}})


def _bytes(point: Point) -> int:
    return _program_bytes(point.program(LAYERS))


def _program_bytes(program: StreamProgram) -> int:
    copies = program.layers * sum(phase.copies for phase in program.phases)
    copies += program.tail.copies if program.tail else 0
    return copies * program.sms * program.copy_bytes


def chip_toml(chip: HardwareSpec, head: Iterable[str]) -> str:
    """A chip as the file that it is read from."""
    return "\n".join([*(f"# {line}" for line in head), "", *_lines(chip)]) + "\n"


def _lines(chip: HardwareSpec) -> Iterator[str]:
    for name, value in chip:
        if isinstance(value, str | int | float):
            yield f"{name} = {json.dumps(value)}"
    yield "ceilings = ["
    for each in chip.ceilings:
        yield f"  {{ num_sms = {each.num_sms}, bytes_per_ns = {each.bytes_per_ns} }},"
    yield "]"
    for title, table in (("costs", chip.costs), ("work", chip.work)):
        yield from ("", f"[{title}]", *(f"{name} = {json.dumps(value)}" for name, value in table))
    yield from ("", "[sources]", *(f"{json.dumps(key)} = {json.dumps(text)}" for key, text in chip.sources.items()))
