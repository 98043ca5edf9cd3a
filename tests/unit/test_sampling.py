"""Sampling follows the law its parameters say, and nothing but the row decides the draw."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from runtime.sampling import (
    LOGPROB_FLOOR,
    NO_TOKEN,
    Edits,
    SamplingParams,
    allowed_ids,
    edit,
    kept_tokens,
    likeliest,
    log_softmax,
    sample,
    uniform_noise,
)

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
        # min_p goes first, top_p last and on what is left: 0.4 and 0.3 of 0.7 are 0.57 and 0.43
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.56), [0]),
        (SamplingParams(temperature=1.0, top_k=2, top_p=0.58), [0, 1]),
        (SamplingParams(temperature=1.0, min_p=0.7, top_p=0.56), [0]),
        (SamplingParams(temperature=1.0, min_p=1.0, top_k=3, top_p=0.9), [0]),
        (SamplingParams(temperature=1.0, top_k=99), [0, 1, 2, 3, 4]),
    ],
)
def test_filters_keep_the_smallest_set_that_qualifies(params: SamplingParams, kept: list[int]) -> None:
    assert kept_tokens(LOGITS, params).tolist() == kept
    assert set(np.nonzero(draws(params, 300))[0]) <= set(kept)


def plainly_kept(logits: np.ndarray, params: SamplingParams) -> list[int]:
    """The filters one after another, by sorting everything."""
    order = sorted((token for token in range(len(logits)) if logits[token] > -np.inf), key=lambda t: (-logits[t], t))
    mass = {token: np.exp((logits[token] - logits[order[0]]) / params.temperature) for token in order}
    order = [token for token in order if mass[token] >= params.min_p]
    order = order[: params.top_k] if params.top_k else order
    total, before, kept = sum(mass[token] for token in order), 0.0, []
    for token in order:
        if before / total < params.top_p:
            kept.append(token)
        before += mass[token]
    return sorted(kept)


def test_filters_equal_a_plain_statement_of_them_on_random_logits_with_ties() -> None:
    generator = np.random.default_rng(1)
    for _ in range(300):
        logits = np.round(generator.normal(size=60) * 3, 1)
        logits[generator.integers(0, 60, 9)] = -np.inf
        params = SamplingParams(
            temperature=float(generator.uniform(0.2, 3)),
            top_k=int(generator.integers(0, 70)),
            top_p=float(generator.choice([0.1, 0.5, 0.9, 0.999, 1.0])),
            min_p=float(generator.choice([0.0, 0.01, 0.3])),
        )
        assert kept_tokens(logits, params).tolist() == plainly_kept(logits, params)


@pytest.mark.parametrize("temperature", [1e-6, 1e-300, 5e-324])
def test_the_smallest_temperatures_are_greedy_and_no_number_overflows(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, top_p=0.9)
    assert {sample(LOGITS[::-1], params, position) for position in range(50)} == {4}


def test_without_a_finite_maximum_nothing_is_drawn() -> None:
    for params in (SamplingParams(), SamplingParams(temperature=1.0, top_p=0.5)):
        for bad in ([1.0, np.nan, 2.0], [np.inf, 0.0, 0.0], [-np.inf] * 3):
            assert sample(np.array(bad), params, 0) == NO_TOKEN
        assert sample(np.array([-np.inf, 1.0, -np.inf]), params, 0) == 1


def test_masks_are_read_bit_by_bit_up_to_the_vocabulary() -> None:
    words = np.array([-(2**31) + 5, 1], dtype=np.int32)  # bits 0, 2 and 31, then 32
    assert np.flatnonzero(allowed_ids(words, 40)).tolist() == [0, 2, 31, 32]
    assert len(allowed_ids(words, 33)) == 33


def test_edits_come_in_their_order_and_leave_the_logits_alone() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.0])
    params = SamplingParams(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((0, 2.0), (3, 100.0)),
    )
    edits = Edits(
        allowed=np.array([0b0111], dtype=np.int32),
        banned={2},
        prompt=np.array([True, False, False, False]),
        generated=np.array([0, 3, 0, 0], dtype=np.int32),
    )
    # 0: (2 + 2) / 2; 1: -2 * 2 - 0.5 - 3 * 0.25; 2 is banned; no bias lifts what the mask forbids
    assert edit(logits, params, edits).tolist() == [2.0, -5.25, -np.inf, -np.inf]
    assert logits.tolist() == [2.0, -2.0, 1.0, 0.0]
    assert edit(logits, SamplingParams(), Edits()).tolist() == logits.tolist()


def test_log_probabilities_have_a_floor_and_the_likeliest_their_order() -> None:
    values = log_softmax(np.array([0.0, -np.inf, 0.0]))
    assert values == pytest.approx([-np.log(2), LOGPROB_FLOOR, -np.log(2)])
    assert likeliest(np.array([1.0, 3.0, 2.0, 3.0]), 3).tolist() == [1, 3, 2]
    assert likeliest(np.array([1.0, 3.0]), 9).tolist() == [1, 0]
    assert likeliest(np.array([1.0, 3.0]), 0).tolist() == []


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
    wrong = [{"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 1.5}, {"seed": -1}, {"top_k": -1}]
    wrong += [{"presence_penalty": 2.5}, {"frequency_penalty": -2.5}, {"repetition_penalty": 0.0}]
    wrong += [{"logit_bias": ((-1, 1.0),)}, {"logit_bias": ((1, float("nan")),)}]
    for values in wrong:
        with pytest.raises(ValidationError):
            SamplingParams.model_validate(values)
