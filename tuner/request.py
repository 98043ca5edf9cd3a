"""A measurement file for candidates: what `runtime measure` reads.

Owns the text. Every variant is the hand choices and assignments to them, so that people read what differs. Paths are
relative to where the file will lie. Called by `measure.py` and by `tuner request`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path

from megakernel import limits
from megakernel.assets import locate
from megakernel.config import ConfigError
from megakernel.tiling import Choices
from megakernel.workload import Bucket
from tuner.problem import HAND, Problem
from tuner.space import Space

MOST_CANDIDATES = 200
"""Candidates of a space that are measured all; more are a search's to choose from."""


def request_toml(problem: Problem, bucket: Bucket, named: Mapping[str, Choices], folder: Path) -> str:
    """A measurement file of `named` choices in `bucket`, every row at its nominal length, to lie in `folder`."""
    config = problem.config
    beside = locate(problem.source).parent
    hand = next(each.choices for each in problem.baselines if each.name == HAND)

    def path(name: str) -> str:
        return json.dumps(Path(os.path.relpath(beside / name, folder)).as_posix())

    how = config.ladder.measured
    kernel = ", ".join(f"{key} = {json.dumps(value)}" for key, value in how.kernel.items())
    # The last of the nominal tokens but one is decoded: the step appends its own.
    positions = [max(bucket.nominal_context_tokens - 2, 0)] * bucket.rows
    lines = [
        f"model = {path(config.model)}",
        f"chip = {path(config.chip)}",
        f"positions = {positions}",
        f"rounds = {how.rounds}",
        "",
        "[bucket]",
        *(f"{key} = {value}" for key, value in bucket),
    ]
    for name, choices in named.items():
        lines += [
            "",
            "[[variants]]",
            f"name = {json.dumps(name)}",
            f"choices = {path(config.baselines.hand)}",
            f"set = {json.dumps(list(_assignments(hand, choices)))}",
            f"kernel = {{ {kernel} }}",
            f"steps = {how.steps}",
        ]
    return "\n".join(lines) + "\n"


def all_candidates(problem: Problem, bucket: Bucket) -> dict[str, Choices]:
    """The plans that always race and every candidate of a small space; ConfigError when it is not small."""
    space = Space(problem.model, bucket, problem.chip, problem.config.space)
    num_points = 1
    for each in space.dimensions:
        num_points *= len(each.values)
    found = {each.choices: each.name for each in problem.racing(bucket)}
    if num_points <= MOST_CANDIDATES:
        for point in product(*(range(len(each.values)) for each in space.dimensions)):
            choices = space.choices({each.name: idx for each, idx in zip(space.dimensions, point, strict=True)})
            if not limits.reasons(problem.model, bucket, choices, problem.chip):
                found.setdefault(choices, f"candidate {len(found) - len(problem.baselines) + 1}")
    if num_points > MOST_CANDIDATES:
        raise ConfigError(
            f"{problem.source}: [space] has {num_points} candidates, at most {MOST_CANDIDATES} are measured all; "
            "give its choices fewer values"
        )
    return {name: choices for choices, name in found.items()}


def _assignments(base: Choices, choices: Choices) -> Iterable[str]:
    """What has to be set in `base` to get `choices`."""
    one, other = base.model_dump(mode="json"), choices.model_dump(mode="json")
    for group, values in other.items():
        for key, value in values.items():
            if one[group][key] != value:
                yield f"{group}.{key}={json.dumps(value)}"
