"""The search's estimate from few layers stays with the prediction from all of them."""

import pytest
from support import north
from support.predicting import choices_for, qwen, short_step

from megakernel.build import build_step
from megakernel.kinds import TaskKind
from megakernel.model import BF16_BYTES
from megakernel.tiling import UNIT_ROWS
from megakernel.workload import Bucket, Workload
from simulator.estimate import HEAD_WAVES, estimate_step_ns, shorten
from simulator.few_layers import truncated
from simulator.predict import predict

ONE_ROW = Workload(contexts=(8192,))


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_an_estimate_is_near_the_whole_step(name):
    model = truncated(north.model(), 25)
    whole = predict(short_step(name, layers=25), north.chip(), ONE_ROW).total_ns
    estimate = estimate_step_ns(model, north.BUCKET, choices_for(model, name), north.chip(), ONE_ROW)
    assert estimate == pytest.approx(whole, rel=0.005)
    assert estimate != whole


def test_a_sequential_block_is_estimated_too():
    bucket, workload = Bucket(rows=1, max_context_tokens=4096, nominal_context_tokens=2048), Workload(contexts=(2048,))
    model = truncated(qwen(), 20)
    whole = predict(short_step(model=qwen(), layers=20, bucket=bucket), north.chip(), workload).total_ns
    assert estimate_step_ns(model, bucket, choices_for(model, "hand"), north.chip(), workload) == pytest.approx(
        whole, rel=0.005
    )


def test_what_is_too_short_to_leave_anything_out_is_run_whole():
    step = short_step(layers=6)
    cut = step.choices.cut.model_copy(update={"head": HEAD_WAVES * step.table.num_sms + 100})
    choices = step.choices.model_copy(update={"cut": cut})
    whole = build_step(step.model, step.bucket, choices, north.chip())
    short = shorten(step.model, step.bucket, choices, north.chip())
    assert (short.left_out, short.left_out_head_bytes) == (0, 0)
    assert short.step.table.digest == whole.table.digest
    estimate = estimate_step_ns(step.model, step.bucket, choices, north.chip(), ONE_ROW)
    assert estimate == predict(whole, north.chip(), ONE_ROW).total_ns


@pytest.mark.parametrize("tasks", [528, 1000, 2000])
def test_a_shorter_head_has_fewer_tasks_of_the_same_size_and_tells_the_same_time(tasks):
    step = short_step(layers=3)
    choices = step.choices.model_copy(update={"cut": step.choices.cut.model_copy(update={"head": tasks})})
    whole = build_step(step.model, step.bucket, choices, north.chip())
    short = shorten(step.model, step.bucket, choices, north.chip())
    sizes = [
        {task.weight for op in each.graph.ops if op.kind is TaskKind.HEAD for task in op.tasks}
        for each in (whole, short.step)
    ]
    unit_bytes = UNIT_ROWS * step.model.hidden_size * BF16_BYTES
    assert max(sizes[0] | sizes[1]) - min(sizes[0] | sizes[1]) <= unit_bytes
    weights = [each.model.vocab_size * each.model.hidden_size * BF16_BYTES for each in (whole, short.step)]
    assert short.left_out_head_bytes == weights[0] - weights[1] > 0
    found = estimate_step_ns(step.model, step.bucket, choices, north.chip(), ONE_ROW)
    assert found == pytest.approx(predict(whole, north.chip(), ONE_ROW).total_ns, rel=0.01)
