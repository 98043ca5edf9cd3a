"""The streaming skeleton of a step, whose measured times ship as tests/data/skeleton-h200.csv.

Owns the skeleton's phases, counts and dependencies. Every SM streams the same copies of every phase from one arena.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.table import Records
from megakernel.tiling import Ring
from runtime.gpu.linear import LinearTable, LinearTitles, for_all, linear_table, phase_record, set_waits

LAYERS = 49
HEAD_COPIES = 993
COPIES = {"QKV": 20, "UP": 46, "ATT": 8, "DOWN": 23, "O": 16}
"""Copies of 8 KB per SM and layer: the bytes of a North Mini Code MoE layer with a full window at batch 1."""

COPY_BYTES = 8192

KIND = {
    "QKV": TaskKind.PROJECT,
    "UP": TaskKind.UP,
    "ATT": TaskKind.ATTEND,
    "DOWN": TaskKind.DOWN,
    "O": TaskKind.OUTPUT,
    "HEAD": TaskKind.HEAD,
}

WAITS = {"QKV": ("O", "DOWN"), "ATT": ("QKV",), "O": ("ATT",), "DOWN": ("UP",), "UP": ()}
"""Phases that a phase's consumers wait for; QKV's are the previous layer's."""

TOP_K_CYCLES = ROUTER_CYCLES = 1000


@dataclass(frozen=True)
class Skeleton:
    """One cell: order of the phases, ring, whether loads wait too, and whether anything waits at all."""

    order: tuple[str, ...]
    ring: Ring
    load_after_wait: bool = False
    free: bool = False


def build_skeleton(skeleton: Skeleton, num_sms: int, layers: int = LAYERS) -> LinearTable:
    """Table of a skeleton."""
    column = _Column(skeleton, num_sms, layers)
    for layer in range(layers):
        for phase in skeleton.order:
            column.phase(layer, phase)
    column.head()
    names = (*(f"L{layer}.{phase}" for layer in range(layers) for phase in skeleton.order), "HEAD")
    totals = np.full(0 if skeleton.free else len(column.titles), num_sms, "<u4")
    table = linear_table(for_all(column.rows, num_sms), totals, num_sms, skeleton.ring)
    return LinearTable(table, LinearTitles(names, column.titles, num_sms))


class _Column:
    """Records of one SM; all SMs have the same."""

    def __init__(self, skeleton: Skeleton, num_sms: int, layers: int) -> None:
        self.skeleton, self.num_sms, self.layers = skeleton, num_sms, layers
        places = [(layer, phase) for layer in range(layers) for phase in (*skeleton.order, "ROUTER")]
        self.counters = {place: idx for idx, place in enumerate(places)}
        self.titles = tuple(f"L{layer}.{phase}" for layer, phase in places)
        self.scale = skeleton.ring.copy_bytes / COPY_BYTES
        self.rows: list[Records] = []
        self.wanted = 0  # copies of 8 KB so far
        self.copies = 0  # copies of this ring so far, which round the running total: nothing is lost

    def phase(self, layer: int, phase: str) -> None:
        before = layer - 1 if phase == "QKV" else layer
        runs = [self.counters[before, other] for other in WAITS[phase] if before >= 0]
        loads = [self.counters[layer, "ROUTER"]] if phase == "UP" else []
        if self.skeleton.load_after_wait:
            loads, runs = loads + runs, []
        early = self.counters[layer, "ROUTER"] if phase == "QKV" else NONE
        self._record(KIND[phase], layer, COPIES[phase], (loads, runs), (early, self.counters[layer, phase]))

    def head(self) -> None:
        last = [self.counters[self.layers - 1, phase] for phase in ("O", "DOWN")]
        self._record(KIND["HEAD"], NONE, HEAD_COPIES, ([], last), (NONE, NONE))

    def _record(
        self,
        kind: TaskKind,
        layer: int,
        wanted: int,
        waits: tuple[list[int], list[int]],
        signals: tuple[int, int],
    ) -> None:
        self.wanted += wanted
        end = round(self.wanted / self.scale)
        row = phase_record(kind, layer, self.copies, end)
        self.copies = end
        if not self.skeleton.free:
            row["early"], row["arrive"] = signals
            for name, counters in zip(("load", "run"), waits, strict=True):
                set_waits(row, name, [(counter, self.num_sms) for counter in counters])
        self.rows.append(row)


@dataclass(frozen=True)
class SkeletonCell:
    """A skeleton and its cycles of work after every wait."""

    skeleton: Skeleton
    work_cycles: int = 0

    def build(self, num_sms: int) -> LinearTable:
        """Its table."""
        return build_skeleton(self.skeleton, num_sms)

    @property
    def key(self) -> tuple[int | None, int]:
        """Cap in KB and work."""
        cap = self.skeleton.ring.in_flight_cap_bytes
        return (cap // 1024 if cap else None, self.work_cycles)

    @property
    def name(self) -> str:
        """Order, loads, cap and work as in the shipped data set, and the ring where it is another."""
        skeleton, ring = self.skeleton, self.skeleton.ring
        order = " ".join(skeleton.order)
        other = "" if ring.copy_bytes == COPY_BYTES else f",{ring.copy_bytes} B x {ring.stages}"
        if skeleton.free:
            return f"{order},free,,{other}"
        loads = "load_after_wait" if skeleton.load_after_wait else "load_ahead"
        return f"{order},{loads},{self.key[0] or ''},{self.work_cycles}{other}"


def _shipped_cells() -> Iterator[SkeletonCell]:
    for order in SHIPPED_ORDERS:
        yield SkeletonCell(Skeleton(order, SHIPPED_RING, free=True))
        for after_wait, caps in ((False, (32, 40, 48, 64, 96, None)), (True, (64, None))):
            for cap in caps:
                ring = SHIPPED_RING.model_copy(update={"in_flight_cap_bytes": cap * 1024 if cap else None})
                for work in (0, 1000, 2000, 4000):
                    yield SkeletonCell(Skeleton(order, ring, load_after_wait=after_wait), work)


def _ring_cells() -> Iterator[SkeletonCell]:
    order = SHIPPED_ORDERS[2]
    for copy_bytes, stages, cap in ((4096, 50, 40), (16384, 12, 48), (16384, 12, 64), (32768, 6, 64)):
        ring = Ring(copy_bytes=copy_bytes, stages=stages, in_flight_cap_bytes=cap * 1024)
        for work in (0, 1000):
            yield SkeletonCell(Skeleton(order, ring), work)


SHIPPED_RING = Ring(copy_bytes=COPY_BYTES, stages=25)
SHIPPED_ORDERS = (
    ("QKV", "UP", "ATT", "DOWN", "O"),
    ("QKV", "ATT", "O", "UP", "DOWN"),
    ("QKV", "ATT", "UP", "DOWN", "O"),
)
SHIPPED_CELLS = tuple(_shipped_cells())
"""The cells of tests/data/skeleton-h200.csv."""

RING_CELLS = tuple(_ring_cells())
"""Other copy sizes."""
