"""How few layers tell the time of all: two runs that differ by whole periods of a model's layers.

Owns the arithmetic on layer patterns. Layers cost the same again in every period once the irregular first ones and the
start are behind, so a step's time is a line in the number of periods. Called by `predict`.
"""

from __future__ import annotations

from megakernel.model import ModelSpec

LEAST_STRETCH = 4
"""Layers by which two runs differ at least: the end of one layer's copies overlaps with the next layer's first."""


def truncated(model: ModelSpec, num_layers: int) -> ModelSpec:
    """The model with only its first layers."""
    return model.model_copy(update={"layers": model.layers[:num_layers]})


def runs(model: ModelSpec, at_least: int = 1) -> dict[int, float]:
    """Numbers of layers to run, and the weights of their times in the sum that predicts all layers.

    A stretch is whole periods, LEAST_STRETCH layers or more. The shorter run has the irregular first layers and a
    stretch, `at_least` layers, and as many more as leave whole stretches; the longer one has a stretch more. If that
    would be all layers, they are run.
    """
    stretch = stretch_layers(model)
    needed = max(irregular_layers(model, repeat_period(model)) + stretch, at_least)
    stretches = (model.num_layers - needed) // stretch
    if stretches <= 1:
        return {model.num_layers: 1.0}
    short = model.num_layers - stretches * stretch
    return {short: 1.0 - stretches, short + stretch: float(stretches)}


def stretch_layers(model: ModelSpec) -> int:
    """Layers of a stretch."""
    period = repeat_period(model)
    return -(-LEAST_STRETCH // period) * period


def repeat_period(model: ModelSpec) -> int:
    """Layers after which the model repeats itself: the period that explains it with the fewest layers."""
    return min(range(1, model.num_layers + 1), key=lambda period: (irregular_layers(model, period) + period, period))


def irregular_layers(model: ModelSpec, period: int) -> int:
    """First layers, before the rest repeats with `period`."""
    layers = model.layers
    first = model.num_layers - period
    while first > 0 and layers[first - 1] == layers[first - 1 + period]:
        first -= 1
    return first
