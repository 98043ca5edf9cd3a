"""A plan's table in one live state as a simulator program: the front end for task tables.

Owns the translation of packed records into the simulator's: waits as they stand in the table, bytes from
`megakernel.cost`, serial work from the chip's `work`. Refuses to place or to wire anything. Called by `predict`.

A step is simulated alone, from an empty ring: waits for the previous step (lag 1) are met when it begins, as they are
in the first step of a launch. In a long chain a step's first copies are issued while the previous one samples, so a
chained step is a little faster, by less than its first hand-off and the time to fill a ring.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.recfunctions import repack_fields

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.build import BuiltStep
from megakernel.cost import LiveState, TaskCost, price_bytes
from megakernel.counters import NONE
from megakernel.graph import Op
from megakernel.hardware import HardwareSpec
from megakernel.kinds import TaskKind
from megakernel.model import BF16_BYTES, ModelSpec, RoutedMlp
from megakernel.table import read_waits
from megakernel.workspace import RECORD_SLOTS
from simulator.program import Label, Program, Record, Ring, Signal, Wait
from simulator.turns import FETCHING, Turns

_SIGNALS = ["arrive", "early", "num_load_waits", "num_run_waits", "load_waits", "run_waits"]

_STREAM_READERS = frozenset({TaskKind.PROJECT, TaskKind.UP, TaskKind.HEAD})
"""Products over the normalised stream: what one of them has staged, the next one of the same layer finds."""

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Lowered:
    """A program, and per record in list order, SM after SM: its operator and its task number."""

    program: Program
    cost: TaskCost
    op_of: Numbers
    task_of: Numbers


def lower_program(step: BuiltStep, state: LiveState, chip: HardwareSpec, arrival: Arrival = DEFAULT_ARRIVAL) -> Lowered:
    """Translate the table of `step` in `state`; equal records become one object."""
    table, ring = step.table, step.choices.ring
    tasks = table.records["task"].astype(np.int64)
    op_of = np.repeat(np.arange(len(step.graph.ops)), [len(op.tasks) for op in step.graph.ops])[tasks]
    cost = price_bytes(step, state)
    columns = (
        range(len(tasks)),
        op_of.tolist(),
        cost.load_bytes[tasks].tolist(),
        cost.read_bytes[tasks].tolist(),
        _signal_numbers(table.records),
    )
    translation = _Translation(step, state, chip)
    sms = tuple(
        tuple(translation.sm(zip(*(column[begin:end] for column in columns), strict=True)))
        for begin, end in pairwise(table.offsets.tolist())
    )
    shared = Ring(ring.copy_bytes, ring.stages, ring.in_flight_cap_bytes)
    program = Program(shared, sms, table.num_counters, arrival, RECORD_SLOTS, chip.cycles_ns(chip.work.follow))
    return Lowered(program, cost, op_of, tasks)


def _signal_numbers(records: npt.NDArray[np.void]) -> list[int]:
    """A number per record: those with the same one wait and arrive alike."""
    packed = np.ascontiguousarray(repack_fields(records[_SIGNALS]))
    numbers: dict[bytes, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in packed.view(np.dtype((np.void, packed.itemsize))).tolist()]


class _Demand(NamedTuple):
    """All that a record of the program depends on, beside the step's own constants."""

    op_idx: int
    load_bytes: int
    read_bytes: int
    start_cycles: float
    finds_experts: bool
    signals: int
    router_rows: int


