"""The search's estimate from few layers stays with the prediction from all of them."""

import pytest
from support import north
from support.predicting import choices_for, qwen, short_step

from megakernel.workload import Bucket, Workload
from simulator.estimate import estimate_step_ns
from simulator.few_layers import truncated
from simulator.predict import predict

ONE_ROW = Workload(contexts=(8192,))


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_an_estimate_is_near_the_whole_step(name):
    model = truncated(north.model(), 25)
    whole = predict(short_step(name, layers=25), north.chip(), ONE_ROW).total_ns
    estimate = estimate_step_ns(model, north.BUCKET, choices_for(model, name), north.chip(), ONE_ROW)
    assert estimate == pytest.approx(whole, rel=0.01)
    assert estimate != whole


def test_a_sequential_block_is_estimated_too():
    bucket, workload = Bucket(rows=1, max_context_tokens=4096, nominal_context_tokens=2048), Workload(contexts=(2048,))
    model = truncated(qwen(), 20)
    whole = predict(short_step(model=qwen(), layers=20, bucket=bucket), north.chip(), workload).total_ns
    assert estimate_step_ns(model, bucket, choices_for(model, "hand"), north.chip(), workload) == pytest.approx(
        whole, rel=0.01
    )


def test_a_model_without_layers_to_leave_out_is_run_whole():
    step = short_step(layers=6)
    estimate = estimate_step_ns(step.model, step.bucket, step.choices, north.chip(), ONE_ROW)
    assert estimate == predict(step, north.chip(), ONE_ROW).total_ns
