"""Predictions: deterministic, ordered as physics orders them, and the same from few layers as from all."""

import pytest
from support import north
from support.predicting import choices_for, qwen, short_step, with_bandwidth

from megakernel.assets import asset
from megakernel.config import ConfigError, canonical_json
from megakernel.hardware import load_hardware
from megakernel.tiling import Ring
from megakernel.workload import Bucket, Routing, Workload
from runtime.gpu.specialize import KernelOptions
from simulator.breakdown import HandOff, KindTime, blend, break_down
from simulator.few_layers import runs, truncated
from simulator.predict import predict, predict_few_layers
from simulator.routing import mean_state
from simulator.step_run import run_step

ONE_ROW = Workload(contexts=(8192,))
FOUR_ROWS = Bucket(rows=4, max_context_tokens=4096, nominal_context_tokens=1024)
SMALL_RING = Ring(copy_bytes=8192, stages=18, in_flight_cap_bytes=40960)


def seconds(step, chip=None, contexts=(8192,)):
    return predict(step, chip or north.chip(), Workload(contexts=contexts)).total_ns


def test_equal_input_gives_equal_output_to_the_last_byte():
    step = short_step()
    first, second = (predict(step, north.chip(), ONE_ROW) for _ in range(2))
    assert canonical_json(first.to_json()) == canonical_json(second.to_json())
    runs_again = [run_step(step, north.chip(), mean_state(step.model, ONE_ROW)) for _ in range(2)]
    assert len({run.result.digest() for run in runs_again}) == 1
    assert len({run.timeline().to_perfetto() for run in runs_again}) == 1


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_a_faster_memory_is_never_slower(name):
    step = short_step(name, layers=3)
    times = [seconds(step, with_bandwidth(north.chip(), factor)) for factor in (0.8, 1.0, 1.25, 4.0)]
    assert times == sorted(times, reverse=True)


def test_less_work_at_hand_offs_is_faster():
    chip = north.chip()
    work = chip.work
    none = work.model_copy(update=dict.fromkeys(type(work).model_fields, 0.0))
    double = work.model_copy(update={key: 2 * getattr(work, key) for key in type(work).model_fields})
    step = short_step()
    times = [seconds(step, chip.model_copy(update={"work": each})) for each in (none, work, double)]
    assert times == sorted(times)


def test_a_chips_file_may_bring_its_own_work_with_its_source(tmp_path):
    text = asset("configs/hardware/h200.toml").read_text(encoding="utf-8")
    text = text.replace("[work]\n", "[work]\ntopk = 250.0\n")
    text = text.replace("[sources]\n", '[sources]\n"work.topk" = "a trace"\n')
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    mine = load_hardware(tmp_path / "mine.toml")
    assert mine.work == north.chip().work.model_copy(update={"topk": 250.0})
    assert seconds(short_step(), mine) < seconds(short_step())


def test_a_prediction_prices_what_the_kernel_does_unless_it_is_told_otherwise():
    step = short_step()
    priced = {
        arrival: predict(step, north.chip(), ONE_ROW, arrival=arrival).total_ns
        for arrival in ("release", "read_back", "relaxed")
    }
    assert seconds(step) == priced[KernelOptions().arrival]
    assert priced["relaxed"] < priced["read_back"] < priced["release"]


def test_longer_contexts_take_longer():
    step = short_step()
    times = [seconds(step, contexts=(tokens,)) for tokens in (1, 2048, 8192, 16384)]
    assert times == sorted(times)


def test_a_whole_step_lies_above_its_bounds_and_is_told_by_few_layers():
    full = predict(north.step(), north.chip(), ONE_ROW)
    assert full.bounds.lower_ns < full.total_ns
    assert full.tokens_per_s == pytest.approx(1e9 / full.total_ns)
    assert full.percent_of_roofline == pytest.approx(100 * full.roofline_ns / full.total_ns)
    few = predict_few_layers(north.model(), north.BUCKET, north.choices("hand"), north.chip(), ONE_ROW)
    assert few.total_ns == pytest.approx(full.total_ns, rel=0.01)
    assert few.bounds.bytes_ns == pytest.approx(full.bounds.bytes_ns)
    _agree(few.breakdown, full.breakdown)


