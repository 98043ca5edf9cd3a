"""Marks of waits that end before all logits are there, and where logits may not carry tags."""

import numpy as np
import pytest
from support import small

from megakernel.build import BuiltStep
from megakernel.config import ConfigError
from megakernel.kinds import TaskKind
from megakernel.table import TaskTable, read_waits
from runtime.gpu.specialize import KernelOptions, resolved, specialize
from runtime.gpu.tags import marks

STEPS = [
    pytest.param({}, id="parallel"),
    pytest.param({"router_with_project": False}, id="router apart"),
    pytest.param({"block": "sequential"}, id="sequential"),
    pytest.param({"loads": "after_wait"}, id="after wait"),
]


@pytest.mark.parametrize("options", STEPS)
def test_the_waits_for_logits_are_marked_and_no_others(options):
    step = small.build(rows=1, **options)
    found = marks(step)
    for record, mark in zip(step.table.records, found, strict=True):
        waits = read_waits(record, "load")
        assert [bool(mark >> idx & 1) for idx in range(len(waits))] == [
            step.counter_titles[wait.counter].endswith(".early") for wait in waits
        ]
        assert mark >> len(waits) == 0
    routed = sum(step.model.layers[layer].mlp.kind == "routed" for layer in range(step.model.num_layers))
    assert len(np.unique(step.table.records["layer"][found > 0])) == routed


def test_who_could_not_see_whether_logits_are_there_is_refused():
    step = small.build(rows=1)
    records = step.table.records.copy()
    row = np.flatnonzero((records["kind"] == TaskKind.UP) & (records["num_load_waits"] == 1))[0]
    records["kind"][row] = TaskKind.OUTPUT
    broken = TaskTable(step.table.header, step.table.offsets, step.table.totals, records)
    with pytest.raises(ConfigError, match=r"kind output waits to load for L\d\.project\.early, needed"):
        marks(BuiltStep(**{**vars(step), "table": broken}))


@pytest.mark.parametrize(
    ("rows", "options", "needed"),
    [
        (1, {"logits_ahead": 8, "arrival": "release"}, "take read_back"),
        (2, {"logits_ahead": 8}, "for one row, rows is 2"),
        (1, {"logits_ahead": 1}, "needed 0 or more than 1"),
    ],
)
def test_logits_can_t_be_looked_at_everywhere(rows, options, needed):
    with pytest.raises(ConfigError, match=needed):
        specialize(small.build(rows=rows), small.chip(), KernelOptions(**options))


def test_the_streaming_mode_has_no_logits_to_look_at():
    step = small.build(rows=1)
    plain, ahead = (
        specialize(step, small.chip(), KernelOptions(streaming=True, logits_ahead=number)) for number in (0, 8)
    )
    assert ahead == plain


@pytest.mark.parametrize(
    ("rows", "options", "ahead"),
    [
        (1, {}, 8),
        (1, {"logits_ahead": 0}, 0),
        (1, {"logits_ahead": 4}, 4),
        (1, {"arrival": "release"}, 0),
        (1, {"streaming": True}, 0),
        (2, {}, 0),
    ],
)
def test_planners_of_one_row_look_at_logits_unless_told_otherwise(rows, options, ahead):
    step = small.build(rows=rows)
    assert resolved(step, KernelOptions(**options)).logits_ahead == ahead
    assert specialize(step, small.chip(), KernelOptions(**options))["kLogitsAhead"] == ahead
