"""Fits constants to measured times: least squares over relative errors, and how far each constant is known.

Owns the arithmetic alone: a damped Gauss-Newton descent in the constants' logarithms, with slopes from one further
simulation per constant, and intervals from the same slopes. Refuses to know what was measured or what the constants
mean: callers say how times are simulated. Called by `calibrate` and by the fits of published and measured data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Values = dict[str, float]

STEP = 0.08
"""Change of a constant's logarithm from which a slope is taken: well above a simulation's own grain."""
LONGEST = 0.7
"""Change of a logarithm in one round at most."""
DAMPINGS = (0.02, 0.2, 2.0)
"""Tried in turn until a round is an improvement; relative to the slopes' own size."""
LEAST_SLOPE = 1e-3
"""Of the mean squared slope: constants that times hardly depend on stay where they are."""
Z95 = 1.96
WIDEST = 10.0
"""Spread of a logarithm beyond which a constant is as good as unknown."""


@dataclass(frozen=True)
class Constant:
    """A fitted value, and the interval in which it lies with 95% if errors are independent and normal."""

    name: str
    value: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether the times tell it within a factor of two."""
        return self.high <= 2.0 * self.value


@dataclass(frozen=True)
class Fitted:
    """Fitted constants, and the relative error of every time that they were fitted to."""

    constants: tuple[Constant, ...]
    errors: Times

    @property
    def values(self) -> Values:
        """Values by name."""
        return {each.name: each.value for each in self.constants}

    @property
    def mape(self) -> float:
        """Mean of the errors' sizes."""
        return float(np.abs(self.errors).mean())


def most_simulations(constants: int, rounds: int) -> int:
    """How often a fit asks for all times at most."""
    return 1 + rounds * (constants + len(DAMPINGS)) + constants


def fit(
    start: Mapping[str, float],
    measured: Times,
    simulate: Callable[[Values], Times],
    *,
    rounds: int,
    progress: Callable[[int, float, Values], None] | None = None,
) -> Fitted:
    """Fit positive constants, from `start`, to `measured` times; equal input gives an equal result."""
    names = tuple(start)

    def values(logs: Times) -> Values:
        return dict(zip(names, np.exp(logs).tolist(), strict=True))

    def errors_at(logs: Times) -> Times:
        return np.log(simulate(values(logs)) / measured)

    logs = np.log(np.array([start[name] for name in names]))
    errors = errors_at(logs)
    slopes = _slopes(errors_at, logs, errors)
    for number in range(rounds):
        found = _improved(errors_at, logs, errors, slopes)
        if found is None:
            break
        logs, errors = found
        if progress is not None:
            progress(number, float(np.abs(errors).mean()), values(logs))
        slopes = _slopes(errors_at, logs, errors)
    freedom = max(1, len(errors) - len(names))
    spread = np.sqrt(np.diag(np.linalg.pinv(slopes.T @ slopes)) * (errors @ errors) / freedom)
    # A constant without a slope is not known at all, whatever the pseudo-inverse says of it.
    spread[np.einsum("ij,ij->j", slopes, slopes) == 0.0] = WIDEST
    constants = tuple(
        Constant(name, float(np.exp(log)), float(np.exp(log - Z95 * each)), float(np.exp(log + Z95 * each)))
        for name, log, each in zip(names, logs, np.minimum(spread, WIDEST), strict=True)
    )
    return Fitted(constants, np.exp(errors) - 1.0)


def _slopes(errors_at: Callable[[Times], Times], logs: Times, errors: Times) -> Times:
    steps = STEP * np.eye(len(logs))
    return np.column_stack([(errors_at(logs + step) - errors) / STEP for step in steps])


def _improved(
    errors_at: Callable[[Times], Times], logs: Times, errors: Times, slopes: Times
) -> tuple[Times, Times] | None:
    """One round: where it leads, and the errors there; None if nothing tried is better."""
    normal = slopes.T @ slopes
    size = np.diag(np.diag(normal) + LEAST_SLOPE * np.trace(normal) / len(logs) + 1e-12)
    for damping in DAMPINGS:
        change = np.clip(-np.linalg.solve(normal + damping * size, slopes.T @ errors), -LONGEST, LONGEST)
        found = errors_at(logs + change)
        if found @ found < errors @ errors:
            return logs + change, found
    return None
