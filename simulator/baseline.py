"""What a step costs without a megakernel: one kernel per operator, launched from a graph, with the same tiles.

Owns the baseline that a plan is compared with. Every operator of the step's graph is a kernel of its own: its tasks are
dealt round robin to as many SMs as it has tasks, at most all; an SM walks its tasks as the megakernel does, with the
same ring and no in-flight cap, since no signal has to pass; nothing is loaded before the kernel starts, and it ends
when its last SM does. Between two kernels lies the gap that was measured inside a graph. So ramp, drain and grid-wide
sync are those of the simulator's own model, and the step is the sum: equal kernels are simulated once. What a block
does before its first copy, streams side by side and launches that overlap the kernel before are not modelled. Called by
`whatif`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel.build import BuiltStep
from megakernel.cost import LiveState, price_bytes
from megakernel.graph import Op
from megakernel.hardware import HardwareSpec
from megakernel.kinds import TaskKind
from megakernel.model import RoutedMlp
from simulator.program import Label, Program, Record, Ring
from simulator.simulate import simulate
from simulator.turns import Turns
from simulator.walk import Numbers

GRAPH_GAP_NS = 560.0
"""From one kernel's end to the next one's start inside a CUDA graph, measured on an H200."""

_STAGED_ONCE = frozenset({TaskKind.PROJECT, TaskKind.OUTPUT, TaskKind.UP, TaskKind.DOWN, TaskKind.HEAD})
"""Kinds whose input rows an SM stages once for all its tasks of a kernel."""


@dataclass(frozen=True)
class KernelStep:
    """A step of kernels: `gaps_ns` between them, `stream_ns` that their bytes take at the streaming rate."""

    total_ns: float
    kernels: int
    gaps_ns: float
    stream_ns: float


def kernel_step(
    step: BuiltStep, chip: HardwareSpec, state: LiveState, *, gap_ns: float = GRAPH_GAP_NS, exact: bool = False
) -> KernelStep:
    """Simulate `step` as one kernel per operator; its placement and waits are not used."""
    cost = price_bytes(step, state)
    known: dict[tuple[str, bytes, bytes], float] = {}
    total = 0.0
    for first, op in zip(step.graph.first_task, step.graph.ops, strict=True):
        tasks = slice(first, first + len(op.tasks))
        loads, reads = cost.load_bytes[tasks], cost.read_bytes[tasks]
        key = (op.name, loads.tobytes(), reads.tobytes())
        if key not in known:
            program = _kernel(step, op, chip, loads, reads, len(state.positions))
            known[key] = simulate(program, chip, exact=exact).total_ns
        total += known[key]
    kernels = len(step.graph.ops)
    gaps = gap_ns * (kernels - 1)
    return KernelStep(total + gaps, kernels, gaps, cost.streamed_bytes / chip.ceiling_bytes_per_ns(chip.num_sms))


def _kernel(step: BuiltStep, op: Op, chip: HardwareSpec, loads: Numbers, reads: Numbers, rows: int) -> Program:
    work = chip.work
    start_ns, finish_ns = (
        chip.cycles_ns(work.start_cycles(op.kind, rows)),
        chip.cycles_ns(work.with_rows(work.finish, rows)),
    )
    row_ns = chip.cycles_ns(work.with_rows(work.router, rows))  # of the router, by all warps
    mlp = step.model.layers[op.layer].mlp
    finds_experts = op.layer >= 0 and op.kind in {TaskKind.UP, TaskKind.DOWN} and isinstance(mlp, RoutedMlp)
    topk_ns = chip.cycles_ns(work.with_rows(work.topk, rows)) if finds_experts else 0.0
    num_sms = min(chip.num_sms, len(op.tasks))
    turn = Turns(step, chip).of(op.kind)
    label = Label(op.name, path=op.path.value, layer=op.layer)
    lists: list[list[Record]] = [[] for _ in range(num_sms)]
    for idx, (load_bytes, read_bytes) in enumerate(zip(loads.tolist(), reads.tolist(), strict=True)):
        mine = lists[idx % num_sms]
        staged = bool(mine) and op.kind in _STAGED_ONCE
        nothing = not load_bytes and (op.kind in _STAGED_ONCE or not read_bytes)
        before_ns = 0.0 if staged or nothing else start_ns
        router_rows = op.tasks[idx].router_end - op.tasks[idx].router_begin
        mine.append(
            Record(
                label=label,
                load_bytes=load_bytes,
                load_work_ns=0.0 if mine else topk_ns,
                work_ns=before_ns + router_rows * row_ns,
                warp_ns=turn.warp_ns,
                fetch_ns=turn.fetch_ns,
                turn=turn.copies,
                compute_ns=0.0 if nothing else finish_ns,
                other_bytes=0 if staged or nothing else read_bytes,
            )
        )
    shared = step.choices.ring
    return Program(Ring(shared.copy_bytes, shared.stages), tuple(map(tuple, lists)), 0)
