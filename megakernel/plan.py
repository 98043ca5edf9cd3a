"""Tuned choices on disk: what was chosen for which bucket, for which model and chip, and how well it scored.

A plan stores choices, never tables: the table is rebuilt by the same pure code and its digest must match. Model and
chip are embedded with their digests, so a plan runs alone wherever it is copied. A plan made by other lowering code is
stale; `tuner refresh` lowers the same choices again.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from pydantic import Field, model_validator

from megakernel.build import BuiltStep, build_step, check_step
from megakernel.config import ConfigError, Frozen, digest
from megakernel.hardware import HardwareSpec
from megakernel.model import ModelSpec
from megakernel.tiling import Choices
from megakernel.workload import Bucket, Routing

PLAN_VERSION = 1


class Score(Frozen):
    """One scored candidate: who proposed it, its predicted step time, and the choices behind it."""

    name: str
    predicted_ns: float = Field(gt=0)
    choices: Choices
    measured_ns: float | None = Field(default=None, gt=0)


class PlanEntry(Frozen):
    """Choices for one bucket, the digest of the table they give, and the candidates they beat.

    `predicted_ns` is the mean over routings and `p95_ns` what one in twenty exceeds; `bound_ns` can't be beaten by
    these choices, `floor_ns` by none. Where the search measured, `measured_ns` decided.
    """

    bucket: Bucket
    choices: Choices
    table_digest: str
    predicted_ns: float | None = Field(default=None, gt=0)
    p95_ns: float | None = Field(default=None, gt=0)
    bound_ns: float | None = Field(default=None, gt=0)
    floor_ns: float | None = Field(default=None, gt=0)
    measured_ns: float | None = Field(default=None, gt=0)
    losers: tuple[Score, ...] = ()


class Provenance(Frozen):
    """How a plan came to be: the command, its search configuration, seed and number of candidates scored.

    Predicted times are means over `draws` routings of the law `routing`, drawn from `seed`, at the buckets' nominal
    contexts: with them, another lowering or simulator can score the same choices again. `measured_on` names the card.
    """

    command: str
    search: str = ""
    seed: int = Field(default=0, ge=0)
    candidates: int = 0
    routing: Routing = Routing()
    draws: int = Field(default=1, ge=1)
    measured_on: str = ""


class Plan(Frozen):
    """A plan file."""

    version: int = PLAN_VERSION
    model: ModelSpec
    model_digest: str
    hardware: HardwareSpec
    hardware_digest: str
    code_digest: str
    entries: tuple[PlanEntry, ...] = Field(min_length=1)
    provenance: Provenance

    @model_validator(mode="after")
    def _whole(self) -> Plan:
        if self.version != PLAN_VERSION:
            raise ValueError(f"version is {self.version}, this program reads version {PLAN_VERSION}")
        for name, value, stated in (
            ("model", self.model, self.model_digest),
            ("hardware", self.hardware, self.hardware_digest),
        ):
            if digest(value) != stated:
                raise ValueError(
                    f"{name}_digest is {stated}, the embedded {name} has {digest(value)}: the file was edited"
                )
        if any(entry.choices.rounding != self.entries[0].choices.rounding for entry in self.entries):
            raise ValueError(
                "entries differ in choices.rounding, needed one per model: a row's tokens would depend on its bucket"
            )
        return self

    @property
    def stale(self) -> bool:
        """Whether other lowering code wrote this plan."""
        return self.code_digest != lowering_digest()

    def build(self, entry: PlanEntry, chip: HardwareSpec | None = None) -> BuiltStep:
        """Rebuild the table of `entry`, for the plan's own chip or another whose limits it keeps.

        ConfigError when the plan is stale, when the table is not the one that was scored, or when `chip` can't run it.
        """
        if self.stale:
            raise ConfigError("the plan was lowered by other code than this program's; run `tuner refresh PLAN`")
        step = build_step(self.model, entry.bucket, entry.choices, self.hardware)
        if step.table.digest != entry.table_digest:
            raise ConfigError(
                f"the choices give table {step.table.digest}, the plan says {entry.table_digest}; "
                "run `tuner refresh PLAN`"
            )
        if chip is not None and chip != self.hardware:
            self._check_chip(chip, step)
        return step

    def _check_chip(self, chip: HardwareSpec, step: BuiltStep) -> None:
        own = self.hardware
        if chip.num_sms < own.num_sms:
            raise ConfigError(f"the plan is for {own.num_sms} SMs, {chip.name} has {chip.num_sms}; search its own plan")
        if chip.architecture != own.architecture:
            raise ConfigError(
                f"the plan is for {own.architecture}, {chip.name} is {chip.architecture}; search its own plan"
            )
        check_step(step, chip)

    def entry_for(self, rows: int, context_tokens: int) -> PlanEntry:
        """Smallest bucket that serves `rows` rows of up to `context_tokens`; ConfigError names what there is."""
        fitting = [e for e in self.entries if e.bucket.rows >= rows and e.bucket.max_context_tokens >= context_tokens]
        if not fitting:
            there = ", ".join(f"{e.bucket.rows} x {e.bucket.max_context_tokens}" for e in self.entries)
            raise ConfigError(
                f"no bucket for {rows} rows of {context_tokens} tokens; the plan has rows x tokens {there}"
            )
        return min(fitting, key=lambda e: (e.bucket.rows, e.bucket.max_context_tokens))


@cache
def lowering_digest() -> str:
    """Digest of the code that turns choices into tables; every source of this package counts."""
    total = hashlib.sha256()
    root = resources.files("megakernel")
    pending = [root]
    sources: list[tuple[str, bytes]] = []
    while pending:
        for child in pending.pop().iterdir():
            if child.is_dir() and child.name != "_assets":
                pending.append(child)
            elif child.name.endswith(".py"):
                sources.append((str(child), child.read_bytes()))
    for _, text in sorted(sources):
        total.update(text)
    return f"sha256:{total.hexdigest()}"
