"""The layer-by-layer comparison: the interpreted table passes it, and a wrong layer does not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.decoding import prompts
from support.layerwise import (
    Chained,
    Layers,
    compare_layers,
    first_layers,
    judge,
    judge_logits,
    peaks,
    stream_names,
    unpacked,
)
from support.tiny_models import WINDOW, built, cohere2_moe, qwen3_moe, spec_of

from megakernel.counters import NONE
from megakernel.table import read_waits
from runtime.reference import Interpreter, Memory
from runtime.weights import pack_weights

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]
LENGTHS = [WINDOW + 5, 1, 17]

TINY = 2.0
"""Allowed error by the noise floor: of 64 columns neither is known as well as of thousands."""


class Interpreted:
    """The interpreter as a machine that runs the first layers of a step."""

    def __init__(self, step, weights) -> None:
        """Nothing runs yet."""
        self.step, self.weights = step, weights
        self.memory = Memory(step, torch.bfloat16)

    def step_once(self) -> None:
        Interpreter(self.step.table, self.memory, self.weights).step()

    def run_first(self, layers: int) -> torch.Tensor:
        Interpreter(first_layers(self.step, layers), self.memory, self.weights).step()
        parts = [self.memory.scratch(name) for name in stream_names(self.step, layers)]
        return parts[0].clone() if len(parts) == 1 else parts[0] + parts[1]

    def router(self) -> torch.Tensor:
        return self.memory.scratch("router").clone()

    def kv(self, layer: int, row: int, begin: int, end: int) -> torch.Tensor:
        heads = range(self.step.model.num_kv_heads)
        return torch.stack([self.memory.read_kv(layer, row, head, begin, end) for head in heads], dim=1)


def opened(family, splits: int = 1):
    model = family(dtype=torch.bfloat16)
    step = built(spec_of(model), len(LENGTHS))
    rounding = step.choices.rounding.model_copy(update={"project_k_splits": splits})
    weights = pack_weights(step.model, dict(model.state_dict()), rounding, torch.bfloat16)
    return model, step, weights


def at_the_last_token(machine) -> dict[int, int]:
    """Feed all but the last token of every row; the rows' positions."""
    texts = prompts(LENGTHS)
    for tick in range(max(LENGTHS)):
        for row, text in enumerate(texts):
            if tick < len(text):
                machine.memory.join(row, text[tick], tick)
            else:
                machine.memory.leave(row)
        if tick < max(LENGTHS) - 1:
            machine.step_once()
    for row, text in enumerate(texts):
        machine.memory.join(row, text[-1], len(text) - 1)
    return {row: len(text) - 1 for row, text in enumerate(texts)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("splits", [1, 2])
def test_unpacked_layers_are_those_that_were_packed(family, splits):
    model, step, weights = opened(family, splits)
    for idx in range(step.model.num_layers):
        expected = model.model.layers[idx].state_dict()
        found = unpacked(weights.layers[idx], splits)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_the_first_layers_waits_for_what_is_left_out(family):
    """Counters stand at zero before the one step, and no wait may ask for more than comes."""
    _, step, _ = opened(family)
    for layers in range(step.model.num_layers + 1):
        table = first_layers(step, layers)
        for record in table.records:
            for wait in (*read_waits(record, "load"), *read_waits(record, "run")):
                assert wait.lag == 0
                assert wait.need <= table.totals[wait.counter]
        assert {*table.records["layer"].tolist()} == {NONE, *range(layers)}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_truth_is_transformers_own(family):
    """Layers chained over their own K and V, from a prompt's first token on, have the whole model's logits."""
    model, step, weights = opened(family)
    whole = family(dtype=torch.float32)
    whole.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    chained = Chained(Layers(model.config.to_dict(), weights, torch.float32, 1), Interpreted(step, weights), {0: 0})
    text = prompts([WINDOW + 5])[0]
    found = [chained.logits({0: token}) for token in text][-1]
    with torch.no_grad():
        expected = whole(torch.tensor([text])).logits[0, -1]
    assert torch.allclose(found[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_interpreted_table_passes_and_a_wrong_layer_does_not(family):
    model, step, weights = opened(family)
    machine = Interpreted(step, weights)
    positions = at_the_last_token(machine)
    truth, rough = (Layers(model.config.to_dict(), weights, dtype, 1) for dtype in (torch.float32, torch.bfloat16))
    found, _ = compare_layers(machine, truth, rough, positions)
    judge(found, TINY)
    assert len(found) == len(positions) * step.model.num_layers

    chains = [Chained(layers, machine, positions) for layers in (rough, truth)]
    parts: list[list[torch.Tensor]] = [[], [], []]
    for _ in range(4):
        tokens = {row: machine.memory.tokens[row] for row in positions}
        machine.step_once()
        parts[0].append(machine.memory.scratch("logits").clone())
        for part, chain in zip(parts[1:], chains, strict=True):
            part.append(chain.logits(tokens))
    logits = [torch.cat(part) for part in parts]
    judge_logits(*logits, allowed=TINY, least=6)
    with pytest.raises(AssertionError, match="12 of the others differ"):
        judge_logits(logits[2].flip(-1), logits[2] + 1e-3, logits[2], allowed=1e9)
    with pytest.raises(AssertionError, match="12 beyond"):
        judge_logits(logits[0] * 2, *logits[1:], allowed=TINY)

    broken = list(weights.layers)
    broken[1] = replace(broken[1], output=broken[1].output * 1.1)
    machine = Interpreted(step, replace(weights, layers=tuple(broken)))
    with pytest.raises(AssertionError, match="layer=1"):
        judge(compare_layers(machine, truth, rough, at_the_last_token(machine))[0], TINY)


def test_peaks_are_chosen_and_leave_the_weights_as_they_were():
    model, _, weights = opened(cohere2_moe)
    layers, before = Layers(model.config.to_dict(), weights, torch.float32, 1), weights.head.clone()
    stream = torch.randn(40, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    plain, tokens = layers.logits(stream), [3, 16, 17, 190, *range(32, 44)]
    with peaks(weights, tokens):
        peaked = layers.logits(stream)
        assert torch.allclose(peaked[:, tokens], 64 * plain[:, tokens])
        assert {*peaked.argmax(-1).tolist()} <= {*tokens}
    assert torch.equal(weights.head, before)
    assert torch.equal(layers.logits(stream), plain)
    with pytest.raises(AssertionError, match="too few were compared"):
        judge_logits(plain, plain + 100.0, plain, least=1)
