"""Reads a qwen3_moe config: sequential blocks, q/k norm, RoPE everywhere, softmax router.

Owns the family's rules as its published model class applies them: which layers are dense follows from
`mlp_only_layers` and `decoder_sparse_step`, and a window, when there is one, is on every layer.
"""

from megakernel.families.fields import Fields
from megakernel.model import DenseMlp, LayerSpec, ModelSpec, Rope, RoutedMlp

# Fields that would change the mathematics, with the values under which they do not. Several are unknown to
# the model class and appear in published files all the same.
_NEUTRAL = {
    "attention_bias": False,
    "hidden_act": "silu",
    "n_shared_experts": 0,
    "num_shared_experts": 0,
    "partial_rotary_factor": 1.0,
    "qkv_bias": False,
    "quantization_config": None,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}


def read(fields: Fields) -> ModelSpec:
    """Return the model that the fields describe, or refuse the first field that cannot be used."""
    fields.neutral(_NEUTRAL)
    return ModelSpec(
        family="qwen3_moe",
        block="sequential",
        hidden_size=fields.integer("hidden_size"),
        num_heads=fields.integer("num_attention_heads"),
        num_kv_heads=fields.divisor("num_key_value_heads", "num_attention_heads"),
        head_dim=_head_dim(fields),
        qk_norm=True,
        norm_eps=fields.number("rms_norm_eps"),
        vocab_size=fields.integer("vocab_size"),
        tied_embeddings=fields.boolean("tie_word_embeddings", default=False),
        logit_scale=1.0,
        max_context_tokens=fields.integer("max_position_embeddings"),
        eos_token_ids=fields.token_ids("eos_token_id", []),
        layers=_layers(fields),
    )


def _head_dim(fields: Fields) -> int:
    if fields.has("head_dim"):
        return fields.even("head_dim")
    head_dim = fields.integer("hidden_size") // fields.divisor("num_attention_heads", "hidden_size")
    if head_dim % 2:
        raise fields.error(f"`head_dim` is missing and hidden_size / num_attention_heads is {head_dim}, which is odd")
    return head_dim


def _layers(fields: Fields) -> tuple[LayerSpec, ...]:
    num_layers = fields.num_layers()
    dense_only = fields.indices("mlp_only_layers", below=num_layers)
    sparse_step = fields.integer("decoder_sparse_step", 1)
    rope = Rope(theta=fields.rope_theta(), pairing="half")
    window_tokens = _window_tokens(fields)
    layers: list[LayerSpec] = []
    for index in range(num_layers):
        is_routed = index not in dense_only and (index + 1) % sparse_step == 0
        mlp = _routed_mlp(fields) if is_routed else DenseMlp(kind="dense", width=fields.integer("intermediate_size"))
        layers.append(LayerSpec(window_tokens=window_tokens, rope=rope, mlp=mlp))
    return tuple(layers)


def _window_tokens(fields: Fields) -> int | None:
    if not fields.boolean("use_sliding_window", default=False):
        return None
    # The model class puts the window on every layer; files with this field mean the layers from there on.
    if fields.integer("max_window_layers", 0, at_least=0) != 0:
        raise fields.refusal("max_window_layers", "0 or absent when `use_sliding_window` is true")
    return fields.integer("sliding_window")


def _routed_mlp(fields: Fields) -> RoutedMlp:
    num_experts = _num_experts(fields)
    return RoutedMlp(
        kind="routed",
        num_experts=num_experts,
        top_k=fields.integer_up_to("num_experts_per_tok", "num_experts", num_experts),
        width=fields.integer("moe_intermediate_size"),
        score="softmax",
        renormalise=fields.boolean("norm_topk_prob"),
    )


def _num_experts(fields: Fields) -> int:
    # Published files say num_experts; files that the model class saves itself say num_local_experts.
    if not fields.has("num_local_experts"):
        return fields.integer("num_experts")
    num_experts = fields.integer("num_local_experts")
    if fields.integer("num_experts", num_experts) != num_experts:
        raise fields.refusal("num_experts", f"the same as `num_local_experts`, which is {num_experts}")
    return num_experts
