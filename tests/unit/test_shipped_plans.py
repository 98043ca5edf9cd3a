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
def test_a_shipped_plan_is_the_fastest_of_the_latest_record_of_its_bucket(path: Path) -> None:
    """Halves of a record's rounds may differ by 2%, and the second half decides."""
    plan = load_json(path, Plan)
    for entry in plan.entries:
        records = [each for each in RECORDS if is_of(each, plan) and each.bucket == entry.bucket]
        if not records:
            continue
        record = max(records, key=lambda each: each.date)
        timed = {
            choices: record.median_ms(name) for name, choices in record.choices.items() if name not in record.faults
        }
        assert entry.choices in timed, f"{path.name}: the record of {record.date} has timed others, and not this plan"
        assert timed[entry.choices] <= 1.02 * min(timed.values())


def is_of(record: Record, plan: Plan) -> bool:
    """Whether a record is of the plan's model and chip."""
    return (record.model_digest, record.card.name) == (plan.model_digest, plan.hardware.name)
