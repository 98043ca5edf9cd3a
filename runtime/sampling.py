"""How a row's next token is drawn: the parameters of a row, and noise that depends on nothing but the row itself.

Noise is a hash of (seed, position, token id), so the same seed gives the same token in any batch, row, bucket or
restart. The kernel draws with the same integers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from megakernel.config import Frozen


class SamplingParams(Frozen):
    """Parameters of one row; temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 leave all tokens in."""

    temperature: float = Field(default=0.0, ge=0.0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**63)


GREEDY = SamplingParams()


def uniform_noise(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Uniform numbers in (0, 1), one per token id: SplitMix64 finalisers over seed, position and id (Steele 2014)."""
    state = _mix(np.array([seed], dtype=np.uint64))
    state = _mix(state ^ np.uint64(position))
    bits = _mix(state ^ tokens.astype(np.uint64))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def kept_tokens(logits: npt.NDArray[np.float64], params: SamplingParams) -> npt.NDArray[np.int64]:
    """Token ids that survive top_k, then top_p, then min_p at the row's temperature, most likely first.

    `logits` [vocab]. Ties keep the lower id first. top_p keeps the smallest set whose mass reaches it; at least one
    token is always kept.
    """
    order = np.argsort(-logits, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    scaled = logits[order] / params.temperature
    mass = np.exp(scaled - scaled[0])
    mass /= mass.sum()
    before = np.cumsum(mass) - mass
    keep = (before < params.top_p) & (mass >= params.min_p * mass[0])
    return order[keep]


def sample(logits: npt.NDArray[np.float64], params: SamplingParams, position: int) -> int:
    """Next token of a row with `logits` [vocab]: Gumbel-max over the kept tokens, or the first maximum when greedy."""
    if params.temperature == 0.0:
        return int(np.argmax(logits))
    kept = kept_tokens(logits, params)
    noise = -np.log(-np.log(uniform_noise(params.seed, position, kept)))
    return int(kept[int(np.argmax(logits[kept] / params.temperature + noise))])
