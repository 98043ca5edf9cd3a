"""The time of a whole step from one run of its first layers: what a search asks thousands of times.

Owns the extrapolation: once the irregular first layers are behind, every stretch of layers takes as long as the one
before, so the layers left out take as long as the last stretch, over and over. One run is half the price of the two
that `predict_few_layers` makes, and steadier, since its layers share one start and one end; but it tells only a time,
where those tell what the time is spent on. Called by the tuner.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.build import assemble
from megakernel.hardware import HardwareSpec
from megakernel.model import ModelSpec
from megakernel.tiling import Choices
from megakernel.workload import Bucket, Workload
from simulator.few_layers import irregular_layers, repeat_period, stretch_layers, truncated
from simulator.routing import mean_state
from simulator.step_run import StepRun, run_step

STRETCHES = 3
"""Stretches run after the irregular layers: the first still feels the start. 0.25% rms from all layers on North."""


def estimate_step_ns(
    model: ModelSpec,
    bucket: Bucket,
    choices: Choices,
    chip: HardwareSpec,
    workload: Workload,
    arrival: Arrival = DEFAULT_ARRIVAL,
) -> float:
    """Step time with mean routing; of a model too short to leave layers out, all are run. Choices must be legal."""
    stretch = stretch_layers(model)
    needed = irregular_layers(model, repeat_period(model)) + STRETCHES * stretch
    left_out = max(model.num_layers - needed, 0) // stretch
    few = truncated(model, model.num_layers - left_out * stretch)
    step = assemble(few, bucket, choices, chip.num_sms)
    run = run_step(step, chip, mean_state(few, workload), arrival=arrival)
    if not left_out:
        return run.result.total_ns
    ends = _layer_ends(run)
    return run.result.total_ns + left_out * float((ends[-stretch:] - ends[-2 * stretch : -stretch]).mean())


def _layer_ends(run: StepRun) -> npt.NDArray[np.float64]:
    """When the last task of each layer ended."""
    layer_of_op = np.array([op.layer for op in run.step.graph.ops])
    layer_of = layer_of_op[run.lowered.op_of]
    ends = np.concatenate([np.frombuffer(times.end_ns) for times in run.result.sms])
    found = np.zeros(run.step.model.num_layers)
    inside = layer_of >= 0
    np.maximum.at(found, layer_of[inside], ends[inside])
    return found
