"""The measured cells of an H200 as streaming programs, and how well the simulator meets them.

Owns the translation of tests/data/*.csv into programs and the figures that the accuracy bars are stated in. Used by
tests/accuracy and by tests/accuracy/fit_h200.py.
"""

import csv
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean

from megakernel.hardware import HardwareSpec
from simulator.points import EvenPoint, SkeletonPoint
from simulator.result import Result
from simulator.simulate import simulate
from simulator.stream import StreamProgram, stream_records

DATA = Path(__file__).parents[1] / "data"
CHIP = Path(__file__).parents[2] / "configs" / "hardware" / "h200.toml"
LAYERS = 49
SMS = 132
# The steps are periodic: one short run gives the time of a layer, between the ends of two of its last.
RUN, SETTLED = 9, 5
HELD_OUT_COPY_BYTES = 4096
HELD_OUT_ORDER = "QKV ATT UP DOWN O"
HELD_OUT_STRIDE = 5  # and every fifth of the other cells


@dataclass(frozen=True)
class Cell:
    """One row of a data set."""

    number: int
    copy_bytes: int
    ring_stages: int
    cap_kb: int | None
    work_cycles: int | None  # None: no dependency at all
    ms: float
    copies: int = 0  # streaming set: copies per phase
    phases: int = 0
    order: str = ""  # skeleton set
    loads: str = ""

    @property
    def group(self) -> tuple[object, ...]:
        """All that is equal between cells that differ in cap or in order alone."""
        return (self.copy_bytes, self.phases, self.loads, self.work_cycles)

    @property
    def is_held_out(self) -> bool:
        """Whether the constants were fitted without this cell."""
        return (
            self.copy_bytes == HELD_OUT_COPY_BYTES
            or self.order == HELD_OUT_ORDER
            or self.number % HELD_OUT_STRIDE == HELD_OUT_STRIDE - 1
        )

    def program(self, layers: int) -> StreamProgram:
        """Describe the step with another number of layers."""
        if self.order:
            after_wait = self.loads == "load_after_wait"
            order = tuple(self.order.split())
            return SkeletonPoint(order, after_wait, self.cap_kb, self.work_cycles).program(layers)
        ring = (self.copy_bytes, self.ring_stages)
        return EvenPoint(*ring, self.phases, self.copies, self.cap_kb, self.work_cycles).program(layers)


def load_cells() -> list[Cell]:
    """Read both data sets, in file order."""
    with (DATA / "streaming-h200.csv").open() as file:
        streaming = [
            Cell(
                number=0,
                copy_bytes=int(row["copy_bytes"]),
                ring_stages=int(row["ring_stages"]),
                cap_kb=_number(row["in_flight_cap_kb"]),
                work_cycles=_number(row["work_cycles"]),
                ms=float(row["ms"]),
                copies=int(row["copies_per_dependency"]),
                phases=int(row["dependencies_per_layer"]),
            )
            for row in csv.DictReader(file)
        ]
    with (DATA / "skeleton-h200.csv").open() as file:
        skeleton = [
            Cell(
                number=0,
                copy_bytes=8192,
                ring_stages=25,
                cap_kb=_number(row["in_flight_cap_kb"]),
                work_cycles=_number(row["work_cycles"]),
                ms=float(row["ms"]),
                order=row["order"],
                loads=row["loads"],
            )
            for row in csv.DictReader(file)
        ]
    return [replace(cell, number=number) for number, cell in enumerate(streaming + skeleton)]


def _number(text: str) -> int | None:
    return None if text in {"", "none"} else int(text)


def simulated_ms(cell: Cell, chip: HardwareSpec, *, exact: bool = False) -> float:
    """Time of the whole step, from a short run."""
    stream = cell.program(RUN)
    found = simulate(stream_records(stream, chip, arrival="release"), chip, exact=exact)
    settled, last = (_layer_end_ns(found, layer, len(stream.phases)) for layer in (SETTLED, RUN))
    return (found.total_ns + (last - settled) / (RUN - SETTLED) * (LAYERS - RUN)) / 1e6


def _layer_end_ns(found: Result, layers: int, phases: int) -> float:
    """When the SMs had done so many layers, on average."""
    return fmean(sm.end_ns[layers * phases - 1] for sm in found.sms)


def simulate_cells(
    cells: Sequence[Cell], chip: HardwareSpec, *, exact: bool = False, processes: int = 2
) -> list[float]:
    """Simulate many cells on a few processes; the order and the results don't depend on how many."""
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(partial(simulated_ms, chip=chip, exact=exact), cells, chunksize=4))


@dataclass(frozen=True)
class Figures:
    """How a set of simulated times compares with the measured ones; errors are relative."""

    errors: dict[int, float]
    capped_mape: float
    mape: float
    share_within_8_percent: float
    worst: float
    cap_pairs: tuple[int, int]  # ordered right, of all that differ by more than 2%
    order_pairs: tuple[int, int]

    def __str__(self) -> str:
        """One line per figure."""
        caps, orders = self.cap_pairs, self.order_pairs
        return "\n".join((
            f"cells {len(self.errors)}: MAPE {self.mape:.2%}, of capped cells {self.capped_mape:.2%}",
            f"within 8%: {self.share_within_8_percent:.1%}, worst {self.worst:.1%}",
            f"pairs of caps that differ by more than 2%: {caps[0]} of {caps[1]} ordered right",
            f"pairs of orders that differ by more than 2%: {orders[0]} of {orders[1]} ordered right",
        ))  # fmt: skip


def figures(cells: Sequence[Cell], found_ms: Sequence[float]) -> Figures:
    """Compare."""
    ms = {cell.number: found for cell, found in zip(cells, found_ms, strict=True)}
    errors = {cell.number: ms[cell.number] / cell.ms - 1 for cell in cells}
    size = [abs(error) for error in errors.values()]
    capped = [abs(errors[cell.number]) for cell in cells if cell.cap_kb is not None]
    return Figures(
        errors=errors,
        capped_mape=sum(capped) / len(capped) if capped else 0.0,
        mape=sum(size) / len(size),
        share_within_8_percent=sum(each <= 0.08 for each in size) / len(size),
        worst=max(size),
        cap_pairs=_pairs(cells, ms, lambda cell: (cell.group, cell.order), lambda cell: cell.cap_kb),
        order_pairs=_pairs(
            [cell for cell in cells if cell.order],
            ms,
            lambda cell: (cell.group, cell.cap_kb),
            lambda cell: cell.order,
        ),
    )


def _pairs(
    cells: Iterable[Cell],
    ms: dict[int, float],
    same: Callable[[Cell], object],
    differs: Callable[[Cell], object],
) -> tuple[int, int]:
    right = total = 0
    for one, other in itertools.combinations(cells, 2):
        if same(one) != same(other) or differs(one) == differs(other):
            continue
        if max(one.ms, other.ms) / min(one.ms, other.ms) <= 1.02:
            continue
        total += 1
        right += (one.ms < other.ms) == (ms[one.number] < ms[other.number])
    return right, total
