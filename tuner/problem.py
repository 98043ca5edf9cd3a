"""A search file with everything that it names, read and checked: what to search, for what, against whom.

Owns the reading of the files a search refers to, and the three plans that race in every search. Refuses a problem
that no search could solve: a model that does not fit the chip, a baseline that can't run. Called by the command.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from pydantic import BaseModel

from megakernel import limits
from megakernel.assets import locate
from megakernel.config import ConfigError, digest, load_json, load_toml
from megakernel.families import read_model
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.lowering import lower
from megakernel.measurement import Record
from megakernel.model import ModelSpec
from megakernel.tiling import Choices, Rounding
from megakernel.workload import Bucket
from simulator.microbench import check_card
from tuner.search_config import SearchConfig
from tuner.space import Space

HAND = "hand plan"
REFERENCE = "reference plan"
REFERENCE_ORDER = "reference order, hand cap"
RECORDED = "best on record"

PROBES = 200
"""Random points tried before a space is said to hold nothing legal."""


@dataclass(frozen=True)
class Baseline:
    """A plan that always races."""

    name: str
    choices: Choices


@dataclass(frozen=True)
class Problem:
    """A search, ready to run; `source` is the file's name for messages and provenance, `records` earlier contests."""

    source: str
    config: SearchConfig
    model: ModelSpec
    chip: HardwareSpec
    baselines: tuple[Baseline, ...]
    records: tuple[Record, ...] = ()

    def racing(self, bucket: Bucket, rounding: Rounding | None = None) -> tuple[Baseline, ...]:
        """The baselines as they race in `bucket`: in the rounding that is settled, if one is, and a ring that fits.

        The fastest on record is one of them where it was timed: in its own bucket and rounding.
        """
        found = self.baselines
        if rounding is not None:
            found = tuple(replace(each, choices=_with(each.choices, rounding=rounding)) for each in found)
        found = [
            replace(each, choices=limits.fitting_ring(self.model, bucket, each.choices, self.chip)) for each in found
        ]
        fastest = self.fastest_on_record(bucket)
        is_known = fastest in [each.choices for each in found]
        if fastest is None or is_known or rounding not in (None, fastest.rounding):
            return tuple(found)
        return (*found, Baseline(RECORDED, fastest))

    def record_of(self, bucket: Bucket) -> Record | None:
        """The latest record of `bucket`."""
        return next((each for each in self.records if each.bucket == bucket), None)

    def fastest_on_record(self, bucket: Bucket) -> Choices | None:
        """The fastest of the bucket's latest record that can still run."""
        record = self.record_of(bucket)
        if record is None:
            return None
        timed = {name: choices for name, choices in record.choices.items() if name not in record.faults}
        for name in sorted(timed, key=record.median_ms):
            if not limits.reasons(self.model, bucket, timed[name], self.chip):
                return timed[name]
        return None


def load_problem(given: str, overrides: Iterable[str] = ()) -> Problem:
    """Read a search file and what it names; ConfigError says what is missing, malformed or impossible."""
    path = locate(given)
    config = load_toml(path, SearchConfig, overrides)

    def beside(name: str) -> Path:
        return path.parent / name

    model = read_model(beside(config.model))
    chip = load_hardware(beside(config.chip))
    hand_path, reference_path = beside(config.baselines.hand), beside(config.baselines.reference)
    hand, reference = load_toml(hand_path, Choices), load_toml(reference_path, Choices)
    others = tuple(map(beside, config.baselines.also))
    also = tuple(Baseline(path.stem.replace("-", " "), load_toml(path, Choices)) for path in others)
    records = tuple(load_record(beside(each), model, chip) for each in config.ladder.measured.records)
    problem = Problem(given, config, model, chip, (*baselines(hand, reference), *also), records)
    sources = (hand_path, reference_path, reference_path, *others)
    for bucket in config.buckets:
        racing = problem.racing(bucket)
        for source, written, baseline in zip(sources, problem.baselines, racing, strict=False):
            # As it is given it must do for one row: more rows are all that shortens a ring.
            _check(f"{source}: the {written.name}", model, bucket.model_copy(update={"rows": 1}), written.choices, chip)
            _check(f"{source}: the {baseline.name}", model, bucket, baseline.choices, chip)
        short = limits.check_memory(lower(model, bucket, racing[0].choices), chip)
        if short:
            raise ConfigError(f"{given}: {_title(bucket)}: {short[0]}")
        _check_space(given, Space(model, bucket, chip, config.space), racing, (model, bucket, chip))
    return problem


def load_record(path: Path, model: ModelSpec, chip: HardwareSpec) -> Record:
    """A record of a contest; ConfigError when it is of another model, or of a card that is another chip."""
    record = load_json(path, Record)
    if record.model_digest != digest(model):
        raise ConfigError(f"{path}: measured another model than the search's")
    check_card(record.card, chip, str(path))
    return record


def baselines(hand: Choices, reference: Choices) -> tuple[Baseline, ...]:
    """The plans in the race. The third is the hand plan in all but its order, so that the order alone is compared."""
    order = reference.interleave.order
    if hand.interleave.router_with_project:
        order = tuple(text for text in order if text != "route")
    mixed = _with(hand, interleave=hand.interleave.model_copy(update={"order": order}))
    return Baseline(HAND, hand), Baseline(REFERENCE, reference), Baseline(REFERENCE_ORDER, mixed)


def _with(choices: Choices, **parts: BaseModel) -> Choices:
    return choices.model_copy(update=parts)


def _check_space(
    source: str, space: Space, racing: tuple[Baseline, ...], where: tuple[ModelSpec, Bucket, HardwareSpec]
) -> None:
    """Refuse a space without a legal point: its values are the user's, and a search would only count refusals."""
    model, bucket, chip = where
    draw = Random(0)
    points = [space.nearest(each.choices) for each in racing]
    points += [{each.name: draw.randrange(len(each.values)) for each in space.dimensions} for _ in range(PROBES)]
    found: list[str] = []
    for point in points:
        found = limits.reasons(model, bucket, space.choices(point), chip)
        if not found:
            return
    listed = "".join(f"\n  {reason}" for reason in found)
    raise ConfigError(f"{source}: [space] leaves nothing that {chip.name} can run; for example:{listed}")


def _check(source: str, model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> None:
    found = limits.reasons(model, bucket, choices, chip)
    if found:
        listed = "".join(f"\n  {reason}" for reason in found)
        raise ConfigError(f"{source} can't run {_title(bucket)} on {chip.name}:{listed}")


def _title(bucket: Bucket) -> str:
    rows = "1 row" if bucket.rows == 1 else f"{bucket.rows} rows"
    return f"the bucket of {rows} up to {bucket.max_context_tokens} tokens"
