"""The choices of a plan: how operators are cut, how the ring is run, in which order and where tasks are placed.

`Rounding` holds the choices that change a sum's order: one per model, shared by all buckets, so that a row's tokens
never depend on the bucket it is served in. Everything else is free per bucket. What is legal is said in `limits`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from megakernel.config import Frozen

UNIT_ROWS = 16
"""Rows of one stored weight unit: the M of `mma.m16n8k16`. Tasks are cut in whole units, never inside one."""

TILE_COLUMNS = 32
"""Columns of one stored tile of a unit: two K steps of the matrix instruction, 1 KB with its 16 rows."""

PAIRED_COLUMNS = UNIT_ROWS // 2
"""Columns of the gated product in one unit of the up weights: 8 gate rows and the 8 up rows that meet them."""


MAX_TASKS = 32768
"""Tasks of one operator: more than the units of any operator but a huge head, few enough to lower and prove."""

MAX_PARTS = 64
"""Parts that an order may cut an operator into."""


class Rounding(Frozen):
    """Choices that all buckets of a model share: those that change rounding, and the page of the KV cache.

    Attention is cut in chunks at absolute positions and their partial results are merged in ascending order, so
    that the shares themselves are free. `project_k_splits` cuts Q, K, V products by K; partial sums are added in
    ascending order by their reader. A chunk is whole pages, so that one task alone reads and appends to a page.
    `slice_columns` is the longest stretch of K that is summed in one accumulator; see `slice_of`.
    """

    chunk_tokens: int = Field(default=128, ge=16, le=65536)
    project_k_splits: int = Field(default=1, ge=1, le=8)
    page_tokens: int = Field(default=64, ge=16, le=65536)
    slice_columns: int = Field(default=256, ge=TILE_COLUMNS, le=256)


class Cut(Frozen):
    """Number of tasks that each operator is cut into (units are dealt as evenly as whole units allow)."""

    project: int = Field(ge=1, le=MAX_TASKS)
    attend: int = Field(ge=1, le=MAX_TASKS)
    merge: int = Field(ge=1, le=MAX_TASKS)
    output: int = Field(ge=1, le=MAX_TASKS)
    up: int = Field(ge=1, le=MAX_TASKS)
    down: int = Field(ge=1, le=MAX_TASKS)
    head: int = Field(ge=1, le=MAX_TASKS)
    route: int = Field(default=8, ge=1, le=MAX_TASKS)


class Ring(Frozen):
    """The weight ring of every SM: stages of one copy each, and the cap on bytes requested but not landed."""

    copy_bytes: int = Field(ge=1024)
    stages: int = Field(ge=2)
    in_flight_cap_bytes: int | None = None

    @property
    def bytes(self) -> int:
        """Shared memory that the stages take."""
        return self.copy_bytes * self.stages


class Segment(Frozen):
    """Part `part` of `parts` of an operator's tasks, as it stands in a layer's order."""

    op: str
    part: int = Field(default=1, ge=1)
    parts: int = Field(default=1, ge=1, le=MAX_PARTS)

    @staticmethod
    def parse(text: str) -> Segment:
        """Read `up` or `up:1/2`; raises ValueError with the expected form."""
        op, _, cut = text.partition(":")
        if not cut:
            return Segment(op=op)
        part, slash, parts = cut.partition("/")
        if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts) <= MAX_PARTS):
            raise ValueError(
                f"segment is {text!r}, needed NAME or NAME:PART/PARTS such as up:1/2, of at most {MAX_PARTS} parts"
            )
        return Segment(op=op, part=int(part), parts=int(parts))


class Interleave(Frozen):
    """Order of a layer's phases in every SM's list, and which SMs take part.

    `policy` deals tasks `balanced` (to the SM with the fewest bytes so far) or `round_robin` (task k to SM k mod n with
    a cursor that carries over). `attention_sms` reserves that many SMs for attend, merge and output, and the rest for
    the MLP path; `takeover_percent` of each phase's tasks, its last ones, may still go to any SM. `loads` starts a
    task's copies `ahead` of its run wait, or only `after_wait`.
    """

    order: tuple[str, ...] = Field(min_length=1)
    policy: Literal["balanced", "round_robin"] = "balanced"
    loads: Literal["ahead", "after_wait"] = "ahead"
    attention_sms: int | None = Field(default=None, ge=1)
    takeover_percent: int = Field(default=0, ge=0, le=100)
    router_with_project: bool = True

    @field_validator("order")
    @classmethod
    def _segments_parse(cls, order: tuple[str, ...]) -> tuple[str, ...]:
        for text in order:
            Segment.parse(text)
        return order

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The order, parsed."""
        return tuple(Segment.parse(text) for text in self.order)


class Counters(Frozen):
    """How arrivals are counted: those of an operator in `words` words of memory, its readers waiting for each.

    Arrivals on one word are served one after another; a word more is a wait more in every reader's record.
    """

    words: int = Field(default=1, ge=1, le=4)


class Choices(Frozen):
    """All that a plan decides for one bucket."""

    rounding: Rounding = Rounding()
    cut: Cut
    ring: Ring
    interleave: Interleave
    counters: Counters = Counters()


def slice_of(columns: int, rounding: Rounding) -> int:
    """Columns of the slices that a product over `columns` of K is summed in: whole tiles, equal, as long as allowed.

    Slices are summed in ascending order, whatever copies bring them and whichever warps take them.
    """
    tiles = columns // TILE_COLUMNS
    return TILE_COLUMNS * max(
        count for count in range(1, rounding.slice_columns // TILE_COLUMNS + 1) if tiles % count == 0
    )


def deal(units: int, tasks: int) -> list[tuple[int, int]]:
    """Cut `units` into at most `tasks` non-empty ranges that differ by at most one unit."""
    tasks = min(tasks, units)
    return [(units * task // tasks, units * (task + 1) // tasks) for task in range(tasks)]