def test_few_layers_tell_the_reference_plan_and_what_stops_it():
    reference = predict(short_step("reference", layers=17), north.chip(), ONE_ROW)
    assert reference.stopped_by.startswith("hand-offs: ")
    model = truncated(north.model(), 17)
    few = predict_few_layers(model, north.BUCKET, choices_for(model, "reference"), north.chip(), ONE_ROW)
    assert few.total_ns == pytest.approx(reference.total_ns, rel=0.01)
    _agree(few.breakdown, reference.breakdown)


def _agree(few, full):
    """Tasks and bytes by kind exactly; times by kind and hand-off to a few percent of the step."""
    assert [(kind.name, round(kind.tasks), round(kind.load_bytes)) for kind in few.kinds] == [
        (kind.name, round(kind.tasks), round(kind.load_bytes)) for kind in full.kinds
    ]
    exposed = {(off.source, off.waiter, off.phase): off.exposed_ns for off in few.hand_offs}
    for off in full.hand_offs:
        found = exposed.get((off.source, off.waiter, off.phase), 0.0)
        assert found == pytest.approx(off.exposed_ns, abs=0.02 * full.total_ns)


def test_few_layers_tell_a_sequential_block_too():
    bucket = Bucket(rows=1, max_context_tokens=4096, nominal_context_tokens=2048)
    model, workload = truncated(qwen(), 16), Workload(contexts=(2048,))
    full = predict(short_step(model=qwen(), layers=16, bucket=bucket), north.chip(), workload)
    few = predict_few_layers(model, bucket, choices_for(model, "hand"), north.chip(), workload)
    assert few.total_ns == pytest.approx(full.total_ns, rel=0.01)


def test_the_few_layers_are_whole_periods_after_the_irregular_ones():
    assert runs(north.model()) == {5: -10.0, 9: 11.0}
    assert runs(north.model(), at_least=6) == {9: -9.0, 13: 10.0}
    assert runs(truncated(north.model(), 12)) == {12: 1.0}
    assert runs(truncated(north.model(), 15)) == {7: -1.0, 11: 2.0}
    assert runs(qwen()) == {4: -10.0, 8: 11.0}
    assert runs(north.model(), at_least=60) == {49: 1.0}


def test_layers_asks_for_the_few_layer_rung():
    step = short_step(layers=13)
    short = predict(step, north.chip(), ONE_ROW, layers=1)
    same = predict_few_layers(step.model, step.bucket, step.choices, north.chip(), ONE_ROW)
    assert short == same


def test_routings_give_a_mean_and_a_p95():
    step = short_step(layers=3, bucket=FOUR_ROWS, ring=SMALL_RING)
    found = predict(step, north.chip(), Workload(contexts=(1024,) * 4), draws=6, seed=1)
    assert len(found.draws_ns) == 6
    assert min(found.draws_ns) < found.total_ns < found.p95_ns == max(found.draws_ns)
    assert found.total_ns == pytest.approx(sum(found.draws_ns) / 6)
    fewer = predict(step, north.chip(), Workload(contexts=(1024,) * 4), draws=2, seed=1)
    assert fewer.draws_ns == found.draws_ns[:2]
    skewed = Workload(contexts=(1024,) * 4, routing=Routing(kind="zipf", exponent=2.0))
    assert predict(step, north.chip(), skewed, draws=2).p95_ns < min(found.draws_ns)


def test_inactive_rows_cost_nothing_to_stream():
    step = short_step(layers=3, bucket=FOUR_ROWS, ring=SMALL_RING)
    one, four = (predict(step, north.chip(), Workload(contexts=(1024,) * rows)) for rows in (1, 4))
    assert one.total_ns < four.total_ns
    assert (one.rows, four.rows) == (1, 4)


