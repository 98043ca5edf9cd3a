"""Shipped plans are fresh: today's code rebuilds the tables they were scored with, and proves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megakernel.assets import asset
from megakernel.config import load_json
from megakernel.measurement import Record
from megakernel.plan import Plan
from megakernel.verify import verify

PLANS = sorted(asset("configs/plans").glob("*.json"))
RECORDS = [load_json(path, Record) for path in sorted(asset("configs/measurements").glob("north-*.json"))]


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
def test_a_shipped_plan_beats_what_it_raced_on_a_card_where_one_timed_it_and_as_predicted_elsewhere(path: Path) -> None:
    for entry in load_json(path, Plan).entries:
        assert entry.predicted_ns is not None
        assert {"hand plan", "reference plan", "reference order, hand cap"} <= {loser.name for loser in entry.losers}
        if entry.measured_ns is None:
            assert all(loser.measured_ns is None for loser in entry.losers), "no prediction beats a measurement"
            assert all(entry.predicted_ns <= loser.predicted_ns for loser in entry.losers)
        else:
            assert all(loser.measured_ns is None or entry.measured_ns <= loser.measured_ns for loser in entry.losers)


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_no_shipped_record_has_choices_that_are_faster_than_the_shipped_plan_of_its_bucket(path: Path) -> None:
    """Two runs of a card differ by 2%, so that a record names the fastest only among those that it timed in turns."""
    plan = load_json(path, Plan)
    for record in RECORDS:
        for entry in plan.entries:
            if (record.model_digest, record.bucket) != (plan.model_digest, entry.bucket) or not is_of(record, plan):
                continue
            timed = {choices: record.median_ms(name) for name, choices in record.choices.items()}
            assert entry.choices in timed, f"{path.name}: the record {record.date} has timed others, and not this plan"
            assert timed[entry.choices] <= 1.02 * min(timed.values())


def is_of(record: Record, plan: Plan) -> bool:
    """Whether the record's card is the plan's chip."""
    return record.card.name == plan.hardware.name
