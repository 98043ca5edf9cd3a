"""A plan rebuilds the table it was scored with, alone and anywhere, or says why it can't."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import north

from megakernel.assets import asset
from megakernel.config import ConfigError, digest, load_json, pretty_json
from megakernel.hardware import load_hardware
from megakernel.plan import Plan, PlanEntry, Provenance, lowering_digest


def plan() -> Plan:
    step = north.step()
    entry = PlanEntry(bucket=north.BUCKET, choices=step.choices, table_digest=step.table.digest)
    return Plan(
        model=north.model(),
        model_digest=digest(north.model()),
        hardware=north.chip(),
        hardware_digest=digest(north.chip()),
        code_digest=lowering_digest(),
        entries=(entry,),
        provenance=Provenance(command="test"),
    )


def test_a_plan_file_rebuilds_its_table_wherever_it_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(pretty_json(plan()), encoding="utf-8")
    again = load_json(path, Plan)
    assert again.build(again.entries[0]).table.digest == north.step().table.digest


def test_an_edited_plan_is_refused(tmp_path: Path) -> None:
    data = json.loads(pretty_json(plan()))
    data["model"]["num_heads"] = 16
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(ConfigError, match="the file was edited"):
        load_json(path, Plan)


def test_a_stale_plan_names_the_command_that_mends_it() -> None:
    old = plan().model_copy(update={"code_digest": "sha256:0"})
    with pytest.raises(ConfigError, match="tuner refresh"):
        old.build(old.entries[0])


def test_a_table_other_than_the_scored_one_is_refused() -> None:
    entry = plan().entries[0].model_copy(update={"table_digest": "sha256:0"})
    with pytest.raises(ConfigError, match="the plan says sha256:0"):
        plan().build(entry)


def test_another_chip_is_taken_if_it_keeps_the_limits() -> None:
    h100 = load_hardware(asset("configs/hardware/h100-sxm.toml"))
    made = plan()
    assert made.build(made.entries[0], h100).table.digest == north.step().table.digest
    bad: list[tuple[dict[str, object], str]] = [
        ({"num_sms": 78}, "for 132 SMs, .* has 78"),
        ({"architecture": "sm_100a"}, "is sm_100a"),
        ({"shared_memory_per_block_bytes": 101376}, "shared memory; at most"),
        ({"memory_bytes": 10**10}, "has 10.0 GB"),
    ]
    for update, message in bad:
        with pytest.raises(ConfigError, match=message):
            made.build(made.entries[0], h100.model_copy(update=update))


def test_buckets_share_rounding_or_the_plan_is_refused() -> None:
    entry = plan().entries[0]
    other = entry.choices.rounding.model_copy(update={"project_k_splits": 2})
    second = entry.model_copy(update={"choices": entry.choices.model_copy(update={"rounding": other})})
    with pytest.raises(ValueError, match=r"entries differ in choices\.rounding"):
        Plan.model_validate({**plan().model_dump(), "entries": (entry.model_dump(), second.model_dump())})


def test_the_smallest_fitting_bucket_serves() -> None:
    made = plan()
    assert made.entry_for(1, 9000).bucket == north.BUCKET
    with pytest.raises(ConfigError, match=r"no bucket for 2 rows .* 1 x 16384"):
        made.entry_for(2, 100)
