"""What a step's result makes of a request: the next token, its log probabilities, and whether that is its end."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from runtime.engine.backend import Result, Want
from runtime.engine.sequence import Sequence
from runtime.request import CONSTRAINT_FAILED, FinishReason, TokenLogprobs
from runtime.sampling import NO_TOKEN, Logits, edit, likeliest, log_softmax, sample

log = logging.getLogger(__name__)


class RowError(Exception):
    """One request can't go on, the others can. `corrupted`: the model's output was not a number."""

    def __init__(self, message: str, *, corrupted: bool = False) -> None:
        """`message` is fit for the request's sender."""
        super().__init__(message)
        self.corrupted = corrupted


@dataclass(frozen=True)
class News:
    """Tokens that a request got, and how it ended with the last of them, if it did."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_id: int | None = None


def tokens_left(sequence: Sequence, max_context_tokens: int) -> int:
    """Tokens that may still be generated."""
    return min(sequence.request.stopping.max_tokens - sequence.generated, max_context_tokens - len(sequence.tokens))


def prepare(sequence: Sequence) -> Want:
    """Ask the constraint for its mask, and say what the next token takes: the device's sampling, or logits."""
    constraint = sequence.request.constraint
    if constraint is not None:
        try:
            sequence.mask = constraint.mask()
        except Exception as error:
            raise _constraint_failed(sequence, error) from error
    return Want.LOGITS if sequence.needs_host else Want.TOKEN


def advance(sequence: Sequence, result: Result, max_context_tokens: int) -> News:
    """Append what follows the last computed position: one token, or a chain's up to the one that ends the request."""
    drawn, logprobs = result.tokens, ()
    if result.logits is not None:
        token, logprobs = _draw(sequence, result.logits)
        drawn = (token,)
    for count, token in enumerate(drawn, 1):
        if token == NO_TOKEN:
            raise RowError("the model's output is not a number", corrupted=True)
        is_complete = _accept(sequence, token)
        tokens = drawn[:count]
        if token in sequence.ending:
            return News(tokens, logprobs, FinishReason.STOP, token)
        if is_complete:
            return News(tokens, logprobs, FinishReason.STOP)
        if tokens_left(sequence, max_context_tokens) <= 0:
            return News(tokens, logprobs, FinishReason.LENGTH)
    return News(drawn, logprobs)


def collect_prompt_logprobs(sequence: Sequence, begin: int, logits: npt.NDArray[np.floating]) -> None:
    """Note how likely the prompt's tokens were, from logits [tokens, vocab] of positions `begin` on."""
    found, count = sequence.prompt_logprobs, sequence.request.prompt_logprobs
    assert found is not None
    assert count is not None
    for following, row in enumerate(logits, begin + 1):
        if following == len(found) < len(sequence.request.prompt):
            found.append(_token_logprobs(_numbers(row), sequence.tokens[following], count))


def _draw(sequence: Sequence, logits: npt.NDArray[np.floating]) -> tuple[int, tuple[TokenLogprobs, ...]]:
    """Sample on the host; log probabilities are those before any edit."""
    raw, request = _numbers(logits), sequence.request
    token = sample(edit(raw, request.sampling, sequence.edits()), request.sampling, sequence.computed - 1)
    if token == NO_TOKEN:
        raise RowError(CONSTRAINT_FAILED)  # the likeliest token is -inf only where all are masked
    return token, () if request.logprobs is None else (_token_logprobs(raw, token, request.logprobs),)


def _accept(sequence: Sequence, token: int) -> bool:
    """Append a token; whether the constraint is complete with it."""
    sequence.append(token)
    constraint, is_complete = sequence.request.constraint, False
    try:
        if constraint is not None:
            constraint.accept(token)
            is_complete = constraint.is_complete
    except Exception as error:
        raise _constraint_failed(sequence, error) from error
    return is_complete


def _constraint_failed(sequence: Sequence, error: Exception) -> RowError:
    """Log the kind of error only: its message may quote what was generated."""
    log.error("the constraint of request %s failed: %s", sequence.request.id, type(error).__name__)
    return RowError(CONSTRAINT_FAILED)


def _numbers(logits: npt.NDArray[np.floating]) -> Logits:
    """Raw logits in float64; a row without a finite maximum is corrupted."""
    raw = logits.astype(np.float64)
    if not np.isfinite(raw.max()):
        raise RowError("the model's output is not a number", corrupted=True)
    return raw


def _token_logprobs(raw: Logits, token: int, count: int) -> TokenLogprobs:
    values = log_softmax(raw)
    top = tuple((int(each), float(values[each])) for each in likeliest(raw, count))
    return TokenLogprobs(float(values[token]), 1 + int((raw > raw[token]).sum()), top)
