"""On a card: many steps without the host, rows joining, leaving and growing, counters across their wrap."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from support.card import drawn, north_step, on_card
from support.soak import Soak, alone, chained
from support.tiny_models import cohere2_moe, qwen3_moe

from megakernel.kinds import TaskKind
from runtime.rows import Join
from runtime.sampling import NO_TOKEN

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]
ROWS = 8


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


def test_a_launch_may_last_longer_than_any_wait_may():
    decoder = on_card(cohere2_moe(dtype=torch.bfloat16), 1)
    expected = alone(decoder, 7, 100)
    table = decoder.step.table
    kinds = [set(table.records["kind"][begin:end]) for begin, end in pairwise(table.offsets)]
    assert {int(TaskKind.MERGE)} in kinds, "some block copies nothing from launch to end"
    decoder.deadline_ms = 1.0
    begin = time.monotonic()
    assert alone(decoder, 7, 100) == expected
    assert time.monotonic() - begin > 2e-3 * decoder.deadline_ms


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


def test_a_tiny_model_for_100_000_steps_across_the_wrap():
    decoder = on_card(cohere2_moe(2, dtype=torch.bfloat16), ROWS, first_step=2**32 - 50_000, arrival="read_back")
    soak = Soak(decoder, longest=100)
    assert soak.run(100_000, seconds=60) >= 100_000
    assert soak.checked > 1000
    assert decoder.next_step < 2**31, "the number of the step has wrapped"


def test_north_geometry_for_a_while_across_the_wrap():
    decoder = drawn(north_step(ROWS), arrival="read_back")
    decoder.next_step = 2**32 - 1_000  # the rows alone take some of them
    soak = Soak(decoder, longest=100)
    assert decoder.next_step > 2**31
    assert soak.run(2_000, seconds=40) >= 1_000
    assert soak.checked > 20
    assert np.isfinite(decoder.scratch("logits").numpy()).all()
