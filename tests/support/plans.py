"""Plans made in memory, for tests that need one without a search."""

from __future__ import annotations

from support import north

from megakernel.build import BuiltStep
from megakernel.config import digest
from megakernel.hardware import HardwareSpec
from megakernel.plan import Plan, PlanEntry, Provenance, lowering_digest


def plan_of(step: BuiltStep, hardware: HardwareSpec) -> Plan:
    """The plan with one entry that `step` was built from."""
    entry = PlanEntry(bucket=step.bucket, choices=step.choices, table_digest=step.table.digest)
    return Plan(
        model=step.model,
        model_digest=digest(step.model),
        hardware=hardware,
        hardware_digest=digest(hardware),
        code_digest=lowering_digest(),
        entries=(entry,),
        provenance=Provenance(command="tests"),
    )


def north_plan(name: str = "hand") -> Plan:
    """`hand` or `reference` on North Mini Code, an H200, one row up to 16384 tokens."""
    return plan_of(north.step(name), north.chip())
