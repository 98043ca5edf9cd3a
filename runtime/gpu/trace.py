"""A traced step as a Timeline, the type that the simulator writes: one axis of nanoseconds for all SMs.

Owns the mapping of every SM's cycles onto the card's timer. Each SM noted its clock at two ticks of that timer, at its
start and at its end; between them its cycles are evenly long. Pure: arrays in, timeline out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.counters import NONE
from megakernel.kinds import KINDS, TaskKind
from megakernel.table import TaskTable
from megakernel.timeline import TaskSpan, Timeline
from runtime.gpu.postmortem import TaskTitles

TIMES = ("load_start", "landed", "run_wait", "run_start", "end")


@dataclass(frozen=True)
class TraceData:
    """What one traced step left: a record per task in list order, and each SM's clocks."""

    tasks: np.ndarray
    clocks: np.ndarray


def to_ns(table: TaskTable, trace: TraceData) -> dict[str, npt.NDArray[np.float64]]:
    """Times of every record in list order, nanoseconds since the first load of the step."""
    clocks = trace.clocks
    cycles = (clocks["end_cycles"] - clocks["begin_cycles"]).astype(np.float64)
    per_cycle = (clocks["end_ns"] - clocks["begin_ns"]).astype(np.float64) / np.maximum(cycles, 1.0)
    begin = (clocks["begin_ns"] - clocks["begin_ns"].min()).astype(np.float64)
    sm = np.repeat(np.arange(table.num_sms), np.diff(table.offsets.astype(np.int64)))
    times = {name: begin[sm] + trace.tasks[name].astype(np.float64) * per_cycle[sm] for name in TIMES}
    # A task without copies has no landing of its own.
    times["landed"] = np.where(trace.tasks["copies"] > 0, times["landed"], times["load_start"])
    zero = float(times["load_start"].min(initial=np.inf))
    return {name: values - zero for name, values in times.items()}


def to_timeline(table: TaskTable, titles: TaskTitles, trace: TraceData, source: str) -> Timeline:
    """Spans of the traced step."""
    times = to_ns(table, trace)
    spans: list[TaskSpan] = []
    for sm in range(table.num_sms):
        for row in range(int(table.offsets[sm]), int(table.offsets[sm + 1])):
            record = table.records[row]
            kind = TaskKind(int(record["kind"]))
            layer = int(record["layer"])
            spans.append(
                TaskSpan(
                    sm=sm,
                    task=int(record["task"]),
                    title=titles.task(int(record["task"])),
                    kind=kind.name.lower(),
                    path=KINDS[kind].path,
                    layer=-1 if layer == NONE else layer,
                    load_start_ns=float(times["load_start"][row]),
                    landed_ns=float(times["landed"][row]),
                    run_wait_ns=float(times["run_wait"][row]),
                    run_start_ns=float(times["run_start"][row]),
                    end_ns=float(times["end"][row]),
                )
            )
    return Timeline(source, tuple(spans))


def handoffs(table: TaskTable, trace: TraceData) -> dict[str, npt.NDArray[np.float64]]:
    """Per run wait of the traced step, all records: nanoseconds from the last awaited arrival to the run's start.

    Only waits that the run really waited for count: those whose last arrival came after the record was there.
    """
    times = to_ns(table, trace)
    records = table.records
    counters = table.num_counters
    last = np.full(counters, -np.inf)
    for counter in range(counters):
        arriving = records["arrive"] == counter
        if arriving.any():
            last[counter] = times["end"][arriving].max()
    used = records["num_run_waits"] > 0
    waits = records["run_waits"]["counter"]
    slots = np.arange(waits.shape[1])[None, :] < records["num_run_waits"][:, None]
    met = np.where(slots & (records["run_waits"]["lag"] == 0), last[np.minimum(waits, counters - 1)], -np.inf).max(
        axis=1
    )
    waited = used & (met > times["run_wait"]) & np.isfinite(met)
    return {
        "handoff": (times["run_start"] - met)[waited],
        "run": (times["end"] - times["run_start"])[waited],
        "landed": (times["landed"] - times["run_start"])[waited],
    }
