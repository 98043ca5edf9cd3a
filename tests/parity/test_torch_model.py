"""The torch prefill has transformers' logits, over any cut into chunks and pages, and the interpreted table goes on."""

from __future__ import annotations

import pytest
import torch
from support.card import random_tensors
from support.decoding import reference_greedy, reference_logits
from support.tiny_models import WINDOW, built, choices_for, cohere2_moe, qwen3_moe, spec_of
from transformers import DynamicCache

from megakernel.model import RoutedMlp
from runtime.kv_pages import allocate, layer_groups, write_cache
from runtime.reference import Interpreter, Memory
from runtime.reference.ops import route
from runtime.torch_model import Batch, Stretch, TorchModel
from runtime.weights import pack_weights

TEXT = [(7 * idx + 3) % 189 + 3 for idx in range(2 * WINDOW + 9)]


@pytest.fixture(scope="module", params=[cohere2_moe, qwen3_moe], ids=["cohere2_moe", "qwen3_moe"])
def model(request):
    return request.param()


def opened(model, page_tokens: int = 8, splits: int = 1) -> tuple[TorchModel, tuple[torch.Tensor, ...]]:
    spec = spec_of(model)
    rounding = choices_for(spec).rounding.model_copy(update={"project_k_splits": splits})
    weights = pack_weights(spec, dict(model.state_dict()), rounding, torch.float64)
    pages = 20
    generator = torch.Generator().manual_seed(1)
    tables = tuple(torch.randperm(pages, generator=generator) for _ in layer_groups(spec)[0])
    pools = [allocate(spec, pages, page_tokens, torch.float64).fill_(float("nan")) for _ in spec.layers]
    return TorchModel(spec, weights, pools), tables


@torch.no_grad()
def prefill(machine: TorchModel, tables, cuts: list[int]) -> torch.Tensor:
    """Logits [tokens, vocab] of TEXT, chunk by chunk."""
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(TEXT)], strict=True):
        batch = Batch(machine.embed(torch.tensor(TEXT[begin:end])), [Stretch(begin, end, tables)])
        for layer in range(machine.model.num_layers):
            machine.layer(layer, batch)
        found.append(machine.logits(batch.stream))
    return torch.cat(found)


@pytest.mark.parametrize("cuts", [[], [1], [5, WINDOW, WINDOW + 1, 40], [len(TEXT) - 1]], ids=str)
@pytest.mark.parametrize("splits", [1, 2])
def test_prefill_has_the_logits_of_transformers(model, cuts, splits):
    machine, tables = opened(model, splits=splits)
    logits = prefill(machine, tables, cuts)
    with torch.no_grad():
        expected = model(torch.tensor([TEXT])).logits[0]
    # transformers' own angles are float32
    assert torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)
    assert machine.scratch_bytes < sum(p.numel() * 8 for p in model.parameters()) / 4


def test_rows_of_one_chunk_do_not_meet(model):
    machine, tables = opened(model)
    alone = prefill(machine, tables, [])
    with torch.no_grad():
        halves = tuple(table[:8] for table in tables), tuple(table[8:] for table in tables)
        batch = Batch(machine.embed(torch.tensor(TEXT * 2)), [Stretch(0, len(TEXT), pages) for pages in halves])
        for layer in range(machine.model.num_layers):
            machine.layer(layer, batch)
        for stream in batch.streams():
            assert torch.allclose(machine.logits(stream), alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("source", ["prefill", "cache"])
def test_decoding_goes_on_from_its_pages(model, source):
    """The KV that the prefill, or transformers' cache, leaves in pages is what the table would have left there."""
    spec = spec_of(model)
    step = built(spec, 1)
    weights = pack_weights(spec, dict(model.state_dict()), step.choices.rounding, torch.float64)
    memory = Memory(step, torch.float64)
    tables = tuple(table[0] for table in memory.pages)
    if source == "prefill":
        machine = TorchModel(spec, weights, memory.kv)
        batch = Batch(machine.embed(torch.tensor(TEXT)), [Stretch(0, len(TEXT), tables)])
        with torch.no_grad():
            for layer in range(spec.num_layers):
                machine.layer(layer, batch)
            first = int(machine.logits(batch.stream[-1:]).argmax())
    else:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            first = int(model(torch.tensor([TEXT]), cache=cache).logits[0, -1].argmax())
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        write_cache(layers, 0, memory.kv, [tables[group] for group in memory.groups], len(TEXT))
    assert first == int(reference_logits(model, TEXT).argmax())
    memory.join(0, first, len(TEXT))
    interpreter = Interpreter(step.table, memory, weights)
    found = [first]
    for _ in range(5):
        interpreter.step()
        found.append(memory.tokens[0])
    assert found == reference_greedy(model, TEXT, 6)


@pytest.mark.parametrize("routing", ["collapsed", "spread"])
def test_table_and_prefill_agree_where_rows_share_eight_experts_and_where_they_touch_all(model, routing):
    """Equal logits pick the lower ids in both; what is seen is what the experts' sums make of the routing."""
    spec = spec_of(model)
    changes = {"num_experts": 32, "top_k": 8}
    layers = [
        layer.model_copy(update={"mlp": layer.mlp.model_copy(update=changes)})
        if isinstance(layer.mlp, RoutedMlp)
        else layer
        for layer in spec.layers[:2]
    ]
    spec = spec.model_copy(update={"layers": tuple(layers)})
    step = built(spec, 8)
    scale = 0.0 if routing == "collapsed" else 8.0
    tensors = {
        name: (tensor * scale if ".gate.weight" in name else tensor).double()
        for name, tensor in random_tensors(spec).items()
    }
    weights = pack_weights(spec, tensors, step.choices.rounding, torch.float64)
    memory = Memory(step, torch.float64)
    interpreter = Interpreter(step.table, memory, weights)
    texts = [[3 + 7 * row, 90 - row] for row in range(8)]
    for position in range(2):
        for row, text in enumerate(texts):
            memory.join(row, text[position], position)
        interpreter.step()
    machine, tables = opened(model)
    machine = TorchModel(spec, weights, machine.pools[:2])
    touched: set[int] = set()
    for row, text in enumerate(texts):
        batch = Batch(machine.embed(torch.tensor(text)), [Stretch(0, len(text), tables)])
        with torch.no_grad():
            for layer in range(2):
                machine.layer(layer, batch)
            logits = machine.logits(batch.stream)[-1]
        assert torch.allclose(logits, memory.scratch("logits")[row], rtol=1e-9, atol=1e-9)
        touched |= set(route(memory.scratch("router")[row], _routed(spec)[0])[0])
    assert len(touched) == 8 if routing == "collapsed" else len(touched) >= 28


def _routed(spec):
    return [layer.mlp for layer in spec.layers if isinstance(layer.mlp, RoutedMlp)]
