"""On a card: logits that carry their step and layer, looked at before all have arrived, change no bit and no chain."""

from __future__ import annotations

import pytest
import torch
from support import small
from support.card import chip, on_card, tiny_step
from support.soak import alone, chained
from support.tiny_models import cohere2_moe, qwen3_moe

from megakernel.table import TaskTable
from runtime.rows import Join

pytestmark = pytest.mark.gpu

OPTIONS = {"plain": {}, "ahead": {"logits_ahead": 8}, "fuzzed": {"logits_ahead": 2, "fuzz": True}}


@pytest.fixture(scope="module", params=[cohere2_moe, qwen3_moe], ids=["cohere2_moe", "qwen3_moe"])
def decoders(request):
    """A decoder for each of the options, of one tiny model."""
    from runtime.gpu.compile import compile_ahead
    from runtime.gpu.specialize import KernelOptions, specialize

    model = request.param(dtype=torch.bfloat16)
    step = tiny_step(model, 1)
    compile_ahead((specialize(step, chip(), KernelOptions(**each)) for each in OPTIONS.values()), "sm_90a")
    return {name: on_card(model, 1, first_step=2**32 - 100, **each) for name, each in OPTIONS.items()}


def history(decoder, steps: int = 40) -> list[tuple[list[int | None], bytes, bytes]]:
    """Tokens, logits and the router's, step by step, of a row that begins with a token."""
    decoder.join(0, 20, 0)
    return [
        (decoder.run()[0], *(decoder.scratch(name).numpy().tobytes() for name in ("logits", "router")))
        for _ in range(steps)
    ]


def test_no_bit_changes(decoders):
    expected = history(decoders["plain"])
    for name in ("ahead", "fuzzed"):
        assert history(decoders[name]) == expected, name


def test_delays_anywhere_change_no_token(decoders):
    from runtime.gpu.launch import Fuzz

    expected = alone(decoders["plain"], 7, 24)
    for seed in range(8):
        decoders["fuzzed"].table.fuzz = Fuzz(seed, most_us=(2.0, 10.0, 50.0)[seed % 3])
        assert alone(decoders["fuzzed"], 7, 24) == expected, seed


@pytest.mark.parametrize("name", ["ahead", "fuzzed"])
def test_a_chain_ends_halts_and_goes_on(decoders, name):
    """Its last step has no active row, so that no expert is chosen."""
    expected = alone(decoders["plain"], 7, 60)
    chain = chained(decoders[name])
    chain.join(0, Join(7, 0, end_position=40))
    assert [each.token for each in chain.tokens()] == expected[:40]
    assert not chain.has_rows
    chain.join(0, Join(7, 0, end_position=60))
    found = []
    for made in chain.tokens():
        found.append(made.token)
        if len(found) == 5:
            chain.halt()
    assert found == expected[: len(found)]
    assert found + [each.token for each in chain.tokens()] == expected


def test_logits_that_nobody_leaves_are_waited_for_until_the_deadline():
    from runtime.gpu.buffers import StepBuffers, random_inputs
    from runtime.gpu.compile import compile_kernel
    from runtime.gpu.launch import KernelStoppedError, LoadedTable
    from runtime.gpu.postmortem import GraphTitles
    from runtime.gpu.specialize import KernelOptions, specialize
    from runtime.gpu.tags import marks

    step, options = small.build(rows=1), KernelOptions(logits_ahead=8)
    buffers = StepBuffers(step, drawn="normal", has_tags=True)
    addresses = buffers.set_inputs(random_inputs(step, (2047,)))
    compiled = compile_kernel(specialize(step, small.chip(), options), "sm_90a")

    def run(table):
        titles = GraphTitles(step.graph, step.counter_titles)
        loaded = LoadedTable(compiled, table, titles, proved_digest=None, marks=marks(step))
        loaded.restores += buffers.tags()
        loaded.arm(addresses, steps=2, deadline_ms=20.0)
        loaded.run()

    run(step.table)
    with pytest.raises(KernelStoppedError) as caught:
        run(without_logits(step, "L2.project", 2))
    assert "the first task that should have fired is L2.up[" in str(caught.value)
    assert "all its waits are met, its copies or its run did not end" in str(caught.value)
    run(step.table)  # the card is usable: the same table, whole, ends well


def without_logits(step, name: str, index: int) -> TaskTable:
    """The step's table, but that task `index` of the operator called `name` leaves no logit."""
    records = step.table.records.copy()
    first = next(first for first, op in zip(step.graph.first_task, step.graph.ops, strict=True) if op.title == name)
    row = records["task"] == first + index
    records["router_end"][row] = records["router_begin"][row]
    return TaskTable(step.table.header, step.table.offsets, step.table.totals, records)
