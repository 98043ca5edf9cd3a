"""What `runtime microbench` measures of a card: whole streamed steps, and what their parts cost by themselves.

Owns the record's groups, which the names of its samples begin with, `GROUP | CASE`:

- `default`, and ways of handing over: skeletons of a step. Milliseconds of the step.
- `streaming`: steps of equal phases, the streaming data set. Milliseconds of the step.
- `signal`, `fan-in`: one SM to another, and all to all, without a table. Milliseconds of one.
- `hand-off`: phases without copies, as the kernel's loop goes through them. Milliseconds of a phase.
- `issue`: copies of one SM from L2. Milliseconds of a copy.
- `consume`: a ring full of landed copies, after 10,000 cycles of work. Milliseconds of a phase: two counts of copies
  tell by their difference what one takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from megakernel.config import ConfigError
from megakernel.hardware import HardwareSpec
from megakernel.measurement import Fault, Record
from runtime.gpu.card import read_card, reasons
from runtime.gpu.compile import compile_ahead
from runtime.gpu.even import (
    CONSUME_PHASES,
    CONSUMES,
    HAND_OFF_PHASES,
    HAND_OFFS,
    ISSUE_COPIES,
    ISSUE_PHASES,
    ISSUES,
    STREAMING_CELLS,
    Even,
)
from runtime.gpu.launch import Work
from runtime.gpu.linear import LinearTable
from runtime.gpu.measure import Timed, record, take, tolerant
from runtime.gpu.signal import SIGNALS, TURNS, SignalBench
from runtime.gpu.skeleton import RING_CELLS, SHIPPED_CELLS, SkeletonCell
from runtime.gpu.specialize import KernelOptions
from runtime.gpu.streaming import LinearBench, even_work, skeleton_work


def _released(**options: int) -> KernelOptions:
    """Options of a cell whose arrivals are releases, as those of the data sets are that it is compared with."""
    return KernelOptions.model_validate({**options, "arrival": "release"})


HANDOFF_VARIANTS = {
    "every warp polls": _released(pollers=8, poll_stagger_cycles=0),
    "2 pollers": _released(pollers=2),
    "4 pollers": _released(pollers=4),
    "100 ns between polls": _released(poll_pause_ns=100),
    "fence, relaxed add": KernelOptions(arrival="fence"),
    "read-back arrival": KernelOptions(arrival="read_back"),
    "relaxed arrival": KernelOptions(arrival="relaxed"),
    "counters 4 bytes apart": _released(counter_stride=1),
    "no proxy fence": _released(proxy_fence=False),
    "2 slots": _released(slots=2),
    "4 warps": _released(consumer_warps=4),
    "12 warps": _released(consumer_warps=12),
    "default L2 policy": _released(evict_first=False),
}
"""Ways of doing a hand-off, each against the default."""

HANDOFF_CELLS = tuple(
    cell
    for cell in SHIPPED_CELLS
    if cell.skeleton.order == ("QKV", "ATT", "UP", "DOWN", "O")
    and not cell.skeleton.load_after_wait
    and (cell.skeleton.free or cell.key in {(40, 0), (40, 1000), (None, 1000)})
)


@dataclass(frozen=True)
class Case:
    """A table to be timed, and by how many a launch's milliseconds are divided."""

    name: str
    built: LinearTable
    work: Work
    options: KernelOptions = field(default_factory=_released)
    parts: int = 1


def cases(num_sms: int) -> Iterator[Case]:
    """Everything that is timed as a table, on a card of `num_sms`."""
    for cell in (*SHIPPED_CELLS, *RING_CELLS):
        yield _skeleton_case("default", cell, num_sms)
    for title, options in HANDOFF_VARIANTS.items():
        for cell in HANDOFF_CELLS:
            yield _skeleton_case(title, cell, num_sms, options)
    for cell in STREAMING_CELLS:
        yield _even_case(f"streaming | {cell.name}", cell.even, num_sms)
    for arrival in ("release", "read_back"):
        options = KernelOptions(arrival=arrival)
        for title, even in HAND_OFFS.items():
            name = f"hand-off | {arrival.replace('_', ' ')}, {title}"
            yield _even_case(name, even, num_sms, HAND_OFF_PHASES, options)
    # From L2, where lines stay; and no release waits for copies that other phases have in flight.
    kept = KernelOptions(arrival="relaxed", evict_first=False)
    for title, even in ISSUES.items():
        yield _even_case(f"issue | {title}", even, num_sms, ISSUE_PHASES * ISSUE_COPIES, kept)
    for title, even in CONSUMES.items():
        yield _even_case(f"consume | {title}", even, num_sms, CONSUME_PHASES, kept)


def _skeleton_case(group: str, cell: SkeletonCell, num_sms: int, options: KernelOptions | None = None) -> Case:
    return Case(f"{group} | {cell.name}", cell.build(num_sms), skeleton_work(cell), options or _released())


def _even_case(name: str, even: Even, num_sms: int, parts: int = 1, options: KernelOptions | None = None) -> Case:
    return Case(name, even.build(num_sms), even_work(even), options or _released(), parts)


def microbench(chip: HardwareSpec, *, rounds: int = 7) -> Record:
    """Measure the present card; what hangs there ends alone. ConfigError when it is not one of `chip`'s kind."""
    card = read_card()
    found = reasons(card, num_sms=chip.num_sms, architecture=chip.architecture, shared_bytes=0)
    if found:
        raise ConfigError("\n".join(found))
    bench = LinearBench(chip)
    tables = list(cases(chip.num_sms))
    compile_ahead((bench.specialization(case.built, case.options) for case in tables), chip.architecture)
    timed: dict[str, Timed] = {}
    for case in tables:
        timed[case.name] = _divided(bench.load(case.built, case.options, case.work).time_ms, case.parts)
    signals = SignalBench(chip, bench.arena)
    timed |= {signal.name: signals.timed(signal) for signal in SIGNALS}
    parts = {
        "turns of a signal": TURNS,
        "phases of a hand-off": HAND_OFF_PHASES,
        "copies of an issue": ISSUE_PHASES * ISSUE_COPIES,
        "phases of a consume": CONSUME_PHASES,
    }
    faults: dict[str, Fault] = {}
    samples = take({name: tolerant(name, each, faults) for name, each in timed.items()}, rounds=rounds)
    return record("microbench", card, samples, bytes=bench.num_bytes, **parts).model_copy(update={"faults": faults})


def _divided(timed: Timed, parts: int) -> Timed:
    return lambda: timed() / parts
