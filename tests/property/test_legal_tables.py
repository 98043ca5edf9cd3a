"""Whatever legal choices build is accepted by `verify`, and placement and wiring keep what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from support import north
from support.legal import Case, random_case

from megakernel.abi import MAX_LOAD_WAITS, MAX_RUN_WAITS
from megakernel.build import BuiltStep, build_step
from megakernel.graph import TaskGraph
from megakernel.kinds import Path
from megakernel.table import TaskTable
from megakernel.verify import verify

TABLES, CHUNK = 500, 50


@pytest.mark.parametrize("first", range(0, TABLES, CHUNK))
def test_no_table_of_legal_choices_is_refused(first):
    for seed in range(first, first + CHUNK):
        case = random_case(seed)
        step = build_step(case.model, case.bucket, case.choices, case.chip)
        assert verify(step.graph, step.table) == [], f"case {seed}"
        check_placement(case, step)
        check_wiring(step.table)


def check_placement(case: Case, step: BuiltStep) -> None:
    """Every task stands in one list, and in one of its path's SMs where paths have their own."""
    table, interleave = step.table, case.choices.interleave
    assert sorted(table.records["task"].tolist()) == list(range(step.graph.num_tasks))
    assert table.num_sms == case.chip.num_sms
    if interleave.attention_sms is None or interleave.takeover_percent or interleave.policy == "round_robin":
        return
    paths = task_paths(step.graph)
    for sm in range(table.num_sms):
        there = {paths[task] for task in table.sm_records(sm)["task"]}
        assert (Path.MLP if sm < interleave.attention_sms else Path.ATTENTION) not in there


def task_paths(graph: TaskGraph) -> list[Path]:
    """Paths of all tasks, by number."""
    return [op.path for op in graph.ops for _ in op.tasks]


def check_wiring(table: TaskTable) -> None:
    """Waits fit into a record, name counters and ask for all of a step's arrivals."""
    for phase, limit in (("load", MAX_LOAD_WAITS), ("run", MAX_RUN_WAITS)):
        counts = table.records[f"num_{phase}_waits"]
        assert counts.max() <= limit
        waits = table.records[f"{phase}_waits"][np.arange(limit) < counts[:, None]]
        assert (waits["need"] == table.totals[waits["counter"]]).all()
        assert (waits["need"] > 0).all()


@pytest.mark.parametrize("name", ["hand", "reference"])
def test_the_real_geometry_is_accepted(name):
    step = north.step(name)
    assert len(step.model.layers) == 49
    assert verify(step.graph, step.table) == []
