"""What every lowering function shares: the inputs, the buffers made so far, and tasks already cut for an equal layer.

Layers of one shape differ only in the buffers that their slots mean, so their tasks are built once and shared; that is
what makes lowering 49 layers cheap, and lets `hazards` and `verify` reuse what they found about a pair of operators.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from megakernel.graph import Access, Box, Buffer, Op, Task, When
from megakernel.kinds import KINDS, Path, TaskKind
from megakernel.model import ModelSpec
from megakernel.tiling import Choices
from megakernel.workload import ROW_TILE, Bucket

BF16 = 2
FP32 = 4
INT32 = 4

ABSENT = -1
"""Slot of a buffer that this operator does without (no MLP output before the first layer)."""


@dataclass
class Lowering:
    """State of one lowering; made and dropped inside `lower`."""

    model: ModelSpec
    bucket: Bucket
    choices: Choices
    buffers: list[Buffer] = field(default_factory=list[Buffer])
    ops: list[Op] = field(default_factory=list[Op])
    _cut: dict[Hashable, tuple[Task, ...]] = field(default_factory=dict[Hashable, tuple[Task, ...]])

    @property
    def rows(self) -> int:
        """Row slots of the bucket."""
        return self.bucket.rows

    def buffer(self, name: str, shape: tuple[int, ...], element_bytes: int, *, read_only: bool = False) -> int:
        """Declare a buffer; its index."""
        self.buffers.append(Buffer(name, shape, element_bytes, read_only))
        return len(self.buffers) - 1

    def weights(self, name: str, units: int, unit_rows: int, columns: int) -> int:
        """Declare packed weights: `units` contiguous units of `unit_rows` x `columns` elements."""
        return self.buffer(name, (units, unit_rows, columns), BF16, read_only=True)

    def shape(self, buffer: int) -> tuple[int, ...]:
        """Shape of a buffer already declared."""
        return self.buffers[buffer].shape

    def tasks(self, key: Hashable, cut: Callable[[], list[Task]]) -> tuple[Task, ...]:
        """The tasks of `cut()`, or those that an operator with an equal key already has."""
        if key not in self._cut:
            self._cut[key] = tuple(cut())
        return self._cut[key]

    def add(
        self,
        name: str,
        kind: TaskKind,
        layer: int,
        slots: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]],
        tasks: tuple[Task, ...],
        path: Path | None = None,
    ) -> None:
        """Append an operator; `slots` are its inputs, outputs and other buffers."""
        inputs, outputs, others = slots
        self.ops.append(
            Op(
                name=name,
                kind=kind,
                path=path or KINDS[kind].path,
                layer=layer,
                buffers=inputs + outputs + others,
                num_inputs=len(inputs),
                num_outputs=len(outputs),
                tasks=tasks,
            )
        )

    def row_tile(self, tile: int) -> tuple[int, int]:
        """Rows of one tile of eight."""
        return tile * ROW_TILE, min((tile + 1) * ROW_TILE, self.rows)


def whole(shape: tuple[int, ...]) -> Box:
    """Box of all of a buffer."""
    return tuple((0, extent) for extent in shape)


def read(slot: int, box: Box, when: When = When.RUN, *, partitioned: bool = False) -> Access:
    """A read access."""
    return Access(slot, box, when, write=False, partitioned=partitioned)


def write(slot: int, box: Box, when: When = When.RUN, *, partitioned: bool = False) -> Access:
    """A write access."""
    return Access(slot, box, when, write=True, partitioned=partitioned)


def grid_boxes(begin: int, end: int, inner: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Rectangles (outer range, inner range) that a range of row-major indices `outer * inner + i` covers."""
    boxes: list[tuple[tuple[int, int], tuple[int, int]]] = []
    while begin < end:
        outer, offset = divmod(begin, inner)
        if offset == 0 and end - begin >= inner:
            last = end // inner
            boxes.append(((outer, last), (0, inner)))
            begin = last * inner
        else:
            stop = min(end, (outer + 1) * inner)
            boxes.append(((outer, outer + 1), (offset, offset + stop - begin)))
            begin = stop
    return boxes
