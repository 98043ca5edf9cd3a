"""On a card: the same tokens run to run, whatever the neighbours, at any length, routing and order of events."""

from __future__ import annotations

import random

import pytest
import torch
from support.card import on_card
from support.tiny_models import cohere2_moe, qwen3_moe

from runtime.sampling import SamplingParams

pytestmark = pytest.mark.gpu

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.9, top_p=0.9, seed=11),
    SamplingParams(temperature=1.2, seed=3),
]
STEPS = 24


def random_kv(decoder, row: int, tokens: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = decoder.step.model
    for layer in range(model.num_layers):
        decoder.write_kv(layer, row, torch.randn(2, model.num_kv_heads, tokens, model.head_dim, generator=generator))


def fill(decoder, seats: list[int], lengths: list[int]) -> None:
    """Seat row i of the case at seats[i], at a context of lengths[i], with KV, token and parameters of its own."""
    for row, (seat, length) in enumerate(zip(seats, lengths, strict=True)):
        if length:
            random_kv(decoder, seat, length, seed=row)
        decoder.join(seat, 20 + row, length, SAMPLINGS[row % len(SAMPLINGS)])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("arrival", ["release", "read_back"])
def test_a_row_is_the_same_whatever_its_neighbours_and_its_seat(family, arrival):
    """Alone, and with one to seven neighbours; every step's logits and every token to the bit, and run to run."""
    model = family(dtype=torch.bfloat16)
    lengths = [17, 33, 5, 60, 16, 1, 0, 47]
    expected: dict[int, list[tuple[int, bytes]]] = {}
    for rows in (1, 2, 3, 5, 8, 8):
        decoder = on_card(model, rows, arrival=arrival)
        seats = random.Random(rows).sample(range(rows), rows)
        fill(decoder, seats, lengths[:rows])
        found: dict[int, list[tuple[int, bytes]]] = {row: [] for row in range(rows)}
        for _ in range(STEPS):
            tokens = decoder.run()[0]
            logits = decoder.scratch("logits")
            for row, seat in enumerate(seats):
                found[row].append((tokens[seat], logits[seat].numpy().tobytes()))
        for row, history in found.items():
            assert expected.setdefault(row, history) == history, (rows, row)


@pytest.mark.parametrize("family", FAMILIES)
def test_inactive_rows_change_nothing_and_are_not_changed(family):
    model = family(dtype=torch.bfloat16)
    full = on_card(model, 8)
    fill(full, list(range(8)), [17, 33, 5, 60, 16, 1, 0, 47])
    for row in (0, 3, 4, 7):
        full.leave(row)
    before = full.read_kv(0, 3, 0, 64)
    tokens = [step for _ in range(STEPS) for step in full.run()]
    assert torch.equal(full.read_kv(0, 3, 0, 64), before)
    assert all(step[row] is None for step in tokens for row in (0, 3, 4, 7))
    few = on_card(model, 8)
    fill(few, list(range(8)), [17, 33, 5, 60, 16, 1, 0, 47])
    assert [[step[row] for row in (1, 2, 5, 6)] for _ in range(STEPS) for step in few.run()] == [
        [step[row] for row in (1, 2, 5, 6)] for step in tokens
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_delays_anywhere_change_no_token(family):
    from runtime.gpu.launch import Fuzz

    model = family(dtype=torch.bfloat16)
    for arrival in ("release", "read_back"):
        decoder = on_card(model, 4, arrival=arrival, fuzz=True)
        fill(decoder, [0, 1, 2, 3], [17, 33, 5, 60])
        begin = decoder.rows.copy()
        expected = decoder.run(STEPS)
        for seed in range(12):
            fill(decoder, [0, 1, 2, 3], [17, 33, 5, 60])
            assert (decoder.rows == begin).all()
            decoder.table.fuzz = Fuzz(seed, most_us=(2.0, 10.0, 50.0)[seed % 3])
            assert decoder.run(STEPS) == expected, (arrival, seed)
