"""Streaming programs: the JSON in which a pure streaming kernel is described, and its translation into records.

Owns the meaning of names: every phase and every signal is one counter per layer, `prev:` looks one layer back. Refuses
names that nobody arrives on, names used twice, and what the chip cannot hold. Every SM walks the same list. Called by
`cli.py` and by the accuracy tests.
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.config import ConfigError, Frozen
from megakernel.hardware import HardwareSpec
from simulator.program import Label, Program, Record, Ring, Signal, Wait

PREVIOUS = "prev:"

Count = Annotated[int, Field(gt=0)]
Cycles = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]


class PhaseSignal(Frozen):
    """An early arrival: after the phase's wait and work, and `work_cycles` more."""

    counter: Name
    work_cycles: Cycles = 0


class Phase(Frozen):
    """What every SM does once a layer: waits, works, streams its copies, arrives on the counter of its name."""

    name: Name
    copies: Annotated[int, Field(ge=0)]
    consume_after: tuple[Name, ...] = ()
    load_after: tuple[Name, ...] = ()
    work_cycles: Cycles = 0
    load_work_cycles: Cycles = 0
    signal: PhaseSignal | None = None

    @property
    def counters(self) -> tuple[str, ...]:
        """Counters that this phase arrives on."""
        return (self.name,) if self.signal is None else (self.name, self.signal.counter)


class StreamProgram(Frozen):
    """A whole streaming kernel; `tail` is one more phase after the last layer."""

    sms: Count
    copy_bytes: Count
    ring_stages: Count
    in_flight_cap_bytes: Count | None
    layers: Count
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    tail: Phase | None

    def check(self, chip: HardwareSpec, source: str) -> None:
        """Refuse what cannot run on `chip`; `source` names the program in messages."""
        if self.sms > chip.num_sms:
            raise ConfigError(f"{source}: `sms` is {self.sms}; {chip.name} has {chip.num_sms}")
        ring, room = self.copy_bytes * self.ring_stages, chip.shared_memory_per_block_bytes
        if ring > room:
            raise ConfigError(
                f"{source}: `ring_stages` x `copy_bytes` is {ring}; a block of {chip.name} has {room} bytes"
            )
        cap = self.in_flight_cap_bytes
        if cap is not None and cap < self.copy_bytes:
            raise ConfigError(
                f"{source}: `in_flight_cap_bytes` is {cap}, below one copy of {self.copy_bytes} bytes; "
                "raise it, or write null for no cap"
            )
        in_layers = [name for phase in self.phases for name in phase.counters]
        in_tail = [] if self.tail is None else list(self.tail.counters)
        named: set[str] = set()
        for name in in_layers + in_tail:
            if name.startswith(PREVIOUS):
                raise ConfigError(f"{source}: counter `{name}`: `{PREVIOUS}` is how a wait looks one layer back")
            if name in named:
                raise ConfigError(f"{source}: counter `{name}` is named twice; phases and signals need own names")
            named.add(name)
        for phase in self.phases:
            _check_waits(phase, in_layers, in_layers, source)
        if self.tail is not None:
            _check_waits(self.tail, in_tail, in_layers, source)


def _check_waits(phase: Phase, same: list[str], previous: list[str], source: str) -> None:
    for key, waits in (("consume_after", phase.consume_after), ("load_after", phase.load_after)):
        for wait in waits:
            known = previous if wait.startswith(PREVIOUS) else same
            if wait.removeprefix(PREVIOUS) not in known:
                names = ", ".join(f"`{name}`" for name in known) or "none"
                raise ConfigError(
                    f"{source}: `{key}` of phase `{phase.name}` names the unknown counter `{wait}`; known: {names}"
                )
        if len(set(waits)) != len(waits):
            raise ConfigError(f"{source}: `{key}` of phase `{phase.name}` names a counter twice")


def stream_records(
    stream: StreamProgram, chip: HardwareSpec, source: str = "program", arrival: Arrival = DEFAULT_ARRIVAL
) -> Program:
    """Translate into the simulator's program: one record per phase, the same list for every SM."""
    stream.check(chip, source)
    numbers = _Numbers(stream)
    records = tuple(
        _record(phase, layer, task, stream, numbers, chip) for task, (layer, phase) in enumerate(_phases(stream))
    )
    ring = Ring(stream.copy_bytes, stream.ring_stages, stream.in_flight_cap_bytes)
    return Program(ring, (records,) * stream.sms, numbers.count, arrival)


def _phases(stream: StreamProgram) -> Iterator[tuple[int, Phase]]:
    for layer in range(stream.layers):
        for phase in stream.phases:
            yield layer, phase
    if stream.tail is not None:
        yield stream.layers, stream.tail


class _Numbers:
    """Counter numbers by name and layer, and which of them anybody waits for."""

    def __init__(self, stream: StreamProgram) -> None:
        self._number: dict[tuple[int, str], int] = {}
        self._awaited: set[int] = set()
        for layer, phase in _phases(stream):
            for name in phase.counters:
                self._number[layer, name] = len(self._number)
        for layer, phase in _phases(stream):
            self._awaited.update(self.waited(layer, phase.consume_after + phase.load_after))

    @property
    def count(self) -> int:
        return len(self._number)

    def waited(self, layer: int, waits: tuple[str, ...]) -> list[int]:
        """Numbers that `waits` mean in `layer`; the first layer's previous ones are met and left out."""
        found: list[int] = []
        for wait in waits:
            of_layer = layer - 1 if wait.startswith(PREVIOUS) else layer
            if of_layer >= 0:
                found.append(self._number[of_layer, wait.removeprefix(PREVIOUS)])
        return found

    def arrived(self, layer: int, name: str) -> int | None:
        """Return the number to arrive on, or None if nobody waits for it."""
        number = self._number[layer, name]
        return number if number in self._awaited else None


def _record(
    phase: Phase, layer: int, task: int, stream: StreamProgram, numbers: _Numbers, chip: HardwareSpec
) -> Record:
    work_ns = chip.cycles_ns(phase.work_cycles)
    signal = None
    if phase.signal is not None:
        # The simulator's signal comes before the rest of the work; here all work comes before the signal.
        work_ns += chip.cycles_ns(phase.signal.work_cycles)
        counter = numbers.arrived(layer, phase.signal.counter)
        if counter is not None:
            signal, work_ns = Signal(counter, work_ns), 0.0
    return Record(
        label=Label(phase.name, task=task, layer=layer),
        load_bytes=phase.copies * stream.copy_bytes,
        load_waits=tuple(Wait(counter, stream.sms) for counter in numbers.waited(layer, phase.load_after)),
        load_work_ns=chip.cycles_ns(phase.load_work_cycles),
        run_waits=tuple(Wait(counter, stream.sms) for counter in numbers.waited(layer, phase.consume_after)),
        signal=signal,
        work_ns=work_ns,
        arrive=numbers.arrived(layer, phase.name),
    )
