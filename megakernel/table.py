"""The task table: packed records of every SM, one thing that simulator, verifier, interpreter and kernel all read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.abi import (
    ABI_VERSION,
    HEADER,
    MAX_INPUTS,
    MAX_LOAD_WAITS,
    MAX_OUTPUTS,
    MAX_RUN_WAITS,
    RECORD,
    TABLE_MAGIC,
)
from megakernel.config import ConfigError
from megakernel.counters import NONE, Wait, Wiring
from megakernel.graph import Op, TaskGraph
from megakernel.kinds import KINDS
from megakernel.placement import Schedule
from megakernel.tiling import Choices
from megakernel.workload import Bucket

Records = npt.NDArray[np.void]


@dataclass(frozen=True)
class TaskTable:
    """Records in list order, SM after SM: `offsets[sm]` is `sm`'s first, `totals` are arrivals a step per counter."""

    header: npt.NDArray[np.void]
    offsets: npt.NDArray[np.uint32]
    totals: npt.NDArray[np.uint32]
    records: Records

    @property
    def num_sms(self) -> int:
        """Lists of records."""
        return len(self.offsets) - 1

    @property
    def num_counters(self) -> int:
        """Counters."""
        return len(self.totals)

    def sm_records(self, sm: int) -> Records:
        """Records of one SM."""
        return self.records[self.offsets[sm] : self.offsets[sm + 1]]

    def to_bytes(self) -> bytes:
        """Serialised table: header, offsets, totals, records."""
        return b"".join(part.tobytes() for part in (self.header, self.offsets, self.totals, self.records))

    @property
    def digest(self) -> str:
        """`sha256:...` of the serialised table."""
        return f"sha256:{hashlib.sha256(self.to_bytes()).hexdigest()}"

    @staticmethod
    def from_bytes(data: bytes) -> TaskTable:
        """Read `to_bytes()`; ConfigError when the data are not a whole table of this ABI."""
        if len(data) < HEADER.dtype.itemsize:
            raise ConfigError(f"a task table of {len(data)} bytes, needed at least {HEADER.dtype.itemsize}")
        header = np.frombuffer(data, HEADER.dtype, count=1)
        if header["magic"][0] != TABLE_MAGIC or header["abi_version"][0] != ABI_VERSION:
            raise ConfigError(f"not a task table of ABI version {ABI_VERSION}; lower the plan again")
        sms, counters, records = (int(header[name][0]) for name in ("num_sms", "num_counters", "num_records"))
        sizes = (4 * (sms + 1), 4 * counters, RECORD.dtype.itemsize * records)
        if len(data) != HEADER.dtype.itemsize + sum(sizes):
            raise ConfigError(
                f"a task table of {len(data)} bytes, its header says {HEADER.dtype.itemsize + sum(sizes)}"
            )
        at = HEADER.dtype.itemsize
        offsets = np.frombuffer(data, "<u4", count=sms + 1, offset=at)
        if offsets[0] != 0 or offsets[-1] != records or (np.diff(offsets.astype(np.int64)) < 0).any():
            raise ConfigError(f"the lists' offsets must rise from 0 to the {records} records; the table was damaged")
        totals = np.frombuffer(data, "<u4", count=counters, offset=at + sizes[0])
        return TaskTable(
            header,
            offsets,
            totals,
            np.frombuffer(data, RECORD.dtype, count=records, offset=at + sizes[0] + sizes[1]),
        )


def read_waits(record: np.void, phase: str) -> list[Wait]:
    """Waits of one record; `phase` is `load` or `run`."""
    waits = record[f"{phase}_waits"]
    return [
        Wait(int(wait["counter"]), int(wait["lag"]), int(wait["need"]))
        for wait in waits[: int(record[f"num_{phase}_waits"])]
    ]


