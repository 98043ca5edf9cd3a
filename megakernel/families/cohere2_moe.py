"""Reads a cohere2_moe config: parallel blocks, window and full attention, leading dense layers.

Owns the family's rules as its published model class applies them. Position embedding: window layers have
RoPE; full layers have none, except dense layers when `prefix_dense_sliding_window_pattern` is 1. Router: a
softmax over the picked experts, which equals a softmax over all, renormalised; or a sigmoid.
"""

from megakernel.families.fields import Fields
from megakernel.model import DenseMlp, LayerSpec, ModelSpec, Rope, RoutedMlp

_CLASS_ROPE_THETA = 10000.0  # the class writes it at the top level even beside other `rope_parameters`
_CLASS_EOS_TOKEN_ID = 255001

# Fields that would change the mathematics, with the values under which they do not. Most are unknown to the
# model class, which would run on without them.
_NEUTRAL = {
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
    "num_shared_experts": 0,
    "partial_rotary_factor": 1.0,
    "position_embedding_type": "rope_gptj",
    "quantization_config": None,
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_parallel_embedding": False,
    "use_qk_norm": False,
}


def read(fields: Fields) -> ModelSpec:
    """Return the model that the fields describe, or refuse the first field that cannot be used."""
    fields.neutral(_NEUTRAL)
    if not fields.has("rms_norm_eps"):
        found = "null" if fields.given("rms_norm_eps") else "missing"
        raise fields.error(f"`rms_norm_eps` is {found}, which selects LayerNorm; supported: RMSNorm with an eps")
    return ModelSpec(
        family="cohere2_moe",
        block="parallel",
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.divisor("num_key_value_heads", "num_attention_heads"),
        head_dim=fields.even("head_dim"),
        qk_norm=False,
        norm_eps=fields.number("rms_norm_eps"),
        vocab_size=fields.integer("vocab_size"),
        # Released files hold null here and mean tied, the class's default.
        tied_embeddings=fields.boolean("tie_word_embeddings", default=True),
        logit_scale=fields.number("logit_scale"),
        max_context_tokens=fields.integer("max_position_embeddings"),
        eos_token_ids=fields.token_ids("eos_token_id", [_CLASS_EOS_TOKEN_ID]),
        layers=_layers(fields),
    )


def _layers(fields: Fields) -> tuple[LayerSpec, ...]:
    dense = _dense(fields)
    rope = Rope(theta=fields.rope_theta(_CLASS_ROPE_THETA), pairing="interleaved")
    dense_rope = fields.integer("prefix_dense_sliding_window_pattern", 1) == 1
    layers: list[LayerSpec] = []
    for is_window, is_dense in zip(_windowed(fields), dense, strict=True):
        layers.append(
            LayerSpec(
                window_tokens=fields.integer("sliding_window") if is_window else None,
                rope=rope if is_window or (is_dense and dense_rope) else None,
                mlp=_dense_mlp(fields) if is_dense else _routed_mlp(fields),
            )
        )
    return tuple(layers)


def _dense(fields: Fields) -> tuple[bool, ...]:
    """Tell for each layer whether its MLP is dense, from either of the two fields that say so."""
    num_layers = fields.num_layers()
    num_dense = fields.integer_up_to("first_k_dense_replace", "num_hidden_layers", num_layers, default=0)
    prefix = tuple(index < num_dense for index in range(num_layers))
    if not fields.has("mlp_layer_types"):
        return prefix
    kinds = fields.choices("mlp_layer_types", ("dense", "sparse"), count=num_layers)
    dense = tuple(kind == "dense" for kind in kinds)
    if fields.has("first_k_dense_replace") and dense != prefix:
        raise fields.error(f"`mlp_layer_types` contradicts `first_k_dense_replace` {num_dense}")
    return dense


def _windowed(fields: Fields) -> tuple[bool, ...]:
    """Tell for each layer whether attention has a window, from the list or from the two patterns."""
    num_layers = fields.num_layers()
    if fields.has("layer_types"):
        kinds = fields.choices("layer_types", ("full_attention", "sliding_attention"), count=num_layers)
        return tuple(kind == "sliding_attention" for kind in kinds)
    if not fields.has("sliding_window_pattern"):
        raise fields.error("`layer_types` is missing; needed: the attention of each layer, or `sliding_window_pattern`")
    # Every n-th layer is full, counted anew after the dense prefix, which has a pattern of its own.
    num_dense = fields.integer("first_k_dense_replace", 0, at_least=0)
    prefix_pattern = fields.integer("prefix_dense_sliding_window_pattern", 1)
    pattern = fields.integer("sliding_window_pattern")
    prefix = [(index + 1) % prefix_pattern != 0 for index in range(num_dense)]
    rest = [(index + 1) % pattern != 0 for index in range(num_layers - num_dense)]
    return (*prefix, *rest)


def _dense_mlp(fields: Fields) -> DenseMlp:
    name = "prefix_dense_intermediate_size" if fields.has("prefix_dense_intermediate_size") else "intermediate_size"
    return DenseMlp(kind="dense", width=fields.integer(name))


def _routed_mlp(fields: Fields) -> RoutedMlp:
    num_experts = fields.integer("num_experts")
    softmax = fields.choice("expert_selection_fn", ("sigmoid", "softmax")) == "softmax"
    return RoutedMlp(
        kind="routed",
        num_experts=num_experts,
        top_k=fields.integer_up_to("num_experts_per_tok", "num_experts", num_experts),
        width=fields.integer("intermediate_size"),
        score="softmax" if softmax else "sigmoid",
        renormalise=True if softmax else fields.boolean("norm_topk_prob"),
    )
