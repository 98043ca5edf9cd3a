"""One reference function per task kind: what its load brings and what its run does, from the packed record alone.

A load returns what the copies would have put into shared memory (device-built unit lists, old KV); weights never
change, so runs read them in place. A run of a kind with an early part is called twice.
"""

from __future__ import annotations

from collections.abc import Callable

from megakernel.kinds import TaskKind
from runtime.reference.attention import (
    AttendUnit,
    find_units,
    run_attend,
    run_merge,
    run_output,
    run_project,
    run_router,
)
from runtime.reference.ends import run_embed, run_head, run_sample
from runtime.reference.memory import Memory
from runtime.reference.mlp import Routed, find_routed, run_down, run_up
from runtime.reference.operands import Operands
from runtime.weights import Weights

Loaded = list[AttendUnit] | Routed | None

_LOADS: dict[TaskKind, Callable[[Operands, Memory], Loaded]] = {
    TaskKind.ATTEND: find_units,
    TaskKind.UP: find_routed,
    TaskKind.DOWN: find_routed,
}

_RUNS: dict[TaskKind, Callable[[Operands, Memory, Weights, Loaded], None]] = {
    TaskKind.EMBED: run_embed,
    TaskKind.PROJECT: run_project,
    TaskKind.ATTEND: run_attend,
    TaskKind.MERGE: run_merge,
    TaskKind.OUTPUT: run_output,
    TaskKind.UP: run_up,
    TaskKind.DOWN: run_down,
    TaskKind.HEAD: run_head,
    TaskKind.SAMPLE: run_sample,
}


def load(operands: Operands, memory: Memory) -> Loaded:
    """What the copies and the producer's arithmetic leave in shared memory."""
    find = _LOADS.get(operands.kind)
    return find(operands, memory) if find else None


def run(operands: Operands, memory: Memory, weights: Weights, loaded: Loaded, *, early: bool) -> None:
    """The run of a task, or only its early part."""
    if early:
        run_router(operands, memory, weights)
    else:
        _RUNS[operands.kind](operands, memory, weights, loaded)