def pack(graph: TaskGraph, schedule: Schedule, wiring: Wiring, bucket: Bucket, choices: Choices) -> TaskTable:
    """Pack the records of a placed and wired graph."""
    order = np.array([task for tasks in schedule.sms for task in tasks], dtype=np.int64)
    records = operand_records(graph)
    _write_signals(records, wiring)
    lengths = [len(tasks) for tasks in schedule.sms]
    header = np.zeros(1, HEADER.dtype)
    ring = choices.ring
    values = {
        "magic": TABLE_MAGIC,
        "abi_version": ABI_VERSION,
        "num_sms": len(schedule.sms),
        "num_records": len(order),
        "num_counters": len(wiring.totals),
        "num_buffers": len(graph.buffers),
        "rows": bucket.rows,
        "max_context_tokens": bucket.max_context_tokens,
        "copy_bytes": ring.copy_bytes,
        "ring_stages": ring.stages,
        "in_flight_cap_bytes": ring.in_flight_cap_bytes or 0,
        "chunk_tokens": choices.rounding.chunk_tokens,
        "page_tokens": choices.rounding.page_tokens,
        "project_k_splits": choices.rounding.project_k_splits,
    }
    for name, value in values.items():
        header[name] = value
    return TaskTable(
        header,
        np.concatenate([[0], np.cumsum(lengths)]).astype("<u4"),
        np.array(wiring.totals, dtype="<u4"),
        records[order],
    )


def operand_records(graph: TaskGraph) -> Records:
    """Records of all tasks in reference order, without their signals."""
    op_of = np.repeat(np.arange(len(graph.ops)), [len(op.tasks) for op in graph.ops])
    records = np.zeros(len(op_of), RECORD.dtype)
    shared: dict[int, Records] = {}
    for first, op in zip(graph.first_task, graph.ops, strict=True):
        if id(op.tasks) not in shared:
            shared[id(op.tasks)] = _task_records(op)
        records[first : first + len(op.tasks)] = shared[id(op.tasks)]
    of_ops = {
        "kind": [op.kind for op in graph.ops],
        "layer": [op.layer if op.layer >= 0 else NONE for op in graph.ops],
        "hold_copies": [KINDS[op.kind].hold_copies for op in graph.ops],
        "inputs": [_slots(op.buffers[: op.num_inputs], MAX_INPUTS) for op in graph.ops],
        "outputs": [_slots(op.buffers[op.num_inputs :][: op.num_outputs], MAX_OUTPUTS) for op in graph.ops],
    }
    for name, values in of_ops.items():
        records[name] = np.array(values)[op_of]
    records["task"] = np.arange(len(records))
    return records


def _task_records(op: Op) -> Records:
    block = np.zeros(len(op.tasks), RECORD.dtype)
    names = (
        "begin",
        "end",
        "share",
        "shares",
        "router_begin",
        "router_end",
        "row_tile_begin",
        "row_tile_count",
    )
    for name in names:
        block[name] = [getattr(task, name) for task in op.tasks]
    return block


def _slots(buffers: tuple[int, ...], length: int) -> list[int]:
    assert len(buffers) <= length, f"{len(buffers)} buffers, the record holds {length}"
    return [buffer if buffer >= 0 else NONE for buffer in buffers] + [NONE] * (length - len(buffers))


def _write_signals(records: Records, wiring: Wiring) -> None:
    """Fill in waits and arrivals; many records have the same object for them."""
    distinct = list({id(each): each for each in wiring.signals}.values())
    numbers = {id(each): number for number, each in enumerate(distinct)}
    number_of = np.array([numbers[id(each)] for each in wiring.signals])
    records["early"] = np.array([signals.early for signals in distinct])[number_of]
    records["arrive"] = np.array([signals.arrive for signals in distinct])[number_of]
    for phase, limit in (("load", MAX_LOAD_WAITS), ("run", MAX_RUN_WAITS)):
        waits = [getattr(signals, f"{phase}_waits") for signals in distinct]
        counts = np.array([len(each) for each in waits])
        assert counts.max() <= limit, f"a task with {counts.max()} {phase} waits, the record holds {limit}"
        records[f"num_{phase}_waits"] = counts[number_of]
        table = np.zeros((len(distinct), limit), records.dtype[f"{phase}_waits"].base)
        for row, each in enumerate(waits):
            for slot, wait in enumerate(each):
                table[row, slot] = (wait.counter, wait.lag, wait.need)
        records[f"{phase}_waits"] = table[number_of]
