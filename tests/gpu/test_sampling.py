"""On a card: tokens are drawn as `runtime.sampling` defines, from the kernel's own logits, and follow their law."""

from __future__ import annotations

import numpy as np
import pytest
from support import small
from support.card import drawn

from megakernel.build import build_step
from megakernel.workload import Bucket
from runtime.sampling import SamplingParams, kept_tokens, sample, uniform_noise

pytestmark = pytest.mark.gpu

ROWS = 8


@pytest.fixture(scope="module", params=[8192, 262144])
def decoder(request):
    """A small model whose logits spread over a vocabulary, as large as North's."""
    built = small.build(rows=ROWS)
    model = built.model.model_copy(update={"vocab_size": request.param, "logit_scale": 8.0})
    bucket = Bucket(rows=ROWS, max_context_tokens=4096, nominal_context_tokens=2048)
    return drawn(build_step(model, bucket, built.choices, small.chip()))


def random_params(rng: np.random.Generator) -> SamplingParams:
    return SamplingParams(
        temperature=float(rng.choice((0.0, 0.2, 0.7, 1.0, 1.5))),
        top_k=int(rng.choice((0, 0, 1, 5, 40, 1000))),
        top_p=float(rng.choice((0.05, 0.5, 0.9, 0.95, 1.0, 1.0))),
        min_p=float(rng.choice((0.0, 0.0, 0.02, 0.3))),
        seed=int(rng.integers(2**63)),
    )


def is_near_tie(logits: np.ndarray, params: SamplingParams, position: int, found: int, expected: int) -> bool:
    """Whether the kernel's single precision may prefer `found`: draws that close, or an edge of what is kept."""
    both = np.array([found, expected])
    scores = logits[both] / params.temperature - np.log(-np.log(uniform_noise(params.seed, position, both)))
    if abs(scores[0] - scores[1]) < 1e-4:
        return True
    looser = params.model_copy(update={"top_p": min(1.0, params.top_p * (1 + 1e-5)), "min_p": params.min_p * 0.99999})
    tighter = params.model_copy(update={"top_p": params.top_p * (1 - 1e-5), "min_p": min(1.0, params.min_p * 1.00001)})
    # only top_p and min_p are compared with rounded sums
    return (found in kept_tokens(logits, looser)) and (
        expected not in kept_tokens(logits, tighter) or found not in kept_tokens(logits, tighter)
    )


def test_every_token_is_the_one_that_the_parameters_define(decoder):
    rng = np.random.default_rng(1)
    compared = ties = 0
    positions = list(range(ROWS))
    for _ in range(40):
        params = [random_params(rng) for _ in range(ROWS)]
        for row in range(ROWS):
            decoder.join(row, int(rng.integers(8192)), positions[row], params[row])
        found = decoder.run()[0]
        logits = decoder.scratch("logits").double().numpy()
        for row in range(ROWS):
            expected = sample(logits[row], params[row], positions[row])
            compared += 1
            if found[row] != expected:
                ties += 1
                assert is_near_tie(logits[row], params[row], positions[row], found[row], expected), params[row]
            positions[row] += 1
    assert compared == 40 * ROWS
    assert ties <= 0.02 * compared, f"{ties} of {compared} draws differ from double precision"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.3),
        SamplingParams(temperature=0.5, top_k=12),
        SamplingParams(temperature=0.4, top_p=0.8),
        SamplingParams(temperature=0.5, top_k=30, top_p=0.7, min_p=0.01),
    ],
    ids=str,
)
def test_draws_follow_their_distribution(decoder, params):
    """Chi-square over 2400 seeds, of the tokens that the filters keep."""
    launches, counts = 300, {}
    for launch in range(launches):
        for row in range(ROWS):
            seed = launch * ROWS + row
            decoder.join(row, 77, 0, params.model_copy(update={"seed": seed}))
        for token in decoder.run()[0]:
            counts[token] = counts.get(token, 0) + 1
    logits = decoder.scratch("logits").double().numpy()
    assert (logits == logits[0]).all(), "rows that are alike have the same logits"
    kept = kept_tokens(logits[0], params)
    assert set(counts) <= set(kept.tolist())
    mass = np.exp((logits[0][kept] - logits[0].max()) / params.temperature)
    expected = mass / mass.sum() * launches * ROWS
    found = np.array([counts.get(int(token), 0) for token in kept], dtype=float)
    # rare tokens together: a cell needs some expected draws
    rare = expected < 8
    expected = np.append(expected[~rare], expected[rare].sum())
    found = np.append(found[~rare], found[rare].sum())
    large = expected > 1e-9
    chi = ((found - expected)[large] ** 2 / expected[large]).sum()
    freedom = max(int(large.sum()) - 1, 1)
    assert chi < freedom + 5 * np.sqrt(2 * freedom) + 8, (chi, freedom)
