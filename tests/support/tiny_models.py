"""Tiny random transformers models of both families, and legal choices for them on a few SMs."""

from __future__ import annotations

import torch
from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from megakernel.build import BuiltStep, assemble
from megakernel.families import read_config
from megakernel.model import ModelSpec
from megakernel.tiling import Choices, Cut, Interleave, Ring, Rounding
from megakernel.workload import Bucket

WINDOW = 20
"""Window of the tiny Cohere models: neither a page nor a chunk, so that edges never fall together."""


def cohere2_moe(
    layers: int = 5, *, dtype: torch.dtype = torch.float64, seed: int = 0, head_dim: int = 16
) -> PreTrainedModel:
    """A parallel-block model: dense first layer, full layers at 0 and every fourth, windows between, sigmoid router."""
    kinds = ["full_attention" if idx % 4 == 0 else "sliding_attention" for idx in range(layers)]
    config = Cohere2MoeConfig(
        vocab_size=192, hidden_size=64, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, max_position_embeddings=512, sliding_window=WINDOW, layer_types=kinds,
        num_experts=8, num_experts_per_tok=3, expert_selection_fn="sigmoid", norm_topk_prob=False,
        first_k_dense_replace=1, prefix_dense_intermediate_size=96, rms_norm_eps=1e-6, logit_scale=0.5,
        eos_token_id=1, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    return _random(Cohere2MoeForCausalLM, config, dtype, seed)


def qwen3_moe(layers: int = 2, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
    """A sequential-block model: q/k norm, softmax router with renormalisation, untied head."""
    config = Qwen3MoeConfig(
        vocab_size=192, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=16, max_position_embeddings=512, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, decoder_sparse_step=1, rms_norm_eps=1e-6, tie_word_embeddings=False,
        eos_token_id=1, pad_token_id=0, bos_token_id=2,
    )  # fmt: skip
    return _random(Qwen3MoeForCausalLM, config, dtype, seed)


def _random(kind: type, config: object, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    # the grouped experts kernel takes no float64
    model = kind._from_config(config, attn_implementation="eager", experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # far from the usual 0.02, so that attention, routing and logits are all well away from uniform
            scale = 1.0 if "norm" in name else 0.25
            parameter.copy_(torch.randn_like(parameter) * scale)
    return model.to(dtype)


def spec_of(model: PreTrainedModel) -> ModelSpec:
    """The spec that the project reads from the model's own config."""
    return read_config(model.config.to_dict())


def choices_for(spec: ModelSpec, **interleave: object) -> Choices:
    """Legal choices on four SMs that leave no operator in one task."""
    if spec.block == "parallel":
        settings: dict[str, object] = {"order": ("project", "up", "attend", "merge", "down", "output")}
    else:
        order = ("project", "attend", "merge", "output", "route", "up", "down")
        settings = {"order": order, "router_with_project": False}
    return Choices(
        rounding=Rounding(chunk_tokens=16, page_tokens=16, slice_columns=32),
        cut=Cut(project=5, attend=4, merge=3, output=3, up=4, down=4, head=5, route=2),
        ring=Ring(copy_bytes=1024, stages=8, in_flight_cap_bytes=4096),
        interleave=Interleave.model_validate({**settings, **interleave}),
    )


def rounding_for(spec: ModelSpec) -> Rounding:
    """That of `choices_for`."""
    return choices_for(spec).rounding


def built(spec: ModelSpec, rows: int = 1, choices: Choices | None = None, num_sms: int = 4) -> BuiltStep:
    """A step for up to 256 tokens a row."""
    bucket = Bucket(rows=rows, max_context_tokens=256, nominal_context_tokens=64)
    return assemble(spec, bucket, choices or choices_for(spec), num_sms)