def test_a_state_outside_the_bucket_is_refused():
    with pytest.raises(ConfigError, match="outside the bucket: 2 active rows, the bucket has 1"):
        predict(short_step(), north.chip(), Workload(contexts=(1, 1)))
    with pytest.raises(ConfigError, match="the bucket ends at 16384"):
        predict_few_layers(
            north.model(), north.BUCKET, north.choices("hand"), north.chip(), Workload(contexts=(20000,))
        )


def test_exact_mode_agrees_with_the_fast_one():
    step = short_step()
    fast, exact = (predict(step, north.chip(), ONE_ROW, exact=exact).total_ns for exact in (False, True))
    assert fast == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_a_breakdown_accounts_for_every_task_and_byte_and_exposes_no_more_than_was_waited(name):
    step = short_step(name)
    found = break_down(run_step(step, north.chip(), mean_state(step.model, ONE_ROW)))
    assert sum(kind.tasks for kind in found.kinds) == step.graph.num_tasks
    streamed = sum(kind.load_bytes for kind in found.kinds)
    assert found.memory_busy_ns == pytest.approx(streamed / north.chip().streaming_bytes_per_ns)
    busy = sum(kind.run_ns + kind.wait_ns for kind in found.kinds)
    assert 0.9 * found.total_ns < busy <= found.total_ns
    for off in found.hand_offs:
        assert -1e-6 <= off.exposed_ns <= off.waited_ns + 1e-6
    assert [off.exposed_ns for off in found.hand_offs] == sorted(
        (off.exposed_ns for off in found.hand_offs), reverse=True
    )
    pairs = {(off.source, off.waiter) for off in found.hand_offs}
    router = "project.early" if name == "hand" else "route.early"
    assert {("project", "attend"), ("attend", "merge"), ("merge", "output"), ("up", "down"), (router, "up")} <= pairs


def test_slower_signals_are_exposed_time():
    chip = north.chip()
    slow = chip.model_copy(update={"costs": chip.costs.model_copy(update={"handoff_ns": chip.costs.handoff_ns + 3000})})
    step = short_step()
    exposed = [sum(off.exposed_ns for off in predict(step, each, ONE_ROW).breakdown.hand_offs) for each in (chip, slow)]
    extra = predict(step, slow, ONE_ROW).total_ns - predict(step, chip, ONE_ROW).total_ns
    assert exposed[1] - exposed[0] == pytest.approx(extra, rel=0.35)


def test_blending_is_a_weighted_sum():
    step = short_step(layers=2)
    part = break_down(run_step(step, north.chip(), mean_state(step.model, ONE_ROW)))
    mixed = blend([(3.0, part), (-2.0, part)])
    assert mixed.total_ns == pytest.approx(part.total_ns)
    assert [kind.name for kind in mixed.kinds] == [kind.name for kind in part.kinds]
    assert mixed.hand_offs[0].exposed_ns == pytest.approx(part.hand_offs[0].exposed_ns)
    assert isinstance(mixed.kinds[0], KindTime)
    assert isinstance(mixed.hand_offs[0], HandOff)


def test_the_timeline_has_one_span_a_task_in_the_order_of_every_list():
    step = short_step()
    run = run_step(step, north.chip(), mean_state(step.model, ONE_ROW))
    timeline = run.timeline()
    assert timeline.total_ns == run.result.total_ns
    assert [span.task for span in timeline.spans] == step.table.records["task"].tolist()
    for before, after in zip(timeline.spans, timeline.spans[1:], strict=False):
        if before.sm == after.sm:
            assert before.end_ns <= after.run_start_ns
        assert before.run_wait_ns <= before.run_start_ns <= before.end_ns
        assert before.load_start_ns <= before.landed_ns <= before.end_ns
