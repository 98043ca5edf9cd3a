"""The card's prefill is as near float32 as the plain one: on a card, or interpreted, attention row by row."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from support.tiny_models import cohere2_moe, qwen3_moe, rounding_for, spec_of
from torch.nn.functional import scaled_dot_product_attention

from runtime.kv_pages import allocate, layer_groups
from runtime.torch_model import Batch, Stretch, TorchModel
from runtime.weights import pack_weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or by itself")

from runtime.gpu import card_model  # noqa: E402

DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}[DEVICE]
CUTS = (0, 50, 51, 120)
"""Chunks that begin in the middle, one token, and behind the window's edge."""


def row_by_row(q, keys, values, ends, window):
    """What `ragged_attention` says that it is."""
    found = []
    for (begin, end), (first, last) in zip(pairwise(ends[0]), pairwise(ends[1]), strict=True):
        at = torch.arange(last - first - (end - begin), last - first)[:, None]
        seen = torch.arange(last - first)[None, :]
        mask = (seen <= at) & (seen > at - (window or len(keys) + 1))
        parts = (part.transpose(0, 1)[None] for part in (q[begin:end], keys[first:last], values[first:last]))
        found.append(scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize(
    "family",
    [cohere2_moe, qwen3_moe, partial(cohere2_moe, head_dim=32)],
    ids=["cohere2_moe", "qwen3_moe", "heads of whole tiles"],
)
@torch.no_grad()
def test_two_rows_at_once_in_chunks(family, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(card_model, "ragged_attention", row_by_row)
    model = family(dtype=DTYPE)
    spec = spec_of(model)
    tables = tuple(torch.randperm(16).to(DEVICE) for _ in layer_groups(spec)[0])
    other = tuple(16 + table for table in tables)
    found = []
    for kind, dtype in ((TorchModel, torch.float32), (TorchModel, DTYPE), (card_model.CardModel, DTYPE)):
        tensors = {name: value.to(DEVICE, dtype) for name, value in model.state_dict().items()}
        packed = pack_weights(spec, tensors, rounding_for(spec), dtype)
        machine = kind(spec, packed, [allocate(spec, 32, 16, dtype, DEVICE) for _ in spec.layers])
        logits = []
        for begin, end in pairwise(CUTS):
            texts = [*range(begin, end), *range(100 + begin, 100 + end)]
            stretches = [Stretch(begin, end, pages) for pages in (tables, other)]
            batch = Batch(machine.embed(torch.tensor([idx % 189 for idx in texts]).to(DEVICE)), stretches)
            for layer in range(spec.num_layers):
                machine.layer(layer, batch)
            logits.append(machine.logits(batch.stream))
        found.append(torch.cat(logits).float())
    truth, plain, card = found
    assert torch.isfinite(card).all()
    # The median, because a near-tie of a router that falls otherwise changes a token's logits altogether.
    noise, distance = (((each - truth).norm(dim=-1) / truth.norm(dim=-1)).median() for each in (plain, card))
    assert distance < 1.2 * noise + 1e-5, f"{distance:.6f} from float32, where the plain model is {noise:.6f}"
