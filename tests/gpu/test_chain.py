"""On a card: many steps without the host, rows joining, leaving and growing, counters across their wrap."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import torch
from support.card import drawn, north_step, on_card
from support.tiny_models import cohere2_moe, qwen3_moe

from runtime.rows import Join
from runtime.sampling import GREEDY, NO_TOKEN, SamplingParams

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]
ROWS = 8


def chained(decoder):
    from runtime.gpu.chain import Chain

    return Chain(decoder)


def alone(decoder, token: int, count: int, sampling: SamplingParams = GREEDY) -> list[int]:
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
    chain.join(0, Join(7, 0, end_position=40))
    made = list(chain.tokens())
    assert [each.token for each in made] == expected
    assert [each.ended for each in made] == [False] * 39 + [True]
    assert not chain.has_rows


def test_stops_drops_halts_and_growth_come_within_a_step():
    decoder = on_card(qwen3_moe(dtype=torch.bfloat16), 2)
    expected = alone(decoder, 7, 60)
    chain = chained(decoder)
    stop = expected[10]
    chain.join(1, Join(7, 0, stops=(9999, stop)))
    assert [each.token for each in chain.tokens()] == expected[: expected.index(stop) + 1]

    chain.join(0, Join(7, 0))
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
    chain.join(0, Join(7, 0, pages=[ids[:1] for ids in own], end_position=page_tokens))
    chain.extend(0, 1, [ids[1:3] for ids in own], end_position=3 * page_tokens)
    assert [each.token for each in chain.tokens()] == expected[: 3 * page_tokens]


def test_a_nan_ends_its_row_alone():
    decoder = on_card(qwen3_moe(dtype=torch.bfloat16), 2)
    expected = alone(decoder, 7, 6)
    for layer in range(decoder.step.model.num_layers):
        kv = decoder.read_kv(layer, 1, 0, 4)
        decoder.write_kv(layer, 1, torch.full_like(kv, float("nan")))
    chain = chained(decoder)
    chain.join(0, Join(7, 0, end_position=6))
    chain.join(1, Join(8, 3))
    made = list(chain.tokens())
    assert [(each.token, each.ended) for each in made if each.row == 1] == [(NO_TOKEN, True)]
    assert [each.token for each in made if each.row == 0] == expected


SOAKED = (
    (7, GREEDY),
    (99, GREEDY),
    (40, SamplingParams(temperature=0.8, seed=5)),
    (141, SamplingParams(temperature=1.0, top_p=0.9, top_k=30, seed=6)),
)


class Soak:
    """Rows that join and leave at random; every row's tokens must be those that it has alone."""

    def __init__(self, decoder, longest: int) -> None:
        """Every row is seated."""
        self.decoder, self.longest, self.rng = decoder, longest, random.Random(1)
        self.expected = [alone(decoder, token, longest, sampling) for token, sampling in SOAKED]
        self.chain = chained(decoder)
        self.asked: dict[int, tuple[int, int]] = {}
        self.found: dict[int, list[int]] = {}
        self.checked = 0
        for row in range(decoder.step.bucket.rows):
            self.join(row)

    def join(self, row: int) -> None:
        kind, count = self.rng.randrange(len(SOAKED)), self.rng.randrange(1, self.longest)
        token, sampling = SOAKED[kind]
        ticket = self.chain.join(row, Join(token, 0, sampling, end_position=count))
        self.asked[ticket], self.found[ticket] = (kind, count), []

    def take(self, made) -> None:
        tokens = self.found[made.ticket]
        tokens.append(made.token)
        if made.ended:
            kind, count = self.asked[made.ticket]
            assert tokens == self.expected[kind][:count], (made, kind)
            self.checked += 1
        if self.rng.random() < (0.8 if made.ended else 0.002):
            self.join(made.row)  # whoever sits there leaves

    def run(self, steps: int, seconds: float) -> int:
        """Steps made, at least `steps` unless the time is over."""
        first, until, made_steps = self.decoder.next_step, time.monotonic() + seconds, 0
        while made_steps < steps and time.monotonic() < until:
            for made in self.chain.tokens():
                self.take(made)
                if (made.step - first) % 2**32 > steps:
                    self.chain.halt()
            made_steps = (self.decoder.next_step - first) % 2**32
            for row in self.rng.sample(range(self.decoder.step.bucket.rows), 3):
                self.join(row)
        return made_steps


def test_a_tiny_model_for_100_000_steps_across_the_wrap():
    decoder = on_card(cohere2_moe(2, dtype=torch.bfloat16), ROWS, first_step=2**32 - 50_000, arrival="read_back")
    soak = Soak(decoder, longest=100)
    assert soak.run(100_000, seconds=60) >= 100_000
    assert soak.checked > 1000
    assert decoder.next_step < 2**31, "the number of the step has wrapped"


def test_north_geometry_for_a_while_across_the_wrap():
    decoder = drawn(north_step(ROWS), arrival="read_back")
    decoder.next_step = 2**32 - 300
    soak = Soak(decoder, longest=100)
    assert soak.run(2_000, seconds=40) >= 1_000
    assert soak.checked > 20
    assert np.isfinite(decoder.scratch("logits").numpy()).all()
