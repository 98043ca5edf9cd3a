"""On a card: every task streams exactly its bytes, in any ring, and every step waits as the table says."""

import numpy as np
import pytest
from support import small
from support.streamed import pieces

from megakernel.cost import LiveState, price_bytes
from megakernel.tiling import Ring
from megakernel.verify import verify

pytestmark = pytest.mark.gpu

POSITIONS = (2047, 130, 3000)


def opened(step, options, *, positions=POSITIONS):
    from runtime.gpu.buffers import StepBuffers, random_inputs
    from runtime.gpu.compile import compile_kernel
    from runtime.gpu.launch import LoadedTable
    from runtime.gpu.postmortem import GraphTitles
    from runtime.gpu.specialize import specialize

    assert verify(step.graph, step.table) == []
    compiled = compile_kernel(specialize(step, small.chip(), options), "sm_90a")
    titles = GraphTitles(step.graph, step.counter_titles)
    loaded = LoadedTable(compiled, step.table, titles, proved_digest=step.table.digest)
    buffers = StepBuffers(step)
    inputs = random_inputs(step, positions)
    return loaded, buffers, inputs, buffers.set_inputs(inputs)


def check_streamed(step, loaded, buffers, inputs):
    """Compare a trace with the host's walk and with the priced bytes."""
    from runtime.gpu.buffers import distinct_experts

    tasks = loaded.trace().tasks
    begin = buffers.begin
    everything = buffers.words(begin, buffers.num_bytes)
    for record, found in zip(step.table.records, tasks, strict=True):
        walked = list(pieces(step, record, inputs, buffers.address))
        folded = np.uint32(0)
        for address, size in walked:
            words = everything[(address - begin) // 4 : (address - begin + size) // 4]
            folded ^= np.bitwise_xor.reduce(words)
        assert found["bytes"] == sum(size for _, size in walked), record
        assert found["checksum"] == folded, record
    positions = tuple(int(row["position"]) for row in inputs.rows if row["active"])
    cost = price_bytes(step, LiveState(positions, distinct_experts(step, inputs)))
    assert (tasks["bytes"] == cost.load_bytes[step.table.records["task"]]).all()
    assert (tasks["end"] >= tasks["run_start"]).all()
    assert (tasks["run_start"] >= tasks["run_wait"]).all()


RINGS = {
    "paced": Ring(copy_bytes=2048, stages=12, in_flight_cap_bytes=6144),
    "uncapped": Ring(copy_bytes=2048, stages=12),
    "one copy in flight": Ring(copy_bytes=2048, stages=5, in_flight_cap_bytes=2048),
    "small copies": Ring(copy_bytes=2048, stages=40, in_flight_cap_bytes=8192),
    "large copies": Ring(copy_bytes=16384, stages=10, in_flight_cap_bytes=49152),
    "odd copies": Ring(copy_bytes=7168, stages=11, in_flight_cap_bytes=14336),
}


@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS.keys())
def test_every_task_streams_its_bytes(ring):
    from runtime.gpu.specialize import KernelOptions

    step = small.build(ring)
    loaded, buffers, inputs, addresses = opened(step, KernelOptions(trace=True, streaming=True))
    loaded.arm(addresses, steps=3)
    loaded.run()
    check_streamed(step, loaded, buffers, inputs)


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 2},
        {"pollers": 4},
        {"pollers": 8, "poll_stagger_cycles": 0},
        {"poll_pause_ns": 50, "arrival": "fence"},
        {"counter_stride": 1, "evict_first": False},
        {"arrival": "relaxed", "proxy_fence": False},
        {"consumer_warps": 4},
    ],
    ids=str,
)
def test_every_kernel_option_streams_the_same_bytes(options):
    from runtime.gpu.specialize import KernelOptions

    step = small.build()
    loaded, buffers, inputs, addresses = opened(step, KernelOptions(trace=True, streaming=True, **options))
    loaded.arm(addresses, steps=2)
    loaded.run()
    check_streamed(step, loaded, buffers, inputs)


@pytest.mark.parametrize(
    "shape",
    [
        {"splits": 2},
        {"loads": "after_wait"},
        {"router_with_project": False},
        {"block": "sequential"},
        {"rows": 8},
    ],
    ids=str,
)
def test_every_shape_of_table_streams_its_bytes(shape):
    from runtime.gpu.specialize import KernelOptions

    step = small.build(**shape)
    positions = (0, 127, 128, 199, 200, 4095, 1000) if shape.get("rows") == 8 else POSITIONS
    loaded, buffers, inputs, addresses = opened(step, KernelOptions(trace=True, streaming=True), positions=positions)
    loaded.arm(addresses, steps=2)
    loaded.run()
    check_streamed(step, loaded, buffers, inputs)


def test_counters_go_on_through_their_wrap():
    from runtime.gpu.specialize import KernelOptions

    step = small.build()
    loaded, buffers, inputs, addresses = opened(step, KernelOptions(trace=True, streaming=True))
    most = int(step.table.totals.max())
    first = 2**32 // most - 1
    loaded.arm(addresses, steps=4, first_step=first)
    loaded.run()
    totals = step.table.totals.astype(np.uint64)
    assert (loaded.counters() == (totals * (first + 4)) % 2**32).all()
    assert (totals[totals == most] * (first + 4) >= 2**32).all()
    check_streamed(step, loaded, buffers, inputs)


def test_many_steps_and_launches_end_alike():
    from runtime.gpu.specialize import KernelOptions

    step = small.build()
    loaded, _, _, addresses = opened(step, KernelOptions(streaming=True))
    loaded.arm(addresses, steps=200)
    for _ in range(20):
        loaded.run()
        assert (loaded.counters() == step.table.totals * 200).all()
        assert (loaded.progress()["arrived"] == 200 * np.diff(step.table.offsets)).all()


def test_read_back_arrivals_end_alike():
    from runtime.gpu.specialize import KernelOptions

    step = small.build()
    loaded, _, _, addresses = opened(step, KernelOptions(arrival="read_back", streaming=True))
    loaded.arm(addresses, steps=20)
    loaded.run()
    assert (loaded.counters() == step.table.totals * 20).all()
