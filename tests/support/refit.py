"""Fits one part of a chip's constants to measured times, and says what was found: for the scripts beside the tests."""

# ruff: noqa: T201 - scripts report on stdout

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from megakernel.hardware import HardwareSpec
from simulator.fit import Values, fit


def refit(
    chip: HardwareSpec,
    part: str,
    names: Sequence[str],
    measured: Sequence[float],
    simulate: Callable[[HardwareSpec], Sequence[float]],
    rounds: int,
) -> HardwareSpec:
    """The chip with `names` of its `part` ("costs", "work") fitted; prints rounds, values and intervals."""

    def changed(values: Values) -> HardwareSpec:
        return chip.model_copy(update={part: getattr(chip, part).model_copy(update=values)})

    found = fit(
        {name: getattr(getattr(chip, part), name) for name in names},
        np.array(measured),
        lambda values: np.array(simulate(changed(values))),
        rounds=rounds,
        progress=lambda number, error, values: print(f"round {number}: {error:.5f} {values}", flush=True),
    )
    for each in found.constants:
        print(f"{each.name} = {each.value:.4g}  # 95% within {each.low:.3g} to {each.high:.3g}")
    return changed(found.values)
