"""Which experts the rows of a step hit: seeded draws from a routing law, and the live states they give.

Owns the randomness of a prediction. A row picks `top_k` distinct experts of a layer, with chances that the law gives
(uniform, 1 / rank^exponent, or as `recorded`), drawn anew in every layer and row. Refuses to price a state. Called by
`predict` and `bounds`.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from megakernel.cost import LiveState
from megakernel.lowering.mlp import expected_experts
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.workload import Routing, Workload
from simulator.recorded import Recorded

_MEAN_DRAWS = 256
"""Draws behind the mean of a law without a closed form."""


def draw_states(model: ModelSpec, workload: Workload, *, draws: int, seed: int) -> tuple[LiveState, ...]:
    """Live states of `draws` independent steps; draw k depends on `seed` and k alone."""
    return tuple(_draw_state(model, workload, seed, draw) for draw in range(draws))


def mean_distinct_experts(mlp: RoutedMlp, rows: int, routing: Routing, routed_layer: int | None = None) -> float:
    """Mean number of distinct experts that rows hit in one layer: a closed form, or of fixed draws for a Zipf law.

    Recorded layers differ: without the number of the routed layer it is the mean over them.
    """
    if rows == 1:
        return float(mlp.top_k)
    if isinstance(routing, Recorded):
        return routing.mean_distinct(mlp.top_k, rows, routed_layer)
    if routing.kind == "uniform":
        return expected_experts(mlp, rows)
    return _drawn_mean(mlp.num_experts, mlp.top_k, rows, routing.exponent)


def mean_state(model: ModelSpec, workload: Workload) -> LiveState:
    """The state of a step with mean routing: whole numbers of experts per layer that add up like their means."""
    rows = len(workload.contexts)
    total, routed = 0.0, 0
    distinct: list[int] = []
    for layer in model.layers:
        before = total
        if isinstance(layer.mlp, RoutedMlp):
            total += mean_distinct_experts(layer.mlp, rows, workload.routing, routed)
            routed += 1
        distinct.append(round(total) - round(before))
    return LiveState(_positions(workload), tuple(distinct))


def upper_quantile(values: tuple[float, ...], share: float) -> float:
    """Smallest of `values` that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(ceil(share * len(ordered)), 1) - 1]


def _draw_state(model: ModelSpec, workload: Workload, seed: int, draw: int) -> LiveState:
    chance = np.random.Generator(np.random.PCG64([seed, draw]))
    rows, routing = len(workload.contexts), workload.routing
    distinct: list[int] = []
    routed = 0
    for layer in model.layers:
        mlp = layer.mlp
        if not isinstance(mlp, RoutedMlp):
            distinct.append(0)
        elif isinstance(routing, Recorded):
            distinct.append(routing.draw_distinct(mlp.top_k, rows, routed, chance))
        else:
            distinct.append(_draw_distinct(mlp.num_experts, mlp.top_k, rows, _exponent(routing), chance))
        routed += isinstance(mlp, RoutedMlp)
    return LiveState(_positions(workload), tuple(distinct))


def _positions(workload: Workload) -> tuple[int, ...]:
    return tuple(tokens - 1 for tokens in workload.contexts)


def _exponent(routing: Routing) -> float:
    return routing.exponent if routing.kind == "zipf" else 0.0


@lru_cache(maxsize=64)
def _drawn_mean(num_experts: int, top_k: int, rows: int, exponent: float) -> float:
    chance = np.random.Generator(np.random.PCG64(0))
    drawn = [_draw_distinct(num_experts, top_k, rows, exponent, chance) for _ in range(_MEAN_DRAWS)]
    return sum(drawn) / _MEAN_DRAWS


def _draw_distinct(num_experts: int, top_k: int, rows: int, exponent: float, chance: np.random.Generator) -> int:
    """Distinct experts of one layer. The top of log-weights plus Gumbel noise is a draw without replacement."""
    log_weights = -exponent * np.log(np.arange(1, num_experts + 1, dtype=np.float64))
    scores = chance.gumbel(size=(rows, num_experts)) + log_weights
    picked = np.argpartition(scores, num_experts - top_k, axis=1)[:, num_experts - top_k :]
    return len(np.unique(picked))
