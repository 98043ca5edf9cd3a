"""On a card: many steps without the host, rows joining, leaving and growing, counters across their wrap."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from support.card import drawn, north_step, on_card
from support.tiny_models import cohere2_moe, qwen3_moe

from runtime.sampling import NO_TOKEN, SamplingParams

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]
ROWS = 8


def chained(decoder):
    from runtime.gpu.chain import Chain

    return Chain(decoder)


def alone(decoder, token: int, count: int, sampling: SamplingParams = SamplingParams()) -> list[int]:
    """Tokens of a row that runs by itself, launch by launch, in the last seat."""
    row = decoder.step.bucket.rows - 1
    for other in range(row):
        decoder.leave(other)
    decoder.join(row, token, 0, sampling)
    found = [tokens[row] for tokens in decoder.run(count)]
    decoder.leave(row)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chain_has_the_tokens_of_single_steps(family):
    decoder = on_card(family(dtype=torch.bfloat16), 2)
    expected = alone(decoder, 7, 40)
    chain = chained(decoder)
    chain.join(0, 7, 0, end_position=40)
    made = list(chain.tokens())
    assert [each.token for each in made] == expected
    assert [each.ended for each in made] == [False] * 39 + [True]
    assert not chain.has_rows


def test_stops_drops_halts_and_growth_come_within_a_step():
    decoder = on_card(qwen3_moe(dtype=torch.bfloat16), 2)
    expected = alone(decoder, 7, 60)
    chain = chained(decoder)
    stop = expected[10]
    chain.join(1, 7, 0, stops=(9999, stop))
    assert [each.token for each in chain.tokens()] == expected[: expected.index(stop) + 1]

    chain.join(0, 7, 0)
    found, halted_at = [], None
    for made in chain.tokens():
        found.append(made.token)
        if len(found) == 5 and halted_at is None:
            chain.halt()
            halted_at = made.step
    # the host reads behind the card: what counts is that steps are whole and nothing is lost
    assert found == expected[: len(found)]
    assert len(found) < 60
    chain.drop(0)
    assert not chain.has_rows

    page_tokens = decoder.step.choices.rounding.page_tokens
    own = decoder.pages[:, 0].copy()
    chain.join(0, 7, 0, pages=[ids[:1] for ids in own], end_position=page_tokens)
    chain.extend(0, 1, [ids[1:3] for ids in own], end_position=3 * page_tokens)
    assert [each.token for each in chain.tokens()] == expected[: 3 * page_tokens]


def test_a_nan_ends_its_row_alone():
    decoder = on_card(qwen3_moe(dtype=torch.bfloat16), 2)
    expected = alone(decoder, 7, 6)
    for layer in range(decoder.step.model.num_layers):
        kv = decoder.read_kv(layer, 1, 0, 4)
        decoder.write_kv(layer, 1, torch.full_like(kv, float("nan")))
    chain = chained(decoder)
    chain.join(0, 7, 0, end_position=6)
    chain.join(1, 8, 3)
    made = list(chain.tokens())
    assert [(each.token, each.ended) for each in made if each.row == 1] == [(NO_TOKEN, True)]
    assert [each.token for each in made if each.row == 0] == expected


def soak(decoder, steps: int, longest: int, seconds: float) -> tuple[int, int]:
    """Rows join and leave at random until `steps` steps are made; every row's tokens are those that it has alone."""
    rng = random.Random(1)
    requests = [(rng.randrange(3, 190), sampling) for sampling in
                (SamplingParams(), SamplingParams(), SamplingParams(temperature=0.8, seed=5),
                 SamplingParams(temperature=1.0, top_p=0.9, top_k=30, seed=6))]  # fmt: skip
    expected = [alone(decoder, token, longest, sampling) for token, sampling in requests]
    first, until = decoder.next_step, time.monotonic() + seconds
    chain, which, found = chained(decoder), {}, {}
    joins = checked = 0

    def join(row):
        nonlocal joins
        kind, count = rng.randrange(len(requests)), rng.randrange(1, longest)
        token, sampling = requests[kind]
        ticket = chain.join(row, token, 0, sampling, end_position=count)
        which[ticket], found[ticket] = (kind, count), []
        joins += 1

    for row in range(decoder.step.bucket.rows):
        join(row)
    made_steps = 0
    while made_steps < steps and time.monotonic() < until:
        begin = decoder.next_step
        for made in chain.tokens():
            tokens = found[made.ticket]
            tokens.append(made.token)
            if made.ended:
                kind, count = which[made.ticket]
                assert tokens == expected[kind][:count], (made, kind)
                checked += 1
                if rng.random() < 0.8:
                    join(made.row)
            elif rng.random() < 0.002:
                join(made.row)  # whoever sits there leaves
            if (made.step - first) % 2**32 > steps:
                chain.halt()
        made_steps += (decoder.next_step - begin) % 2**32
        if not chain.has_rows or rng.random() < 0.5:
            for row in rng.sample(range(decoder.step.bucket.rows), 3):
                join(row)
    return made_steps, checked


def test_a_tiny_model_for_100_000_steps_across_the_wrap():
    decoder = on_card(cohere2_moe(2, dtype=torch.bfloat16), ROWS, first_step=2**32 - 50_000, arrival="read_back")
    begin = time.monotonic()
    made, checked = soak(decoder, 100_000, 100, seconds=60)
    print(f"soak: {made} steps, {checked} rows checked, {time.monotonic() - begin:.1f} s")
    assert made >= 100_000
    assert checked > 1000
    assert decoder.next_step < 2**31, "the number of the step has wrapped"


def test_north_geometry_for_a_while_across_the_wrap():
    decoder = drawn(north_step(ROWS), arrival="read_back")
    decoder.next_step = 2**32 - 300
    begin = time.monotonic()
    made, checked = soak(decoder, 2_000, 100, seconds=40)
    print(f"soak: {made} steps, {checked} rows checked, {time.monotonic() - begin:.1f} s")
    assert made >= 1_000
    assert checked > 20
    assert np.isfinite(decoder.scratch("logits").numpy()).all()
