"""Bounds: the closed forms equal what is counted one by one, and no simulated step beats them."""

import pytest
from support import north
from support.predicting import choices_for, qwen, short_step, with_bandwidth

from megakernel.cost import price_bytes
from megakernel.tiling import Ring
from megakernel.workload import Bucket, Routing, Workload
from simulator.bounds import bounds
from simulator.predict import predict
from simulator.routing import mean_state

MANY_ROWS = Bucket(rows=8, max_context_tokens=4096, nominal_context_tokens=2048)


@pytest.mark.parametrize("contexts", [(8192,), (5000,), (1,)])
@pytest.mark.parametrize("name", ["hand", "reference"])
def test_the_bytes_bound_is_the_tables_bytes_at_the_streaming_rate(name, contexts):
    step, workload = short_step(name), Workload(contexts=contexts)
    streamed = price_bytes(step, mean_state(step.model, workload)).streamed_bytes
    found = bounds(step, north.chip(), workload)
    assert found.bytes_ns == pytest.approx(streamed / north.chip().streaming_bytes_per_ns, rel=1e-12)
    assert found.roofline_ns == step.model.step_bytes(contexts, 8) / north.chip().datasheet_bytes_per_ns


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_a_model_with_choices_has_the_bounds_of_the_step_that_they_build(name):
    step, workload = short_step(name), Workload(contexts=(8192,))
    before = bounds(step.model, north.chip(), workload, step.choices)
    after = bounds(step, north.chip(), workload)
    assert (before.bytes_ns, before.critical_path_ns) == (after.bytes_ns, after.critical_path_ns)
    assert before.sm_load_ns == 0.0 < after.sm_load_ns


def test_a_model_without_choices_is_bounded_below_any_choices():
    workload = Workload(contexts=(8192,))
    any_choices = bounds(north.model(), north.chip(), workload)
    for name in ("hand", "reference"):
        chosen = bounds(north.model(), north.chip(), workload, north.choices(name))
        assert any_choices.bytes_ns <= chosen.bytes_ns
        assert any_choices.critical_path_ns < chosen.critical_path_ns


@pytest.mark.parametrize(
    "ring",
    [
        Ring(copy_bytes=8192, stages=12, in_flight_cap_bytes=40960),
        Ring(copy_bytes=16384, stages=6),
        Ring(copy_bytes=8192, stages=8, in_flight_cap_bytes=8192),
    ],
    ids=["capped", "uncapped", "starved"],
)
@pytest.mark.parametrize("name", ["hand", "reference"])
@pytest.mark.parametrize("family", ["parallel", "sequential"])
@pytest.mark.parametrize("contexts", [(2048,), (1, 300, 4096, 4096, 17, 2048, 1, 999)], ids=["1row", "8rows"])
def test_no_step_beats_its_bounds(family, name, ring, contexts):
    model = north.model() if family == "parallel" else qwen()
    step = short_step(name, model=model, layers=2, bucket=MANY_ROWS, ring=ring)
    found = predict(step, north.chip(), Workload(contexts=contexts))
    assert found.total_ns >= found.bounds.lower_ns
    assert min(found.bounds.critical_path_ns, found.bounds.sm_load_ns) > 0.0


def test_the_binding_bound_is_the_highest():
    workload = Workload(contexts=(8192,))
    step = short_step()
    found = bounds(step, north.chip(), workload)
    assert (found.binding, found.lower_ns) == ("bytes", found.bytes_ns)
    fast = bounds(step, with_bandwidth(north.chip(), 100.0), workload)
    assert fast.binding == "SM load"
    assert fast.lower_ns == fast.sm_load_ns > fast.bytes_ns
    model = qwen()
    path = bounds(model, with_bandwidth(north.chip(), 100.0), workload, choices_for(model, "hand"))
    assert (path.binding, path.lower_ns) == ("critical path", path.critical_path_ns)


def test_skewed_routing_lowers_the_bounds():
    contexts = (2048,) * 8
    even, skewed = (
        bounds(north.model(), north.chip(), Workload(contexts=contexts, routing=routing))
        for routing in (Routing(), Routing(kind="zipf", exponent=1.5))
    )
    assert skewed.bytes_ns < even.bytes_ns
    assert skewed.critical_path_ns < even.critical_path_ns
