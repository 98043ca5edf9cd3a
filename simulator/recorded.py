"""Routing as it was recorded: how often each expert of each layer was picked, and draws that keep these shares.

Owns the file of picks and its checks against a model. A row's chance to hit an expert is the expert's share of all
picks times `top_k`, exactly: rows are drawn by systematic sampling over a random order of the experts, and rows are
independent. Called by `routing` and by the commands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from megakernel.config import ConfigError, Frozen, load_json
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.workload import Routing

Picks = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]

_ROUNDING = 1e-9
"""By how much a chance may exceed one."""


class PickCounts(Frozen):
    """A file of picks: one list of counts per routed layer in their order, or a single list for all of them."""

    counts: Annotated[tuple[Picks, ...], Field(min_length=1)]


class Recorded(Routing):
    """Routing by recorded counts; `source` names the file."""

    source: str
    counts: tuple[tuple[int, ...], ...]

    def chances(self, top_k: int, routed_layer: int) -> npt.NDArray[np.float64]:
        """Chance of each expert to be among the `top_k` picks of a row; they add up to `top_k`."""
        counts = np.array(self.counts[routed_layer if len(self.counts) > 1 else 0], dtype=np.float64)
        return np.minimum(top_k * counts / counts.sum(), 1.0)

    def mean_distinct(self, top_k: int, rows: int, routed_layer: int | None) -> float:
        """Mean number of distinct experts that `rows` rows hit in a layer; without one, the mean over the layers."""
        layers = range(len(self.counts)) if routed_layer is None else (routed_layer,)
        each = [float((1.0 - (1.0 - self.chances(top_k, layer)) ** rows).sum()) for layer in layers]
        return sum(each) / len(each)

    def draw_distinct(self, top_k: int, rows: int, routed_layer: int, chance: np.random.Generator) -> int:
        """Distinct experts of one layer and step."""
        chances = self.chances(top_k, routed_layer)
        order = chance.permuted(np.tile(np.arange(len(chances)), (rows, 1)), axis=1)
        upper = np.cumsum(chances[order], axis=1)
        upper[:, -1] = top_k
        points = np.ceil(upper - chance.uniform(size=(rows, 1)))  # of a comb with unit distance
        picked = np.diff(points, axis=1, prepend=0.0) > 0.0
        return len(np.unique(order[picked]))


def load_picks(path: str | Path, model: ModelSpec) -> Recorded:
    """Read a file of picks for `model`; ConfigError unless its layers and experts are the model's."""
    counts = load_json(path, PickCounts).counts
    layers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, RoutedMlp)]
    if len(counts) not in {1, len(layers)}:
        raise ConfigError(
            f"{path}: counts of {len(counts)} layers; the model has {len(layers)} routed ones: give each, or one list"
        )
    for idx, mlp in enumerate(layers):
        _check(f"{path}: counts of routed layer {idx}", counts[idx if len(counts) > 1 else 0], mlp)
    return Recorded(source=str(path), counts=counts)


def _check(source: str, picks: tuple[int, ...], mlp: RoutedMlp) -> None:
    if len(picks) != mlp.num_experts:
        raise ConfigError(f"{source} are of {len(picks)} experts; the model has {mlp.num_experts}")
    total = sum(picks)
    if not total:
        raise ConfigError(f"{source} are all 0; needed: at least one pick")
    if max(picks) * mlp.top_k > total * (1.0 + _ROUNDING):
        expert = max(range(len(picks)), key=lambda each: picks[each])
        raise ConfigError(
            f"{source}: expert {expert} has {100.0 * max(picks) / total:.1f}% of the picks; a row picks {mlp.top_k} "
            f"different experts, so at most {100.0 / mlp.top_k:.1f}% are possible"
        )
