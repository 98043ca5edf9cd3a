"""Tables without a model: lists of copies of one arena, with counters between, which the kernel's linear walk runs.

Owns how a program of phases becomes records that the kernel, the trace and the post-mortem read like any other. All
lists walk the same phases. What phases there are is the business of `skeleton` and `even`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megakernel.abi import ABI_VERSION, HEADER, RECORD, TABLE_MAGIC
from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.table import Records, TaskTable
from megakernel.tiling import Ring


@dataclass(frozen=True)
class LinearTitles:
    """Names by number: tasks are numbered phase after phase, in each all SMs."""

    phases: tuple[str, ...]
    counters: tuple[str, ...]
    num_sms: int

    def task(self, number: int) -> str:
        """A task's name."""
        phase, sm = divmod(number, self.num_sms)
        return f"{self.phases[phase]}[{sm}]"

    def counter(self, index: int) -> str:
        """A counter's name."""
        return f"counter {index} ({self.counters[index]})"


@dataclass(frozen=True)
class LinearTable:
    """A table, its names, and the bytes of the arena that it reads."""

    table: TaskTable
    titles: LinearTitles

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that the walk touches."""
        header = self.table.header
        return int(self.table.records["end"].max()) * self.table.num_sms * int(header["copy_bytes"][0])


def phase_record(kind: TaskKind, layer: int, begin: int, end: int) -> Records:
    """One phase of one list, [1]: copies `begin` to `end` of the list's own, and nothing to wait for or to announce."""
    row = np.zeros(1, RECORD.dtype)
    row["kind"], row["layer"], row["hold_copies"] = kind, layer, 1
    row["begin"], row["end"] = begin, end
    row["inputs"] = row["outputs"] = row["early"] = row["arrive"] = NONE
    return row


def set_waits(row: Records, name: str, waits: Sequence[tuple[int, int]]) -> None:
    """Write the waits of this launch's step, (counter, need) each; `name` is `load` or `run`."""
    row[f"num_{name}_waits"] = len(waits)
    for slot, (counter, need) in enumerate(waits):
        row[f"{name}_waits"][0, slot] = (counter, 0, need)


def for_all(rows: Sequence[Records], num_sms: int) -> Records:
    """Records of all lists, [SMs * phases]: list after list, the same phases in each."""
    one = np.concatenate(rows)
    records = np.tile(one, num_sms)
    records["task"] = np.tile(np.arange(len(one)) * num_sms, num_sms) + np.repeat(np.arange(num_sms), len(one))
    return records


def linear_table(records: Records, totals: np.ndarray, num_sms: int, ring: Ring) -> TaskTable:
    """The table of `records`, which are as many for every SM."""
    header = np.zeros(1, HEADER.dtype)
    values = {
        "magic": TABLE_MAGIC,
        "abi_version": ABI_VERSION,
        "num_sms": num_sms,
        "num_records": len(records),
        "num_counters": len(totals),
        "copy_bytes": ring.copy_bytes,
        "ring_stages": ring.stages,
        "in_flight_cap_bytes": ring.in_flight_cap_bytes or 0,
    }
    for name, value in values.items():
        header[name] = value
    offsets = np.arange(num_sms + 1, dtype="<u4") * (len(records) // num_sms)
    return TaskTable(header, offsets.astype("<u4"), totals.astype("<u4"), records)
