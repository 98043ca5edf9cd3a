"""Shipped plans are fresh: today's code rebuilds the tables they were scored with, and proves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakernel.assets import asset
from megakernel.config import load_json
from megakernel.plan import Plan
from megakernel.verify import verify

PLANS = sorted(asset("configs/plans").glob("*.json"))


def test_there_are_plans() -> None:
    assert PLANS


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_shipped_plan_is_fresh_and_proved(path: Path) -> None:
    plan = load_json(path, Plan)
    assert not plan.stale, f"run `tuner refresh {path.name}`"
    for entry in plan.entries:
        step = plan.build(entry)
        assert verify(step.graph, step.table) == []


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_shipped_plan_is_predicted_no_worse_than_what_it_raced(path: Path) -> None:
    for entry in load_json(path, Plan).entries:
        assert entry.predicted_ns is not None
        assert {"hand plan", "reference plan", "reference order, hand cap"} <= {loser.name for loser in entry.losers}
        assert all(entry.predicted_ns <= loser.predicted_ns for loser in entry.losers)
