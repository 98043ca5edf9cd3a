"""Operators, their tasks and the buffer regions that tasks read and write; pure data, built by `lowering`.

A task's accesses name a *slot* of its operator's buffer list, so that layers of one shape share one tuple of tasks.
The order of `TaskGraph.ops` is the reference order: running every task in it, one at a time, defines the result that
any placement has to keep. `hazards` derives what must wait for what; `verify` proves that a table does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from megakernel.kinds import Path, TaskKind

Box = tuple[tuple[int, int], ...]
"""Half-open range per dimension."""


class When(IntEnum):
    """Phase of a task in which an access happens.

    A LOAD access lasts from the load wait until the copy has landed, known only when the run has ended; an EARLY one is
    over at the early signal; a RUN one at the arrival.
    """

    LOAD = 0
    EARLY = 1
    RUN = 2


@dataclass(frozen=True, slots=True)
class Buffer:
    """A device array. `read_only` buffers (weights) are never written by a step; `element_bytes` is for sizing."""

    name: str
    shape: tuple[int, ...]
    element_bytes: int
    read_only: bool = False

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        size = self.element_bytes
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Access:
    """One region that a task touches.

    `partitioned` marks a region that the tasks of one operator divide among themselves by arithmetic on live state: its
    box is the whole, tasks of that operator don't meet in it within a step, and everybody else's accesses do.
    """

    slot: int
    box: Box
    when: When
    write: bool = False
    partitioned: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    """One tile or one share. `begin, end` are static units; `share, shares` find theirs on the device.

    `weight` is the integer that placement balances: bytes streamed at the bucket's nominal state.
    """

    accesses: tuple[Access, ...]
    weight: int
    begin: int = 0
    end: int = 0
    share: int = 0
    shares: int = 0
    router_begin: int = 0
    router_end: int = 0
    row_tile_begin: int = 0
    row_tile_count: int = 1

    @property
    def signals_early(self) -> bool:
        """Whether the task publishes something before its end."""
        return self.router_end > self.router_begin


@dataclass(frozen=True, slots=True)
class Op:
    """One operator of one layer (layer -1: outside the layers): tasks, and the buffers that their slots mean.

    Slots are inputs first, then outputs (these two stand in the records; -1 is an absent one), then weights and KV.
    """

    name: str
    kind: TaskKind
    path: Path
    layer: int
    buffers: tuple[int, ...]
    num_inputs: int
    num_outputs: int
    tasks: tuple[Task, ...]

    @property
    def title(self) -> str:
        """Name with layer, for people."""
        return self.name if self.layer < 0 else f"L{self.layer}.{self.name}"


@dataclass(frozen=True)
class TaskGraph:
    """A whole decode step."""

    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]

    @property
    def num_tasks(self) -> int:
        """Tasks of all operators."""
        return sum(len(op.tasks) for op in self.ops)

    @property
    def first_task(self) -> tuple[int, ...]:
        """Number of each operator's first task; tasks are numbered through the step in reference order."""
        firsts: list[int] = []
        total = 0
        for op in self.ops:
            firsts.append(total)
            total += len(op.tasks)
        return tuple(firsts)

    def task_title(self, op_idx: int, task_idx: int) -> str:
        """`L3.up[17]`, for people."""
        return f"{self.ops[op_idx].title}[{task_idx}]"
