"""The time of a whole step from one run of a shorter one: what a search asks thousands of times.

Owns the extrapolation, of layers and of the head: once the irregular first layers are behind, every stretch of layers
takes as long as the one before, and the head's weights stream at one rate. One run is half the price of the two that
`predict_few_layers` makes, and steadier, since its layers share one start and one end; but it tells only a time,
where those tell what the time is spent on. Called by the tuner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.build import BuiltStep, assemble
from megakernel.hardware import HardwareSpec
from megakernel.kinds import TaskKind
from megakernel.model import BF16_BYTES, ModelSpec
from megakernel.tiling import UNIT_ROWS, Choices
from megakernel.workload import Bucket, Workload
from simulator.few_layers import irregular_layers, repeat_period, stretch_layers, truncated
from simulator.routing import mean_state
from simulator.step_run import StepRun, run_step

STRETCHES = 2
"""Stretches run after the irregular layers: the first still feels the start."""

HEAD_WAVES = 3
"""Tasks of the head that every SM has at least: in the first it still waits for the layers, in the last it runs dry."""


@dataclass(frozen=True)
class Shortened:
    """A step without some of its layers and some of its head: `left_out` stretches of `stretch` layers, and bytes."""

    step: BuiltStep
    stretch: int
    left_out: int
    left_out_head_bytes: int


def shorten(model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> Shortened:
    """Lower the step that an estimate runs. The head's tasks are fewer and as long as before; choices must be legal."""
    stretch = stretch_layers(model)
    needed = irregular_layers(model, repeat_period(model)) + STRETCHES * stretch
    left_out = max(model.num_layers - needed, 0) // stretch
    few = truncated(model, model.num_layers - left_out * stretch)
    whole = min(choices.cut.head, model.vocab_size // UNIT_ROWS)  # a task has a unit at least
    tasks = whole - chip.num_sms * max(whole // chip.num_sms - HEAD_WAVES, 0)
    if tasks < whole:
        few = few.model_copy(update={"vocab_size": model.vocab_size // UNIT_ROWS * tasks // whole * UNIT_ROWS})
        choices = choices.model_copy(update={"cut": choices.cut.model_copy(update={"head": tasks})})
    step = assemble(few, bucket, choices, chip.num_sms)
    head_bytes = (model.vocab_size - few.vocab_size) * model.hidden_size * BF16_BYTES
    return Shortened(step, stretch, left_out, head_bytes)


def estimate_step_ns(
    model: ModelSpec,
    bucket: Bucket,
    choices: Choices,
    chip: HardwareSpec,
    workload: Workload,
    arrival: Arrival = DEFAULT_ARRIVAL,
) -> float:
    """Step time with mean routing; what is too short to leave anything out is run whole. Choices must be legal."""
    return estimate_ns(shorten(model, bucket, choices, chip), chip, workload, arrival)


def estimate_ns(short: Shortened, chip: HardwareSpec, workload: Workload, arrival: Arrival = DEFAULT_ARRIVAL) -> float:
    """`estimate_step_ns` of a step that was shortened before."""
    run = run_step(short.step, chip, mean_state(short.step.model, workload), arrival=arrival)
    total_ns, stretch = run.result.total_ns, short.stretch
    if short.left_out:
        ends = _layer_ends(run)
        total_ns += short.left_out * float((ends[-stretch:] - ends[-2 * stretch : -stretch]).mean())
    if short.left_out_head_bytes:
        total_ns += short.left_out_head_bytes / _head_bytes_per_ns(run)
    return total_ns


def _layer_ends(run: StepRun) -> npt.NDArray[np.float64]:
    """When the last task of each layer ended."""
    layer_of_op = np.array([op.layer for op in run.step.graph.ops])
    layer_of = layer_of_op[run.lowered.op_of]
    ends = np.concatenate([np.frombuffer(times.end_ns) for times in run.result.sms])
    found = np.zeros(run.step.model.num_layers)
    inside = layer_of >= 0
    np.maximum.at(found, layer_of[inside], ends[inside])
    return found


def _head_bytes_per_ns(run: StepRun) -> float:
    """How fast the head's weights landed on all SMs: those of the second task of each, since its first had."""
    is_head = np.array([op.kind is TaskKind.HEAD for op in run.step.graph.ops])[run.lowered.op_of]
    landed = np.concatenate([np.frombuffer(times.landed_ns) for times in run.result.sms])[is_head]
    num_bytes = run.lowered.cost.load_bytes[run.lowered.task_of[is_head]]
    sm_of = np.repeat(np.arange(len(run.result.sms)), np.diff(run.step.table.offsets))[is_head]
    is_first = np.diff(sm_of, prepend=-1) > 0
    second = np.nonzero(is_first[:-1] & ~is_first[1:])[0] + 1
    return float(num_bytes[second].mean() / (landed[second] - landed[second - 1]).mean()) * len(run.result.sms)
