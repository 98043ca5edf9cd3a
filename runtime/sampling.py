"""How a row's next token is drawn: its parameters, what they do to logits, and noise that depends on the row alone.

Noise is a hash of (seed, position, token id), so the same seed gives the same token in any batch, row, bucket or
restart. The kernel draws with the same integers. One order everywhere, for the first token as for every other: allowed
ids (a constraint's mask), bias, banned ids (min_tokens), penalties, temperature, min_p, top_k, then top_p on what is
left, renormalised. Log probabilities come from the logits before all of that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from pydantic import Field

from megakernel.config import Frozen

Logits = npt.NDArray[np.float64]

LOGPROB_FLOOR = -9999.0
"""What a log probability of zero is reported as: JSON has no infinities."""


NO_TOKEN = -1
"""What is drawn where nothing can be: the largest logit is not a number, or every token is masked."""


class SamplingParams(Frozen):
    """Parameters of one row; temperature 0 is greedy, top_k 0, top_p 1 and min_p 0 leave all tokens in.

    `presence_penalty` and `frequency_penalty` look at generated tokens, `repetition_penalty` at those and the prompt.
    `logit_bias` pairs token ids with what is added to their logits.
    """

    temperature: float = Field(default=0.0, ge=0.0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    logit_bias: tuple[tuple[Annotated[int, Field(ge=0)], float], ...] = ()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, the lowest id among equals."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def edits_logits(self) -> bool:
        """Whether logits are changed before the temperature, which is the host's work."""
        return self.has_penalties or bool(self.logit_bias)


GREEDY = SamplingParams()


@dataclass(frozen=True)
class Edits:
    """What a row's history and constraint do to its logits.

    `allowed`: bitmask [ceil(vocab / 32)] int32, bit `i % 32` of word `i // 32`; `banned`: ids that may not come yet;
    `prompt`: whether an id is in the prompt, [vocab]; `generated`: how often it was generated, [vocab].
    """

    allowed: npt.NDArray[np.int32] | None = None
    banned: Collection[int] = ()
    prompt: npt.NDArray[np.bool_] | None = None
    generated: npt.NDArray[np.int32] | None = None


def edit(logits: Logits, params: SamplingParams, edits: Edits) -> Logits:
    """Logits [vocab] as the temperature meets them: masked, biased and penalised; -inf where a token is out."""
    logits = logits.copy()
    if edits.allowed is not None:
        logits[~allowed_ids(edits.allowed, len(logits))] = -np.inf
    for token, bias in params.logit_bias:
        logits[token] += bias
    if edits.banned:
        logits[list(edits.banned)] = -np.inf
    if edits.prompt is not None and edits.generated is not None:
        seen = np.flatnonzero(edits.prompt | (edits.generated > 0))
        at = logits[seen]
        logits[seen] = np.where(at > 0, at / params.repetition_penalty, at * params.repetition_penalty)
        logits -= params.presence_penalty * (edits.generated > 0) + params.frequency_penalty * edits.generated
    return logits


def allowed_ids(mask: npt.NDArray[np.int32], vocab: int) -> npt.NDArray[np.bool_]:
    """A bitmask of words as one truth value an id, [vocab]."""
    octets = np.ascontiguousarray(mask, dtype="<i4").view(np.uint8)
    return np.unpackbits(octets, bitorder="little", count=vocab).astype(np.bool_)


def uniform_noise(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> Logits:
    """Uniform numbers in (0, 1), one per token id: SplitMix64 finalisers over seed, position and id (Steele 2014)."""
    state = _mix(np.array([seed], dtype=np.uint64))
    state = _mix(state ^ np.uint64(position))
    bits = _mix(state ^ tokens.astype(np.uint64))
    # the largest integer rounds up to 1, which is not in the interval
    return np.minimum(((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53, 1.0 - 2.0**-53)


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def kept_tokens(logits: Logits, params: SamplingParams) -> npt.NDArray[np.int64]:
    """Token ids, ascending, that survive min_p, then top_k, then top_p at the row's temperature.

    `logits` [vocab], the largest of them finite. Among equals the lower ids stay. top_p keeps the smallest set whose
    mass, of what min_p and top_k left, reaches it. The likeliest token is always kept, tokens at -inf never.
    """
    kept = np.flatnonzero(logits > -np.inf)
    mass = np.exp(_tempered(logits[kept], params.temperature))  # the likeliest has mass 1
    kept, mass = kept[mass >= params.min_p], mass[mass >= params.min_p]
    if 0 < params.top_k < len(kept):
        chosen = _largest(logits[kept], params.top_k)
        kept, mass = kept[chosen], mass[chosen]
    if params.top_p < 1.0:
        mass = mass / mass.sum()
        # tokens below an even share of what top_p leaves out can't be in the smallest set: no need to sort them
        candidates = np.flatnonzero(mass >= 0.999 * (1.0 - params.top_p) / len(kept))
        order = candidates[np.argsort(-logits[kept[candidates]], kind="stable")]
        kept = np.sort(kept[order[np.cumsum(mass[order]) - mass[order] < params.top_p]])
    return kept


def _tempered(logits: Logits, temperature: float) -> Logits:
    """Logits below the largest, divided by the temperature, which may be so small that they fall to -inf."""
    with np.errstate(over="ignore"):
        return (logits - logits.max()) / temperature


def _largest(logits: Logits, count: int) -> npt.NDArray[np.int64]:
    """Indices, ascending, of the `count` largest logits, of which there are no fewer; of equals the lower ones."""
    threshold = np.partition(logits, -count)[-count]
    above = np.flatnonzero(logits > threshold)
    equal = np.flatnonzero(logits == threshold)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))


def sample(logits: Logits, params: SamplingParams, position: int) -> int:
    """Next token of a row with `logits` [vocab]: Gumbel-max over the kept tokens, or the first maximum when greedy.

    `position` is that of the token the logits follow. NO_TOKEN when the largest logit is not a finite number.
    """
    best = int(np.argmax(logits))  # the first NaN, if there is one
    if not np.isfinite(logits[best]):
        return NO_TOKEN
    if params.is_greedy:
        return best
    kept = kept_tokens(logits, params)
    noise = -np.log(-np.log(uniform_noise(params.seed, position, kept)))
    return int(kept[int(np.argmax(_tempered(logits[kept], params.temperature) + noise))])


def log_softmax(logits: Logits) -> Logits:
    """Log probabilities [vocab], none below `LOGPROB_FLOOR`."""
    shifted = logits - logits.max()
    return np.maximum(shifted - np.log(np.exp(shifted).sum()), LOGPROB_FLOOR)


def likeliest(logits: Logits, count: int) -> npt.NDArray[np.int64]:
    """The `count` likeliest ids, most likely first; among equals the lower id."""
    count = min(count, len(logits))
    if count == 0:
        return np.empty(0, dtype=np.int64)
    best = _largest(logits, count)
    return best[np.argsort(-logits[best], kind="stable")]
