"""A table as a simulator program: every byte, wait and arrival of it, and the work that hand-offs cost."""

from itertools import chain

import pytest
from support import north
from support.predicting import qwen, short_step

from megakernel.build import BuiltStep, build_step
from megakernel.model import ModelSpec
from megakernel.table import read_waits
from megakernel.workload import Bucket, Routing, Workload
from simulator.few_layers import truncated
from simulator.lowered import Lowered, lower_program
from simulator.program import Record
from simulator.routing import draw_states
from simulator.simulate import simulate

TWO_ROWS = Bucket(rows=2, max_context_tokens=16384, nominal_context_tokens=4096)


def lowered(step: BuiltStep, *contexts: int) -> Lowered:
    (state,) = draw_states(step.model, Workload(contexts=contexts), draws=1, seed=0)
    return lower_program(step, state, north.chip())


def records(found: Lowered) -> list[Record]:
    return list(chain.from_iterable(found.program.sms))


def bytes_not_in_a_ring(model: ModelSpec, rows: int) -> int:
    """Norm weights and embedding rows: runs read them through L2."""
    norms = model.num_layers * (1 if model.block == "parallel" else 2) + 1
    head_norms = 2 * model.head_dim * model.num_layers if model.qk_norm else 0
    return 2 * (model.hidden_size * (norms + rows) + head_norms)


