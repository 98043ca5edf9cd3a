"""A table with a barrier in place of every wait, or a launch for every operator, is proved and computes the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.ablations import grid_synced, operators, phases
from support.decoding import decode, prompts
from support.north import step as north_step
from support.tiny_models import built, choices_for, cohere2_moe, qwen3_moe, spec_of

from megakernel.counters import NONE
from megakernel.table import TaskTable
from megakernel.tiling import Counters
from megakernel.verify import verify
from runtime.reference import Interpreter, Memory
from runtime.weights import pack_weights

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]


def tiny(family, words: int = 1):
    model = family()
    choices = choices_for(spec_of(model)).model_copy(update={"counters": Counters(words=words)})
    return model, built(spec_of(model), 3, choices)


def machine(step, table: TaskTable, model, seed: int = 0) -> Interpreter:
    weights = pack_weights(step.model, dict(model.state_dict()), step.choices.rounding, torch.float64)
    return Interpreter(table, Memory(step, torch.float64), weights, seed=seed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("loads_ahead", [False, True], ids=["loads after", "loads ahead"])
def test_barriers_are_proved_and_compute_the_same(family, words, loads_ahead):
    model, step = tiny(family, words)
    table = grid_synced(step, loads_ahead=loads_ahead)
    assert verify(step.graph, table) == []
    texts = prompts([17, 5, 1])
    expected = decode(machine(step, step.table, model), texts, 4)
    found = decode(machine(step, table, model, seed=1), texts, 4)
    assert found[0] == expected[0]
    assert all(torch.equal(*pair) for pair in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("loads_ahead", [False, True], ids=["loads after", "loads ahead"])
def test_every_barrier_is_needed_and_seen_by_the_verifier(loads_ahead):
    """Whatever SM goes on without waiting for the phase before, in which others took part, is found."""
    _, step = tiny(cohere2_moe)
    table = grid_synced(step, loads_ahead=loads_ahead)
    name = "num_run_waits" if loads_ahead else "num_load_waits"
    merge = step.choices.interleave.order.index("merge") + 1  # of the first layer; what it merges stands before it
    waiting = np.flatnonzero((table.records[name] > 0) & (phases(step) == merge))
    assert len(waiting) >= 2
    for at in waiting:
        broken = TaskTable(table.header, table.offsets, table.totals, table.records.copy())
        broken.records[name][at] = 0
        assert verify(step.graph, broken), f"record {at}"


@pytest.mark.parametrize("family", FAMILIES)
def test_operators_one_after_another_compute_the_same(family):
    model, step = tiny(family)
    parts = operators(step)
    assert len(parts) == len(step.graph.ops)
    texts = [[17], [5], [1]]
    whole = machine(step, step.table, model)
    alone = machine(step, step.table, model)
    launches = [Interpreter(part, alone.memory, alone.weights) for part in parts]
    for memory in (whole.memory, alone.memory):
        for row, text in enumerate(texts):
            memory.join(row, text[0], 0)
    for _ in range(6):
        whole.step()
        for launch in launches:
            launch.step()
        assert torch.equal(whole.memory.scratch("logits"), alone.memory.scratch("logits"))
        assert whole.memory.tokens == alone.memory.tokens


def test_real_geometry_has_297_phases_and_132_arrivals_at_most():
    step = north_step()
    assert verify(step.graph, grid_synced(step, loads_ahead=False)) == []
    table = grid_synced(step, loads_ahead=True)
    assert verify(step.graph, table) == []
    assert phases(step).max() + 1 == 3 + 6 * 49
    assert table.num_counters == 3 + 6 * 49 + step.table.num_counters
    assert table.totals.max() == 132
    assert sum(len(part.records) for part in operators(step)) == len(step.table.records)
    assert all((part.records["arrive"] == NONE).all() for part in operators(step))
