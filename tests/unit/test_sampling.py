"""Sampling follows the law its parameters say, and nothing but the row decides the draw."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from runtime.sampling import SamplingParams, kept_tokens, sample, uniform_noise

LOGITS = np.log(np.array([0.4, 0.3, 0.2, 0.06, 0.04]))


def draws(params: SamplingParams, count: int = 4000) -> np.ndarray:
    found = [sample(LOGITS, params, position) for position in range(count)]
    return np.bincount(found, minlength=len(LOGITS)) / count


def test_temperature_zero_takes_the_first_maximum() -> None:
    assert sample(np.array([1.0, 3.0, 3.0]), SamplingParams(), 0) == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_tempered_softmax(temperature: float) -> None:
    expected = np.exp(LOGITS / temperature)
    expected /= expected.sum()
    found = draws(SamplingParams(temperature=temperature, seed=3))
    # four standard errors of a proportion
    assert np.all(np.abs(found - expected) < 4 * np.sqrt(expected * (1 - expected) / 4000) + 1e-9)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0, top_k=2), [0, 1]),
        (SamplingParams(temperature=1.0, top_p=0.7), [0, 1]),
        (SamplingParams(temperature=1.0, top_p=0.71), [0, 1, 2]),
        (SamplingParams(temperature=1.0, top_p=1e-9), [0]),
        (SamplingParams(temperature=1.0, min_p=0.2), [0, 1, 2]),
        (SamplingParams(temperature=1.0, top_k=4, top_p=0.95, min_p=0.5), [0, 1, 2]),
    ],
)
def test_filters_keep_the_smallest_set_that_qualifies(params: SamplingParams, kept: list[int]) -> None:
    assert kept_tokens(LOGITS, params).tolist() == kept
    assert set(np.nonzero(draws(params, 300))[0]) <= set(kept)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    tokens = np.arange(1000)
    noise = uniform_noise(5, 9, tokens)
    assert np.array_equal(uniform_noise(5, 9, tokens[::-1]), noise[::-1])
    assert not np.array_equal(uniform_noise(6, 9, tokens), noise)
    assert not np.array_equal(uniform_noise(5, 10, tokens), noise)
    assert noise.min() > 0.0
    assert noise.max() < 1.0
    assert abs(noise.mean() - 0.5) < 4 * np.sqrt(1 / 12 / 1000)


def test_parameters_out_of_range_are_refused() -> None:
    for values in ({"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}, {"seed": -1}):
        with pytest.raises(ValidationError):
            SamplingParams.model_validate(values)
