"""One simulated run of a step in one live state, and its timeline.

Owns the way from a built step to simulated times of its tasks. Refuses to interpret them: that is `breakdown`. Called
by `predict` and by the `simulator` command for traces.
"""

from __future__ import annotations

from dataclasses import dataclass

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.build import BuiltStep
from megakernel.cost import LiveState
from megakernel.hardware import HardwareSpec
from megakernel.timeline import TaskSpan, Timeline
from simulator.lowered import Lowered, lower_program
from simulator.result import Result
from simulator.simulate import simulate


@dataclass(frozen=True)
class StepRun:
    """A step, the program that it became, and what the simulation left behind."""

    step: BuiltStep
    chip: HardwareSpec
    lowered: Lowered
    result: Result

    def timeline(self) -> Timeline:
        """Spans of all tasks, by SM and position in its list, which is the order of their starts."""
        graph, lowered = self.step.graph, self.lowered
        operators: list[int] = lowered.op_of.tolist()
        tasks: list[int] = lowered.task_of.tolist()
        records = zip(operators, tasks, strict=True)
        first_task = graph.first_task
        spans: list[TaskSpan] = []
        for sm, times in enumerate(self.result.sms):
            for idx in range(len(times.end_ns)):
                op_idx, task = next(records)
                op = graph.ops[op_idx]
                spans.append(
                    TaskSpan(
                        sm=sm,
                        task=task,
                        title=graph.task_title(op_idx, task - first_task[op_idx]),
                        kind=op.name,
                        path=op.path,
                        layer=op.layer,
                        load_start_ns=times.load_start_ns[idx],
                        landed_ns=times.landed_ns[idx],
                        run_wait_ns=times.run_wait_start_ns[idx],
                        run_start_ns=times.run_start_ns[idx],
                        end_ns=times.end_ns[idx],
                    )
                )
        return Timeline(f"simulated on {self.chip.name}", tuple(spans))


def run_step(
    step: BuiltStep,
    chip: HardwareSpec,
    state: LiveState,
    *,
    exact: bool = False,
    arrival: Arrival = DEFAULT_ARRIVAL,
) -> StepRun:
    """Simulate `step` in `state`; ProgramError when the chip has fewer SMs or the table stops for ever."""
    lowered = lower_program(step, state, chip, arrival)
    return StepRun(step, chip, lowered, simulate(lowered.program, chip, exact=exact))