def bytes_of_partial_chunks(model: ModelSpec, contexts: tuple[int, ...], chunk: int) -> int:
    """Tokens that attention loads because it loads whole chunks."""
    excess = 0
    for layer in model.layers:
        for tokens in contexts:
            first = max(tokens - (layer.window_tokens or tokens), 0) // chunk * chunk
            last = -(-tokens // chunk) * chunk
            excess += last - first - layer.attended_tokens(tokens)
    return excess * model.kv_bytes_per_token_per_layer


@pytest.mark.parametrize("contexts", [(8192,), (1,), (5000,), (4097, 129)])
@pytest.mark.parametrize("name", ["north", "qwen"])
def test_bytes_are_those_of_the_roofline_but_for_what_passes_by_the_ring_and_whole_chunks(name, contexts):
    model = north.model() if name == "north" else qwen()
    ring = north.choices("hand").ring.model_copy(update={"stages": 20})  # two rows leave less room
    step = short_step(model=model, bucket=TWO_ROWS, layers=5, ring=ring)
    workload = Workload(contexts=contexts)
    (state,) = draw_states(step.model, workload, draws=1, seed=7)
    program = lower_program(step, state, north.chip()).program
    routed = [count for count in state.distinct_experts if count]
    roofline = step.model.step_bytes(contexts, sum(routed) / len(routed))
    chunk = step.choices.rounding.chunk_tokens
    expected = roofline - bytes_not_in_a_ring(step.model, len(contexts))
    expected += bytes_of_partial_chunks(step.model, contexts, chunk)
    assert sum(record.load_bytes for record in chain.from_iterable(program.sms)) == expected
    assert simulate(program, north.chip()).bytes_read == expected


def test_the_whole_step_of_one_row_lacks_only_norms_and_its_embedding_row():
    found = sum(record.load_bytes for record in records(lowered(north.step(), 8192)))
    assert north.model().step_bytes((8192,), 8) - found == 2 * 2048 * (49 + 1 + 1)


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_every_arrival_and_every_wait_of_this_step_is_in_the_program(name):
    step = short_step(name)
    found = lowered(step, 8192)
    assert found.program.arrivals == tuple(step.table.totals)
    for packed, record in zip(step.table.records, records(found), strict=True):
        for phase, waits in (("load", record.load_waits), ("run", record.run_waits)):
            expected = [(wait.counter, wait.need) for wait in read_waits(packed, phase) if wait.lag == 0]
            assert [(wait.counter, wait.need) for wait in waits] == expected


def test_records_know_which_task_they_are():
    step = short_step()
    found = lowered(step, 8192)
    assert found.task_of.tolist() == step.table.records["task"].tolist()
    names = [step.graph.ops[op_idx].name for op_idx in found.op_of]
    assert names == [record.label.kind for record in records(found)]


def test_equal_records_are_one_object():
    found = records(lowered(north.step(), 8192))
    assert len(found) > 30_000
    assert len({id(record) for record in found}) == len(set(found)) < 2_000


def test_the_router_signals_after_norm_and_dot_products_and_nothing_waits_for_qkv():
    found = [record for record in records(lowered(short_step(), 8192)) if record.label.kind == "project"]
    work, ns = north.chip().work, north.chip().cycles_ns
    early = {(each.signal.work_ns, each.signal.copies, each.signal.copy_ns) for each in found if each.signal}
    assert early == {(ns(work.norm) + ns(work.router_row), 1, ns(work.router))}
    assert {record.signal is None for record in found if record.label.layer == 0} == {True}


@pytest.mark.parametrize("tasks", [2, 8, 64])
def test_router_rows_are_taken_one_after_another_by_the_sm_that_has_them(tasks):
    """128 rows of 4 KB, two a copy: where two tasks share them, 32 copies and 64 rows lie before a signal."""
    hand = north.choices("hand")
    choices = hand.model_copy(
        update={
            "cut": hand.cut.model_copy(update={"route": tasks}),
            "interleave": hand.interleave.model_copy(
                update={"router_with_project": False, "order": ("route", *hand.interleave.order)}
            ),
        }
    )
    step = build_step(truncated(north.model(), 2), north.BUCKET, choices, north.chip())
    found = lowered(step, 8192)
    routes = [record for record in records(found) if record.label.kind == "route"]
    work, ns = north.chip().work, north.chip().cycles_ns
    for record in routes:
        assert record.signal is not None
        assert record.load_bytes == 128 // tasks * 4096
        assert record.signal.copies == 64 // tasks
        assert record.signal.copies * record.signal.copy_ns == pytest.approx(128 // tasks * ns(work.router))


def test_warps_fetch_rows_of_output_and_down_and_take_slices_in_turn():
    work, ns = north.chip().work, north.chip().cycles_ns
    found = {record.label.kind: record for record in records(lowered(short_step(), 8192)) if record.load_bytes}
    use = ns(work.slice + 8 * work.multiply)
    for kind, fetch in (
        ("project", 0.0),
        ("up", 0.0),
        ("head", 0.0),
        ("output", ns(work.fetch)),
        ("down", ns(work.fetch)),
    ):
        assert (found[kind].fetch_ns, found[kind].turn) == (fetch, 8)
        assert found[kind].warp_ns == pytest.approx(use)
    # a chunk of 128 tokens is 8 copies, which 4 warps share: two teams hold 16, and have 32 keys a warp
    assert found["attend"].turn == 16
    assert found["attend"].warp_ns == pytest.approx(ns(32 * work.attend))


def test_an_sm_finds_a_layers_experts_once():
    step = short_step()
    for sm in lowered(step, 8192).program.sms:
        for layer in range(5):
            routed = [record for record in sm if record.label.layer == layer and record.label.kind in {"up", "down"}]
            spent = [record.load_work_ns for record in routed]
            work, ns = north.chip().work, north.chip().cycles_ns
            planned = [ns(work.plan) if record.load_waits else 0.0 for record in routed]
            if layer:
                planned[0] += ns(work.topk + work.ids)
            assert spent == pytest.approx(planned)


def test_an_sm_stages_an_operators_rows_once():
    for sm in lowered(short_step(), 8192).program.sms:
        head = [record for record in sm if record.label.kind == "head"]
        assert [record.work_ns > 0 for record in head] == [True] + [False] * 3
        assert [record.other_bytes > 0 for record in head] == [True] + [False] * 3


def test_a_share_that_finds_nothing_costs_nothing_but_its_signals():
    step = short_step()
    found = [record for record in records(lowered(step, 1)) if record.label.kind == "attend"]
    empty = [record for record in found if not record.load_bytes]
    assert len(found) - len(empty) == 5 * north.model().num_kv_heads
    assert {record.work_ns + record.compute_ns + record.other_bytes for record in empty} == {0.0}
    assert all(record.arrive is not None for record in empty)


def test_rows_that_share_experts_load_them_once():
    bucket = Bucket(rows=8, max_context_tokens=1024, nominal_context_tokens=1024)
    step = short_step(bucket=bucket, ring=north.choices("hand").ring.model_copy(update={"stages": 12}))
    loads = []
    for exponent in (0.0, 4.0):
        workload = Workload(contexts=(1024,) * 8, routing=Routing(kind="zipf", exponent=exponent))
        (state,) = draw_states(step.model, workload, draws=1, seed=0)
        found = lower_program(step, state, north.chip())
        up = sum(record.load_bytes for record in records(found) if record.label.kind == "up" and record.label.layer)
        expert_bytes = 2 * 2 * step.model.hidden_size * step.model.layers[1].mlp.width
        assert up == sum(state.distinct_experts) * expert_bytes
        loads.append(up)
    assert loads[0] > loads[1]
