"""Measured steps of equal layers, as streaming programs, and their times from few layers.

Owns the two shapes of the data sets in tests/data: the skeleton of a parallel MoE block, with a head behind its 49
layers, and equal phases. Knows no file. Called by `microbench`, `calibrate` and the accuracy tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from megakernel.arrival import Arrival
from megakernel.hardware import HardwareSpec
from simulator.simulate import simulate
from simulator.stream import PREVIOUS, Phase, PhaseSignal, StreamProgram, stream_records

LAYERS = 49
SMS = 132
COPY_BYTES, STAGES = 8192, 25
COPIES = {"QKV": 20, "UP": 46, "ATT": 8, "DOWN": 23, "O": 16}
HEAD_COPIES = 993
ROUTER_CYCLES = 1000
SHORT, LONG = 5, 9
"""Layers of the two short runs that tell the time of all: layers are alike."""
FEW = 6
"""Layers of a single run that estimates it, from its third layer on: 0.3% from the two runs on average, 1% at most."""


class Point(ABC):
    """One measured step of equal layers, as a program; `cap_kb` None is no cap, `work_cycles` None no dependency."""

    copy_bytes: int
    stages: int
    cap_kb: int | None
    work_cycles: int | None
    arrival: Arrival

    @property
    @abstractmethod
    def is_free(self) -> bool:
        """Whether it is the free stream."""

    @abstractmethod
    def phases(self) -> tuple[Phase, ...]:
        """Those of a layer."""

    def tail(self) -> Phase | None:
        """What comes behind the last layer."""
        return None

    def program(self, layers: int) -> StreamProgram:
        """Describe it with another number of layers."""
        return StreamProgram(
            sms=SMS,
            copy_bytes=self.copy_bytes,
            ring_stages=self.stages,
            in_flight_cap_bytes=None if self.cap_kb is None else self.cap_kb * 1024,
            layers=layers,
            phases=self.phases(),
            tail=self.tail(),
        )

    def simulated_ms(
        self, chip: HardwareSpec, *, exact: bool = False, layers: tuple[int, int] = (SHORT, LONG)
    ) -> float:
        """Time of the whole step, from two short runs."""
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


@dataclass(frozen=True)
class EvenPoint(Point):
    """Equal phases in a chain; the very first one's work is spent too, which is 2 us of a step at most."""

    copy_bytes: int
    stages: int
    phases_per_layer: int
    copies: int  # of a phase
    cap_kb: int | None
    work_cycles: int | None
    arrival: Arrival = "release"

    @property
    def is_free(self) -> bool:
        """Whether it is the stream without any wait or cap."""
        return self.work_cycles is None and self.cap_kb is None

    def phases(self) -> tuple[Phase, ...]:
        """See `Point`."""
        names = [f"P{number}" for number in range(self.phases_per_layer)]
        return tuple(map(self._phase, names, [f"{PREVIOUS}{names[-1]}", *names[:-1]]))

    def _phase(self, name: str, before: str) -> Phase:
        if self.work_cycles is None:
            return Phase(name=name, copies=self.copies)
        return Phase(name=name, copies=self.copies, consume_after=(before,), work_cycles=self.work_cycles)


@dataclass(frozen=True)
class SkeletonPoint(Point):
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

    def phases(self) -> tuple[Phase, ...]:
        """See `Point`."""
        return tuple(self._phase(name, COPIES[name]) for name in self.order)

    def tail(self) -> Phase:
        """See `Point`."""
        return self._phase("HEAD", HEAD_COPIES)

    def _phase(self, name: str, wanted: int) -> Phase:
        """A parallel block: both paths read QKV's input, the experts' addresses are known after the router."""
        copies = round(wanted * (COPY_BYTES / self.copy_bytes))
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
