"""Tables of equal phases: the streaming data set of tests/data/streaming-h200.csv, and single costs of the loop.

In every phase every SM streams equally many copies; then it arrives, and its consumers begin the next phase once all
SMs have, with some cycles of work before its first copy is used. The first phase waits for nothing and works on
nothing. Loads run as far ahead as the ring lets them. Owns which cells there are. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megakernel.abi import MAX_RUN_WAITS
from megakernel.config import ConfigError
from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.tiling import Ring
from runtime.gpu.linear import LinearTable, LinearTitles, for_all, linear_table, phase_record, set_waits
from runtime.gpu.skeleton import LAYERS

FIRST, NEXT = TaskKind.EMBED, TaskKind.PROJECT
"""Kinds of the first phase and of all others: work is by kind, and the first has none."""


@dataclass(frozen=True)
class Even:
    """A program of equal phases; `num_sms` None is the whole card.

    `copies` are of every SM in every phase. Without `work_cycles` nothing waits for anything. SM b arrives on word
    b mod `words` of a phase's counters, and waits for all. With `again` every phase reads the same bytes, which a card
    then keeps in L2.
    """

    ring: Ring
    phases: int
    copies: int
    work_cycles: int | None = None
    words: int = 1
    again: bool = False
    num_sms: int | None = None

    def build(self, num_sms: int) -> LinearTable:
        """Its table on a card of `num_sms`; ConfigError when an SM can't wait for so many words."""
        sms = self.num_sms or num_sms
        if not 1 <= self.words <= min(sms, MAX_RUN_WAITS):
            raise ConfigError(f"words is {self.words}, needed 1 to {min(sms, MAX_RUN_WAITS)}: an SM waits for all")
        needs = np.bincount(np.arange(sms) % self.words)
        rows = [self._row(phase, needs) for phase in range(self.phases)]
        records = for_all(rows, sms)
        totals = np.zeros(0, "<u4")
        if self.work_cycles is not None:
            records["arrive"] += np.repeat(np.arange(sms) % self.words, self.phases).astype(records["arrive"].dtype)
            totals = np.tile(needs, self.phases)
        names = tuple(f"P{phase}" for phase in range(self.phases))
        counters = tuple(f"P{phase}, word {word}" for phase in range(self.phases) for word in range(self.words))
        return LinearTable(linear_table(records, totals, sms, self.ring), LinearTitles(names, counters, sms))

    def _row(self, phase: int, needs: np.ndarray) -> np.ndarray:
        begin = 0 if self.again else phase * self.copies
        row = phase_record(NEXT if phase else FIRST, NONE, begin, begin + self.copies)
        if self.work_cycles is not None:
            row["arrive"] = phase * self.words
            before = (phase - 1) * self.words
            set_waits(row, "run", [(before + word, int(need)) for word, need in enumerate(needs)] if phase else [])
        return row


@dataclass(frozen=True)
class StreamingCell:
    """A row of the streaming data set: 49 layers of `phases` each."""

    ring: Ring
    phases: int
    copies: int
    work_cycles: int | None

    @property
    def even(self) -> Even:
        """Its program."""
        return Even(self.ring, LAYERS * self.phases, self.copies, self.work_cycles)

    @property
    def name(self) -> str:
        """Ring, phases a layer x copies, cap in KB, work; without cap and work it is the free stream."""
        cap = self.ring.in_flight_cap_bytes
        work = ("none" if cap else "") if self.work_cycles is None else self.work_cycles
        ring = f"{self.ring.copy_bytes} B x {self.ring.stages}"
        return f"{ring},{self.phases} x {self.copies},{cap // 1024 if cap else ''},{work}"


def _streaming_cells() -> Iterator[StreamingCell]:
    for copy_bytes, stages, shapes in STREAMING_SHAPES:
        for phases, copies in shapes:
            for cap in (32, 48, 64, 80, 96, 128, None):
                ring = Ring(copy_bytes=copy_bytes, stages=stages, in_flight_cap_bytes=cap * 1024 if cap else None)
                for work in (None, 0, 1000, 2000, 4000):
                    yield StreamingCell(ring, phases, copies, work)


STREAMING_SHAPES = (
    (4096, 48, ((2, 131), (4, 65), (6, 43), (8, 32))),
    (8192, 25, ((2, 65), (4, 32), (6, 21), (8, 16))),
    (16384, 12, ((2, 32), (6, 10))),
)
"""Bytes of a copy, stages, and (phases a layer, copies in each) of the data set."""

STREAMING_CELLS = tuple(_streaming_cells())
"""The cells of tests/data/streaming-h200.csv. Its free streams and its uncapped rows without work are one program."""

HAND_OFF_PHASES = 1000
HAND_OFFS = {
    f"{sms} SM{'s' * (sms > 1)}, {words} word{'s' * (words > 1)}": Even(
        Ring(copy_bytes=8192, stages=25), HAND_OFF_PHASES, 0, 0, words=words, num_sms=sms
    )
    for sms, words in ((1, 1), (2, 1), (8, 1), (33, 1), (132, 1), (132, 2), (132, 4))
}
"""Phases without a copy: all SMs arrive, all wait for all."""

ISSUE_PHASES, ISSUE_COPIES = 64, 512


def _issue_cells() -> Iterator[tuple[str, Even]]:
    for copy_bytes, stages in ((2048, 48), (4096, 48), (8192, 25), (16384, 12)):
        for title, cap in (("no cap", None), ("a cap of all but one", copy_bytes * (stages - 1))):
            ring = Ring(copy_bytes=copy_bytes, stages=stages, in_flight_cap_bytes=cap)
            yield (
                f"{copy_bytes} B x {stages}, {title}",
                Even(ring, ISSUE_PHASES, ISSUE_COPIES, again=True, num_sms=1),
            )


ISSUES = dict(_issue_cells())
"""One SM, whose data lie in L2. The cap is too wide to wait at: what it costs is that it is asked."""

CONSUME_PHASES, CONSUME_CYCLES = 400, 10000


def _consume_cells() -> Iterator[tuple[str, Even]]:
    for copy_bytes, stages, copies in ((4096, 48, (16, 48)), (8192, 25, (8, 24)), (16384, 12, (4, 12))):
        ring = Ring(copy_bytes=copy_bytes, stages=stages)
        for count in copies:
            yield (
                f"{count} copies of {copy_bytes} B",
                Even(ring, CONSUME_PHASES, count, CONSUME_CYCLES, again=True, num_sms=1),
            )


CONSUMES = dict(_consume_cells())
"""One SM, whose consumers work for longer than the ring takes to fill; two counts tell what a landed copy takes."""