class _Translation:
    """Walks an SM's list and knows which rows the SM has staged; keeps one object per distinct record."""

    def __init__(self, step: BuiltStep, state: LiveState, chip: HardwareSpec) -> None:
        rows, work = len(state.positions), chip.work
        self._records = step.table.records
        self._ops = step.graph.ops
        self._known: dict[tuple[int, int, int, float, bool, int, int], Record] = {}
        self._rows_of = [_staged_rows(op) for op in self._ops]
        self._routed_layer = [op.layer if _is_routed(step.model, op) else -1 for op in self._ops]
        self._start = [work.start_cycles(op.kind, rows) * _times(op) for op in self._ops]
        self._router, self._topk, self._finish = (
            work.with_rows(cycles, rows) if cycles else 0.0 for cycles in (work.router, work.topk, work.finish)
        )
        self._copy_bytes = step.choices.ring.copy_bytes
        self._router_row_bytes = step.model.hidden_size * BF16_BYTES
        self._router_rows = (
            step.table.records["router_end"].astype(np.int64) - step.table.records["router_begin"]
        ).tolist()
        self._topk += work.ids
        self._plan = work.plan
        self._ns = chip.cycles_ns
        self._router_row = work.router_row
        self._turns = Turns(step, chip)

    def sm(self, rows: Iterable[tuple[int, int, int, int, int]]) -> Iterator[Record]:
        """Records of one SM, from number, operator, bytes and signals of each."""
        staged: Hashable = None
        topk_layer = -1
        for idx, op_idx, load_bytes, activation_bytes, signals in rows:
            cycles, read_bytes = self._start[op_idx], activation_bytes
            needed = self._rows_of[op_idx]
            if not load_bytes and (needed is not None or not read_bytes):
                cycles, read_bytes = 0.0, 0  # a share that finds nothing to do
            elif needed is not None:
                if needed == staged:
                    cycles, read_bytes = 0.0, 0
                staged = needed
            layer = self._routed_layer[op_idx]
            finds_experts = layer >= 0 and layer != topk_layer
            if finds_experts:
                topk_layer = layer
            router_rows = self._router_rows[idx]
            demand = op_idx, load_bytes, read_bytes, cycles, finds_experts, signals, router_rows
            record = self._known.get(demand)
            if record is None:
                record = self._known[demand] = self._record(self._records[idx], _Demand(*demand))
            yield record

    def _record(self, packed: np.void, demand: _Demand) -> Record:
        op = self._ops[demand.op_idx]
        early, arrive = int(packed["early"]), int(packed["arrive"])
        start_ns = self._ns(demand.start_cycles)
        signal = self._signal(early, start_ns, demand.router_rows) if early != NONE else None
        load_waits = _met_in_this_step(packed, "load")
        is_empty = not (demand.load_bytes or demand.read_bytes)
        turn = self._turns.of(op.kind)
        return Record(
            label=Label(op.name, path=op.path.value, layer=op.layer),
            load_bytes=demand.load_bytes,
            load_waits=load_waits,
            load_work_ns=self._ns((self._plan if load_waits else 0.0) + (self._topk if demand.finds_experts else 0.0)),
            run_waits=_met_in_this_step(packed, "run"),
            signal=signal,
            work_ns=0.0 if signal else start_ns,
            warp_ns=turn.warp_ns,
            fetch_ns=turn.fetch_ns,
            turn=turn.copies,
            compute_ns=0.0 if is_empty else self._ns(self._finish),
            other_bytes=0 if op.kind in FETCHING else demand.read_bytes,
            arrive=arrive if arrive != NONE else None,
        )

    def _signal(self, counter: int, start_ns: float, rows: int) -> Signal:
        """The early signal of a task's router rows, which come in copies of as many whole rows as fit."""
        copies = -(-rows * self._router_row_bytes // self._copy_bytes)
        copy_ns = self._ns(self._router) * rows / copies if copies else 0.0
        return Signal(counter, start_ns + self._ns(self._router_row), copies, copy_ns)


def _met_in_this_step(packed: np.void, phase: str) -> tuple[Wait, ...]:
    return tuple(Wait(wait.counter, wait.need) for wait in read_waits(packed, phase) if wait.lag == 0)


def _staged_rows(op: Op) -> Hashable:
    """What a product's staged rows are called; they stay until others are staged. None for kinds that stage none."""
    if op.kind in _STREAM_READERS:
        return ("stream", op.layer, *op.buffers[:2])
    return None


def _times(op: Op) -> int:
    """How often a task starts anew: a merge at every head, others once."""
    return max(task.end - task.begin for task in op.tasks) if op.kind is TaskKind.MERGE else 1


def _is_routed(model: ModelSpec, op: Op) -> bool:
    return op.kind in {TaskKind.UP, TaskKind.DOWN} and isinstance(model.layers[op.layer].mlp, RoutedMlp)
