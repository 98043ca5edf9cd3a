"""The gate that a variant passes before its time counts: it computes what the variants before it computed.

Owns what "the same" is. Of choices that sum in the same order, logits are equal bit by bit, whatever SM did which task
and however often it is repeated; other roundings must point the same way. Whether the first variant is right is the
parity tests' business. Tables that only stream must leave every counter where it belongs. Called by `campaign`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megakernel.config import ConfigError
from megakernel.tiling import Rounding
from runtime.gpu.launch import LoadedTable

REPEATS = 3
"""Launches of each variant, all of which must agree: a race shows in some of them."""

LEAST_COSINE = 0.9
"""Of the logits of two roundings: near-ties of routers may fall either way, a wrong sum points elsewhere."""


class Gate:
    """Results of the variants that have passed."""

    def __init__(self) -> None:
        """Nobody has passed yet."""
        self._logits: dict[Rounding, Tensor] = {}

    def check(self, rounding: Rounding, logits: list[Tensor]) -> None:
        """Let a variant of `rounding` pass with its logits [rows, vocabulary], one of each launch.

        ConfigError says in what they differ.
        """
        first = logits[0]
        if not torch.isfinite(first).all():
            raise ConfigError(f"{int((~torch.isfinite(first)).sum())} logits are not finite")
        for idx, repeated in enumerate(logits[1:]):
            if not torch.equal(first, repeated):
                raise ConfigError(f"launch {idx + 2} left other logits than the first, {_difference(first, repeated)}")
        if rounding in self._logits:
            if not torch.equal(first, self._logits[rounding]):
                raise ConfigError(
                    f"logits differ from those of the same rounding, {_difference(first, self._logits[rounding])}"
                )
        elif self._logits:
            other = next(iter(self._logits.values()))
            cosine = float(torch.cosine_similarity(first.double(), other.double(), dim=-1).min())
            if cosine < LEAST_COSINE:
                raise ConfigError(f"logits point elsewhere than another rounding's: cosine {cosine:.3f}")
        self._logits.setdefault(rounding, first)


def check_counters(loaded: LoadedTable, steps: int) -> None:
    """ConfigError unless a launch of `steps` steps raised every counter as often as its tasks are."""
    found, needed = loaded.counters().astype("<u8"), loaded.table.totals.astype("<u8") * steps
    if (found != needed).any():
        first = int((found != needed).argmax())
        name = loaded.titles.counter(first)
        raise ConfigError(f"{name} counted {int(found[first])} arrivals, needed {int(needed[first])}")


def _difference(one: Tensor, other: Tensor) -> str:
    worst = float((one.double() - other.double()).abs().max())
    return f"by {worst:.3g} at most, in {int((one != other).sum())} of {one.numel()}"
