"""On a card: layers of real geometry prefill as the plain model has them, and however a prompt is cut."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from support import north
from support.tiny_models import cohere2_moe, qwen3_moe, rounding_for, spec_of

from megakernel.model import ModelSpec, RoutedMlp
from megakernel.tiling import TILE_COLUMNS, UNIT_ROWS
from runtime.kv_pages import allocate, layer_groups, read
from runtime.torch_model import Batch, Stretch, TorchModel
from runtime.weights import LayerWeights, Weights, pack_weights

pytestmark = pytest.mark.gpu

PAGE_TOKENS = 64
KINDS = (0, 1, 4)
"""Layers of North: dense and routed, with a window and without."""


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def units(rows: int, columns: int) -> torch.Tensor:
    """A drawn matrix whose products keep their size."""
    return drawn(rows // UNIT_ROWS, columns // TILE_COLUMNS, UNIT_ROWS, TILE_COLUMNS) * columns**-0.5


def weights_of(spec: ModelSpec) -> Weights:
    hidden = spec.hidden_size
    layers = []
    for layer in spec.layers:
        experts = layer.mlp.num_experts if isinstance(layer.mlp, RoutedMlp) else 0
        norms = [1 + 0.1 * drawn(hidden) for _ in range(2)]
        layers.append(
            LayerWeights(
                *norms, None, None,
                qkv=units(spec.q_size + 2 * spec.kv_size, hidden), output=units(hidden, spec.q_size),
                router=drawn(experts, hidden) * hidden**-0.5 if experts else None,
                up=units(max(experts, 1) * 2 * layer.mlp.width, hidden),
                down=units(max(experts, 1) * hidden, layer.mlp.width),
            )
        )  # fmt: skip
    embedding = units(512, hidden)
    return Weights(embedding, embedding, 1 + 0.1 * drawn(hidden), tuple(layers))


@pytest.fixture(scope="module")
def opened():
    """A few layers of North, and their weights."""
    torch.manual_seed(0)
    spec = north.model()
    spec = spec.model_copy(update={"layers": tuple(spec.layers[idx] for idx in KINDS), "vocab_size": 512})
    return spec, weights_of(spec)


def machine(
    kind: type[TorchModel], opened, rows: int, tokens: int
) -> tuple[TorchModel, list[tuple[torch.Tensor, ...]]]:
    """A model over pools of its own, and the pages of so many rows."""
    spec, weights = opened
    entries = -(-tokens // PAGE_TOKENS)
    pools = [allocate(spec, rows * entries, PAGE_TOKENS, torch.bfloat16, "cuda") for _ in spec.layers]
    order = torch.randperm(rows * entries, generator=torch.Generator().manual_seed(1)).cuda()
    return kind(spec, weights, pools), [(own,) * len(layer_groups(spec)[0]) for own in order.split(entries)]


@pytest.mark.parametrize("rows", [1, 5])
@torch.no_grad()
def test_every_kind_of_layer_is_the_plain_model_s(opened, rows):
    """Layer by layer from the same residuals, in chunks: 1,300 tokens of each row, whose window is not full yet."""
    from runtime.gpu.card_model import CardModel

    (plain, pages), (card, _) = (machine(kind, opened, rows, 1300) for kind in (TorchModel, CardModel))
    for begin, end in pairwise((0, 70, 1000, 1300)):
        stretches = [Stretch(begin, end, own) for own in pages]
        stream = drawn((end - begin) * rows, plain.model.hidden_size)
        for layer in range(len(KINDS)):
            found = []
            for each in (plain, card):
                batch = Batch(stream, stretches)
                each.layer(layer, batch)
                found.append(batch.stream)
            expected, got = found
            change = (expected - stream).float().norm()
            apart = ((got - expected).float().norm() / change).item()
            assert apart < 0.02, f"layer {KINDS[layer]}, tokens {begin} to {end}: {apart:.4f} of its change apart"
            for own in pages:
                wanted, kept = (read(each.pools[layer], own[0], begin, end).float() for each in (plain, card))
                assert (kept - wanted).norm() / wanted.norm() < 0.01
            stream = expected


@torch.no_grad()
def test_no_sum_depends_on_where_a_prompt_is_cut(opened):
    """Bit for bit, across the window's edge, beside another row and alone."""
    from runtime.gpu.card_model import CardModel

    tokens = 4600
    stream = drawn(tokens, opened[0].hidden_size)
    results = []
    for cuts, rows in (((0, tokens), 1), ((0, 1000, 1001, 4200, tokens), 1), ((0, 2048, tokens), 2)):
        card, pages = machine(CardModel, opened, rows, tokens)
        parts = []
        for begin, end in pairwise(cuts):
            batch = Batch(torch.cat([stream[begin:end]] * rows), [Stretch(begin, end, own) for own in pages])
            for layer in range(len(KINDS)):
                card.layer(layer, batch)
            parts.append(batch.streams()[-1])
        results.append((torch.cat(parts), [read(pool, pages[-1][0], 0, tokens) for pool in card.pools]))
    (whole, kv), *others = results
    for found, cache in others:
        assert all(torch.equal(a, b) for a, b in zip(cache, kv, strict=True))
        assert torch.equal(found, whole)


@pytest.mark.parametrize(
    "family",
    [cohere2_moe, partial(cohere2_moe, head_dim=64), qwen3_moe],
    ids=["cohere2_moe", "wide heads", "qwen3_moe"],
)
@torch.no_grad()
def test_nor_where_heads_are_small_and_blocks_of_keys_longer_than_pages(family):
    """Bit for bit with every cut at a page's begin, as behind a cached prefix, a window passed long before."""
    from runtime.gpu.card_model import CardModel

    tokens, page_tokens = 400, 16
    model = family(dtype=torch.bfloat16)
    spec = spec_of(model)
    tensors = {name: value.cuda() for name, value in model.state_dict().items()}
    weights = pack_weights(spec, tensors, rounding_for(spec), torch.bfloat16)
    texts = torch.arange(tokens) * 7 % 189
    pages = torch.randperm(tokens // page_tokens, generator=torch.Generator().manual_seed(1)).cuda()
    results: dict[int, list[torch.Tensor]] = {}
    for cut in range(0, tokens, page_tokens):
        pools = [allocate(spec, len(pages), page_tokens, torch.bfloat16, "cuda") for _ in spec.layers]
        card = CardModel(spec, weights, pools)
        parts = []
        for begin, end in pairwise(sorted({0, cut, tokens})):
            batch = Batch(
                card.embed(texts[begin:end].cuda()), [Stretch(begin, end, (pages,) * len(layer_groups(spec)[0]))]
            )
            for layer in range(spec.num_layers):
                card.layer(layer, batch)
            parts.append(batch.stream)
        results[cut] = [torch.cat(parts), *pools]
    apart = [cut for cut, each in results.items() if not all(map(torch.equal, each, results[0]))]
    assert not apart, f"cut before {apart} other bits come out"
