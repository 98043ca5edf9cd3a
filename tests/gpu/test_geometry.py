"""On a card: the real models' geometry, layer by layer and whole steps, against transformers' own modules there."""

from __future__ import annotations

import gc
import json
import random
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from support.card import DEADLINE_MS, best_step, chip
from support.layerwise import Chained, Layers, compare_layers, first_layers, judge, judge_logits, peaks, stream_names

from megakernel.assets import asset
from megakernel.families import read_model
from runtime.kv_pages import read

pytestmark = pytest.mark.gpu

# model, tokens of a bucket of one row, tokens a row of one of eight; positions in both
GEOMETRIES = {
    "CohereLabs--North-Mini-Code-1.0": (
        2**17,
        2**14,
        (2**16 - 1, 2**17 - 9),
        (0, 4094, 4095, 4096, 8190, 63, 127, 16370),
    ),
    "Qwen--Qwen3-30B-A3B": (40960, 5120, (8191, 40950), (0, 4094, 4095, 4096, 5100, 63, 127, 17)),
}
STEPS = 2
TURNS = 3
PEAKS = 8


class OnCard:
    """A decoder as a machine that runs the first layers of a step."""

    def __init__(self, decoder) -> None:
        """Whoever sits in the decoder's rows stays there."""
        self.decoder, self.step = decoder, decoder.step
        self._pages = cache(decoder._row_pages)

    def run_first(self, layers: int) -> torch.Tensor:
        from runtime.gpu.launch import LoadedTable

        decoder = self.decoder
        compiled, titles = decoder.table.compiled, decoder.table.titles
        table = LoadedTable(compiled, first_layers(self.step, layers), titles, proved_digest=None)
        table.arm(decoder._addresses, deadline_ms=DEADLINE_MS)
        table.run()
        parts = [decoder.buffers.scratch(name, torch.bfloat16) for name in stream_names(self.step, layers)]
        return parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]

    def router(self) -> torch.Tensor:
        return self.decoder.buffers.scratch("router", torch.float32).clone()

    def kv(self, layer: int, row: int, begin: int, end: int) -> torch.Tensor:
        return read(self.decoder.pool(layer), self._pages(layer, row), begin, end)


@pytest.fixture(scope="module", params=GEOMETRIES)
def card(request):
    """Decoders of one row and of eight over the same random weights and KV, and transformers' modules of them."""
    from runtime.gpu.compile import compile_kernel
    from runtime.gpu.decoder import Decoder
    from runtime.gpu.specialize import KernelOptions, specialize

    path = asset(f"configs/models/{request.param}.json")
    model, sizes = read_model(path), GEOMETRIES[request.param]
    steps = [best_step(model, rows, tokens) for rows, tokens in zip((1, 8), sizes[:2], strict=True)]
    with ThreadPoolExecutor() as pool:  # the compiler is most of the time
        list(
            pool.map(lambda step: compile_kernel(specialize(step, chip(), KernelOptions()), chip().architecture), steps)
        )
    alone = Decoder(steps[0], chip())
    eight = Decoder(steps[1], chip(), model=alone)
    torch.manual_seed(0)
    for name, value in alone.buffers.constants.items():
        if "norm" in name:
            value.normal_(1.0, 0.1)
    for layer in range(model.num_layers):
        alone.pool(layer).normal_()
    config = json.loads(path.read_text())
    splits = steps[0].choices.rounding.project_k_splits
    truth, rough = (Layers(config, alone.weights(), dtype, splits) for dtype in (torch.float32, torch.bfloat16))
    for decoder in (alone, eight):
        decoder.deadline_ms = DEADLINE_MS
    found = SimpleNamespace(alone=alone, eight=eight, truth=truth, rough=rough, positions=sizes[2:])
    yield found
    vars(found).clear()
    del alone, eight, truth, rough, decoder, value
    gc.collect()
    torch.cuda.empty_cache()


def seat(decoder, positions, seed: int = 0) -> dict[int, int]:
    """Random tokens at these positions; their rows."""
    rng = random.Random(len(positions) + seed)
    for row, position in enumerate(positions):
        decoder.join(row, rng.randrange(decoder.step.model.vocab_size), position)
    return dict(enumerate(positions))


def test_every_layer_of_eight_rows_is_as_near_the_truth_as_transformers_in_bfloat16(card):
    machine = OnCard(card.eight)
    found, _ = compare_layers(machine, card.truth, card.rough, seat(card.eight, card.positions[1]))
    print("\n" + judge(found))  # noqa: T201 - the figures belong into the log


def test_the_logits_of_whole_steps_are_as_near_the_truth_as_transformers_in_bfloat16(card):
    """Teacher-forced. Random weights' best logits are near-ties, which are counted; see the test with peaks."""
    decoder = card.eight
    rows = seat(decoder, card.positions[1])
    tokens = dict(enumerate(decoder._tokens.tolist()))
    chains = [Chained(layers, OnCard(decoder), rows) for layers in (card.rough, card.truth)]
    parts: list[list[torch.Tensor]] = [[], [], []]
    for _ in range(STEPS):
        made = decoder.run()[0]
        parts[0].append(decoder.scratch("logits").cuda())
        for part, chain in zip(parts[1:], chains, strict=True):
            part.append(chain.logits(tokens))
        tokens = dict(enumerate(made))
    print("\n" + judge_logits(*(torch.cat(part) for part in parts)))  # noqa: T201


def test_whole_steps_choose_the_tokens_of_transformers_where_logits_have_peaks(card):
    """Among the peaks; that the token is the best of all logits is seen beside it."""
    decoder = card.eight
    chosen = random.Random(5).sample(range(decoder.step.model.vocab_size), PEAKS)
    parts: list[list[torch.Tensor]] = [[], [], []]
    with peaks(card.truth.weights, chosen):
        for turn in range(TURNS):
            rows = seat(decoder, card.positions[1], seed=turn)
            tokens = dict(enumerate(decoder._tokens.tolist()))
            made = decoder.run()[0]
            parts[0].append(decoder.scratch("logits").cuda())
            assert made == parts[0][-1].argmax(-1).tolist()
            for part, layers in zip(parts[1:], (card.rough, card.truth), strict=True):
                part.append(Chained(layers, OnCard(decoder), rows).logits(tokens))
    logits = [torch.cat(part) for part in parts]
    print("\n" + judge_logits(*(part[:, chosen] for part in logits), least=1))  # noqa: T201


def test_every_layer_of_long_contexts_is_as_near_the_truth_as_transformers_in_bfloat16(card):
    machine = OnCard(card.alone)
    for position in card.positions[0]:
        found, _ = compare_layers(machine, card.truth, card.rough, seat(card.alone, [position]))
        print(f"\n{position}: {judge(found)}")  # noqa: T201
