"""Configs as transformers saves them read back as the model that transformers builds from them."""

import pytest

from megakernel.families import read_model
from megakernel.model import ModelSpec

# Only an installation without the runtime extra lacks these; with it, a broken import is an error.
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}

COHERE = TINY | {
    "head_dim": 16,
    "intermediate_size": 32,
    "rms_norm_eps": 1e-6,
    "expert_selection_fn": "sigmoid",
    "sliding_window": 8,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "prefix_dense_intermediate_size": 64,
    "logit_scale": 0.25,
}

QWEN = TINY | {"moe_intermediate_size": 32, "num_hidden_layers": 3}

CASES = [
    ("Cohere2Moe", COHERE),
    ("Cohere2Moe", COHERE | {"norm_topk_prob": False, "tie_word_embeddings": False}),
    ("Cohere2Moe", COHERE | {"expert_selection_fn": "softmax", "first_k_dense_replace": 0}),
    ("Cohere2Moe", COHERE | {"first_k_dense_replace": 3, "prefix_dense_sliding_window_pattern": 2}),
    ("Cohere2Moe", COHERE | {"first_k_dense_replace": 2, "sliding_window_pattern": 3}),
    ("Cohere2Moe", COHERE | {"mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse", "sparse"]}),
    ("Cohere2Moe", COHERE | {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
    ("Cohere2Moe", COHERE | {"rope_theta": 50000.0, "eos_token_id": None, "dtype": "bfloat16"}),
    ("Qwen3Moe", QWEN),
    ("Qwen3Moe", QWEN | {"head_dim": 16, "tie_word_embeddings": True, "norm_topk_prob": True}),
    ("Qwen3Moe", QWEN | {"mlp_only_layers": [1], "intermediate_size": 64, "eos_token_id": None}),
    ("Qwen3Moe", QWEN | {"decoder_sparse_step": 2, "intermediate_size": 64}),
    ("Qwen3Moe", QWEN | {"use_sliding_window": True, "sliding_window": 8}),
    ("Qwen3Moe", QWEN | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
]


def build(family: str, fields: dict[str, object], directory) -> tuple[torch.nn.Module, ModelSpec]:
    """Return the model that transformers builds from a config, and the spec read from the saved file."""
    config = getattr(transformers, f"{family}Config")(**fields)
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.tie_weights()
    return model, read_model(directory)


@pytest.mark.parametrize(("family", "fields"), CASES)
def test_a_saved_config_reads_as_the_model_it_builds(family, fields, tmp_path):
    model, spec = build(family, fields, tmp_path)
    assert spec.num_parameters == sum(each.numel() for each in model.parameters())
    assert spec.tied_embeddings == (model.lm_head.weight is model.model.embed_tokens.weight)
    assert (spec.hidden_size, spec.vocab_size, spec.max_context_tokens) == (32, 96, 128)
    assert spec.eos_token_ids == tuple(fields["eos_token_id"] or ())
    assert spec.num_layers == len(model.model.layers)
    for layer, theirs in zip(spec.layers, model.model.layers, strict=True):
        attention = theirs.self_attn
        assert layer.window_tokens == attention.sliding_window
        has_rope = family == "Qwen3Moe" or attention.sliding_window is not None or attention.force_rope
        assert (layer.rope is not None) == has_rope
        assert (spec.q_size, spec.kv_size) == (attention.q_proj.out_features, attention.k_proj.out_features)
        assert spec.head_dim == attention.head_dim
        assert (layer.mlp.kind == "routed") == hasattr(theirs.mlp, "experts")
        assert spec.norm_eps == theirs.input_layernorm.variance_epsilon
        if layer.mlp.kind == "dense":
            assert layer.mlp.width == theirs.mlp.gate_proj.out_features
            continue
        gate = theirs.mlp.gate
        assert (layer.mlp.num_experts, layer.mlp.top_k) == (gate.num_experts, gate.top_k)
        assert layer.mlp.width == theirs.mlp.experts.intermediate_dim
    theta = model.config.rope_parameters["rope_theta"]
    assert {layer.rope.theta for layer in spec.layers if layer.rope} == {theta}


@pytest.mark.parametrize(("family", "fields"), CASES)
def test_the_router_as_described_picks_and_weighs_as_theirs(family, fields, tmp_path):
    _, spec = build(family, fields, tmp_path)
    config = getattr(transformers, f"{family}Config")(**fields)
    module = __import__(f"transformers.models.{config.model_type}.modeling_{config.model_type}", fromlist=["router"])
    gate = getattr(module, f"{family}TopKRouter")(config).double()
    torch.manual_seed(7)
    torch.nn.init.normal_(gate.weight)
    hidden = torch.randn(5, spec.hidden_size, dtype=torch.float64)
    logits, theirs, picked = gate(hidden)
    mlp = next(layer.mlp for layer in spec.layers if layer.mlp.kind == "routed")
    scores = logits.sigmoid() if mlp.score == "sigmoid" else logits.softmax(dim=-1)
    ours, order = scores.topk(mlp.top_k, dim=-1)
    if mlp.renormalise:
        ours = ours / ours.sum(dim=-1, keepdim=True)
    assert torch.equal(order, picked)
    # Their softmax runs in float32 whatever the input's type.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("family", ["Cohere2Moe", "Qwen3Moe"])
def test_the_default_sizes_of_the_class_are_read(family, tmp_path):
    # The class of cohere2_moe defaults to a LayerNorm, which is refused; with an RMSNorm its sizes are read.
    extra = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8} if family == "Cohere2Moe" else {}
    model, spec = build(family, {"num_hidden_layers": 2, **extra}, tmp_path)
    assert spec.num_parameters == sum(each.numel() for each in model.parameters())
