"""The torch baseline computes the same model: its speed is worth comparing."""

from __future__ import annotations

import pytest
import torch
from support.decoding import prompts
from support.tiny_models import WINDOW, cohere2_moe, qwen3_moe, spec_of
from support.torch_step import Matrices, TorchStep

FAMILIES = [pytest.param(cohere2_moe, id="cohere2_moe"), pytest.param(qwen3_moe, id="qwen3_moe")]


def matrices(layer) -> Matrices:
    """A transformers layer's weights."""
    own, attention, mlp = layer.state_dict(), layer.self_attn, layer.mlp
    routed = hasattr(mlp, "gate")
    return Matrices(
        input_norm=own["input_layernorm.weight"],
        mlp_norm=own.get("post_attention_layernorm.weight", own["input_layernorm.weight"]),
        q_norm=own.get("self_attn.q_norm.weight"),
        k_norm=own.get("self_attn.k_norm.weight"),
        qkv=torch.cat([getattr(attention, f"{name}_proj").weight for name in "qkv"]).detach(),
        output=attention.o_proj.weight.detach(),
        router=mlp.gate.weight.detach() if routed else None,
        up=(
            mlp.experts.gate_up_proj if routed else torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight])[None]
        ).detach(),
        down=(mlp.experts.down_proj if routed else mlp.down_proj.weight[None]).detach(),
    )


def last_step(model, texts: list[list[int]], experts, compiled: str | None) -> TorchStep:
    """The baseline at the last token of its rows, after a step for each of the others."""
    spec, inner = spec_of(model), model.model
    layers = [matrices(layer) for layer in inner.layers]
    ends = tuple(each.detach() for each in (inner.embed_tokens.weight, model.lm_head.weight, inner.norm.weight))
    shape = (2, len(texts), spec.num_kv_heads, 64, spec.head_dim)
    kv = [torch.full(shape, float("nan"), dtype=model.dtype) for _ in layers]
    for position in range(len(texts[0])):
        last = position == len(texts[0]) - 1
        step = TorchStep(spec, layers, ends, kv, position, experts=experts, compiled=compiled if last else None)
        step.tokens.copy_(torch.tensor([text[position] for text in texts]))
        if not last:
            step.step()
    return step


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("experts", ["grouped", "gathered"])
@pytest.mark.parametrize("rows", [1, 2])
def test_the_baseline_has_the_logits_of_transformers(family, experts, rows):
    model = family(dtype=torch.float32)
    texts = prompts([WINDOW + 5] * rows)
    step = last_step(model, texts, experts, None)
    logits = step.step()
    with torch.no_grad():
        expected = model(torch.tensor(texts)).logits[:, -1]
    assert torch.allclose(logits, expected, rtol=1e-3, atol=1e-3)
    assert step.tokens.tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("experts", "rows"), [("gathered", 1), ("grouped", 2)])
def test_the_compiler_takes_every_layer_whole(family, experts, rows):
    """Without a graph break, and with the same logits; in bfloat16, which is all that grouped products take there."""
    torch._dynamo.reset()
    model = family(dtype=torch.bfloat16)
    texts = prompts([WINDOW + 5] * rows)
    plain, compiled = (last_step(model, texts, experts, backend).step() for backend in (None, "aot_eager"))
    assert (plain - compiled).abs().max() < 0.05 * plain.abs().max()
