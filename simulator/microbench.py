"""What `runtime microbench` measured, as streaming programs that can be simulated.

Owns the names of its samples (`VARIANT | ORDER,LOADS,CAP_KB,WORK_CYCLES[,BYTES B x STAGES]`) and the skeleton that they
stand for: a parallel MoE block of 49 layers and a head, described with its data set in tests/data. Refuses to fit.
Called by `calibrate` and by the accuracy tests.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from megakernel.arrival import Arrival
from megakernel.config import ConfigError, load_json
from megakernel.hardware import HardwareSpec
from simulator.simulate import simulate
from simulator.stream import Phase, PhaseSignal, StreamProgram, stream_records

LAYERS = 49
COPY_BYTES, STAGES = 8192, 25
COPIES = {"QKV": 20, "UP": 46, "ATT": 8, "DOWN": 23, "O": 16}
HEAD_COPIES = 993
ROUTER_CYCLES = 1000
SHORT, LONG = 5, 9
"""Layers of the two short runs that tell the time of all: the skeleton's layers are alike."""
FEW = 6
"""Layers of a single run that estimates it, from its third layer on: 0.3% from the two runs on average, 1% at most."""

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


class _File(BaseModel):
    """What is read of a measurement; the rest is for people."""

    model_config = ConfigDict(extra="ignore", strict=True, frozen=True)


class Sample(_File):
    """Milliseconds of one variant."""

    name: str
    ms: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1, strict=False)]


class CardName(_File):
    """Which card."""

    name: str


class Measurement(_File):
    """A record of `runtime microbench`."""

    what: str
    date: str
    card: CardName
    samples: Annotated[tuple[Sample, ...], Field(strict=False)]


@dataclass(frozen=True)
class Point:
    """One skeleton; `cap_kb` None is no cap, `work_cycles` None no dependency at all."""

    order: tuple[str, ...]
    after_wait: bool
    cap_kb: int | None
    work_cycles: int | None
    copy_bytes: int = COPY_BYTES
    stages: int = STAGES
    arrival: Arrival = "release"

    @property
    def is_free(self) -> bool:
        """Whether it is the stream without any wait."""
        return self.work_cycles is None

    def program(self, layers: int) -> StreamProgram:
        """Describe the skeleton with another number of layers."""
        scale = COPY_BYTES / self.copy_bytes
        return StreamProgram(
            sms=132,
            copy_bytes=self.copy_bytes,
            ring_stages=self.stages,
            in_flight_cap_bytes=None if self.cap_kb is None else self.cap_kb * 1024,
            layers=layers,
            phases=tuple(self._phase(name, round(COPIES[name] * scale)) for name in self.order),
            tail=self._phase("HEAD", round(HEAD_COPIES * scale)),
        )

    def _phase(self, name: str, copies: int) -> Phase:
        """A parallel block: both paths read QKV's input, the experts' addresses are known after the router."""
        if self.work_cycles is None:
            return Phase(name=name, copies=copies)
        before = ("prev:O", "prev:DOWN")
        waits: dict[str, tuple[str, ...]] = {
            "QKV": before, "ATT": ("QKV",), "O": ("ATT",), "DOWN": ("UP",), "UP": (), "HEAD": before
        }  # fmt: skip
        router_cycles = ROUTER_CYCLES if self.work_cycles else 0
        after_wait = waits[name] if self.after_wait and name != "HEAD" else ()
        return Phase(
            name=name,
            copies=copies,
            consume_after=waits[name],
            load_after=("ROUTER",) if name == "UP" else after_wait,
            work_cycles=0 if name == "UP" else self.work_cycles,
            load_work_cycles=router_cycles if name == "UP" else 0,
            signal=PhaseSignal(counter="ROUTER", work_cycles=router_cycles) if name == "QKV" else None,
        )

    def simulated_ms(
        self, chip: HardwareSpec, *, exact: bool = False, layers: tuple[int, int] = (SHORT, LONG)
    ) -> float:
        """Time of the whole skeleton, from two short runs."""
        short, long = (
            simulate(stream_records(self.program(each), chip, arrival=self.arrival), chip, exact=exact).total_ns
            for each in layers
        )
        return (long + (long - short) / (layers[1] - layers[0]) * (LAYERS - layers[1])) / 1e6

    def estimated_ms(self, chip: HardwareSpec) -> float:
        """The same from one run of few layers, at less than half the price."""
        program = self.program(FEW)
        result = simulate(stream_records(program, chip, arrival=self.arrival), chip)
        phases = len(program.phases)
        second, last = (  # the mean, since SMs that don't wait for each other drift apart
            sum(sm.end_ns[layers * phases - 1] for sm in result.sms) / program.sms for layers in (2, FEW)
        )
        return (result.total_ns + (last - second) / (FEW - 2) * (LAYERS - FEW)) / 1e6


def read_measurement(path: str | Path) -> tuple[Measurement, list[tuple[Point, float]]]:
    """The file, and its skeletons with their median times in ms; ConfigError when there are none."""
    found = load_json(path, Measurement)
    points: list[tuple[Point, float]] = []
    for sample in found.samples:
        variant, bar, cell = sample.name.partition(" | ")
        if bar and variant in VARIANTS:
            points.append(
                (_point(cell, VARIANTS[variant], f"{path}: sample `{sample.name}`"), statistics.median(sample.ms))
            )
    if not any(point.is_free for point, _ in points) or all(point.is_free for point, _ in points):
        raise ConfigError(
            f"{path}: no free stream and skeletons among its samples; needed: a file of `runtime microbench`"
        )
    return found, points


def _point(cell: str, arrival: Arrival, source: str) -> Point:
    found = _CELL.fullmatch(cell)
    names = tuple(found["order"].split()) if found else ()
    if found is None or sorted(names) != sorted(COPIES):
        raise ConfigError(f"{source} is not ORDER,LOADS,CAP_KB,WORK_CYCLES[,BYTES B x STAGES] of `runtime microbench`")
    return Point(
        order=names,
        after_wait=found["loads"] == "load_after_wait",
        cap_kb=int(found["cap"]) if found["cap"] else None,
        work_cycles=None if found["loads"] == "free" else int(found["work"] or 0),
        copy_bytes=int(found["bytes"] or COPY_BYTES),
        stages=int(found["stages"] or STAGES),
        arrival=arrival,
    )
