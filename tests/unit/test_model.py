"""A model's counts are exact, and its layers are read as the published model classes run them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megakernel.assets import asset
from megakernel.config import ConfigError, parse, pretty_json
from megakernel.families import SUPPORTED_FAMILIES, read_config, read_model
from megakernel.model import DenseMlp, LayerSpec, ModelSpec, Rope, RoutedMlp

NORTH = "CohereLabs--North-Mini-Code-1.0"
QWEN = "Qwen--Qwen3-30B-A3B"


def shipped(name: str) -> Path:
    return asset(f"configs/models/{name}.json")


def config(name: str, **changes: object) -> dict[str, object]:
    """Return a shipped config with fields changed; a value of ... removes the field."""
    changed = {**json.loads(shipped(name).read_text(encoding="utf-8")), **changes}
    return {key: value for key, value in changed.items() if value is not ...}


def refusal(data: dict[str, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(data, "config.json")
    return str(caught.value)


# ----------------------------------------------------------------------------------------- shipped models


@pytest.mark.parametrize(
    ("name", "total", "active_in_millions"),
    [
        ("CohereLabs--North-Mini-Code-1.0", 30_484_303_872, 3305),
        ("Qwen--Qwen3-30B-A3B", 30_532_122_624, 3042),
        ("Qwen--Qwen3-Coder-30B-A3B-Instruct", 30_532_122_624, 3042),
        ("Qwen--Qwen3-235B-A22B", 235_093_634_560, 21568),
    ],
)
def test_parameter_totals_equal_the_published_ones(name, total, active_in_millions):
    spec = read_model(shipped(name))
    assert spec.num_parameters == total
    assert spec.weight_bytes == 2 * total
    assert round(spec.decode_active_parameters / 1e6) == active_in_millions


def test_north_has_a_dense_layer_with_rope_then_window_layers_with_rope_and_full_layers_without():
    spec = read_model(shipped(NORTH))
    rope = Rope(theta=50000.0, pairing="interleaved")
    experts = RoutedMlp(kind="routed", num_experts=128, top_k=8, width=768, score="sigmoid", renormalise=False)
    first = LayerSpec(window_tokens=None, rope=rope, mlp=DenseMlp(kind="dense", width=3072))
    window = LayerSpec(window_tokens=4096, rope=rope, mlp=experts)
    full = LayerSpec(window_tokens=None, rope=None, mlp=experts)
    assert spec.layers == (first, *(window, window, window, full) * 12)
    assert (spec.block, spec.qk_norm, spec.tied_embeddings, spec.logit_scale) == (
        "parallel",
        False,
        True,
        1.0,
    )
    assert (spec.q_size, spec.kv_size, spec.queries_per_kv, spec.num_layers) == (4096, 512, 8, 49)
    assert (spec.norm_eps, spec.vocab_size, spec.eos_token_ids) == (1e-6, 262144, (255001,))


def test_qwen_has_sequential_blocks_with_rope_and_a_renormalised_softmax_on_every_layer():
    spec = read_model(shipped(QWEN))
    experts = RoutedMlp(kind="routed", num_experts=128, top_k=8, width=768, score="softmax", renormalise=True)
    layer = LayerSpec(window_tokens=None, rope=Rope(theta=1e6, pairing="half"), mlp=experts)
    assert spec.layers == (layer,) * 48
    assert (spec.block, spec.qk_norm, spec.tied_embeddings, spec.logit_scale) == (
        "sequential",
        True,
        False,
        1.0,
    )


def test_a_spec_survives_its_own_json():
    for name in (NORTH, QWEN):
        spec = read_model(shipped(name))
        assert parse(json.loads(pretty_json(spec)), ModelSpec, "spec") == spec


def test_a_model_directory_is_read_through_its_config(tmp_path):
    (tmp_path / "config.json").write_bytes(shipped(QWEN).read_bytes())
    assert read_model(tmp_path) == read_model(shipped(QWEN))


def test_step_bytes_are_the_weights_touched_and_the_cache_read():
    spec = read_model(shipped(NORTH))
    assert spec.kv_bytes_per_token_per_layer == 2048
    one_row_of_embedding = 2048 * 2
    nothing_cached = spec.step_bytes([0], spec.layers[1].mlp.top_k)
    assert nothing_cached == spec.decode_active_parameters * 2 + one_row_of_embedding
    # 13 full layers read all of a long context, 36 window layers the last 4096 tokens of it.
    cache = 2048 * (13 * 100_000 + 36 * 4096 + 49 * 10)
    assert spec.step_bytes([100_000, 10], 8) == nothing_cached + one_row_of_embedding + cache
    expert = 3 * 2048 * 768 * 2
    assert spec.step_bytes([0], 8.5) - nothing_cached == 48 * expert // 2


# ------------------------------------------------------------------------------------ variants of a config


def test_null_and_absent_tie_mean_tied_for_cohere2_moe_and_untied_for_qwen3_moe():
    for value in (None, ...):
        assert read_config(config(NORTH, tie_word_embeddings=value)).tied_embeddings
        assert not read_config(config(QWEN, tie_word_embeddings=value)).tied_embeddings


def test_layers_follow_from_patterns_when_there_is_no_list():
    spec = read_config(config(NORTH, layer_types=..., sliding_window_pattern=4))
    windows = [layer.window_tokens is not None for layer in spec.layers]
    assert windows == [False, *[True, True, True, False] * 12]
    spec = read_config(
        config(NORTH, layer_types=..., sliding_window_pattern=3, num_hidden_layers=6, first_k_dense_replace=2)
        | {"prefix_dense_sliding_window_pattern": 2}
    )
    assert [layer.window_tokens is not None for layer in spec.layers] == [
        True,
        False,
        True,
        True,
        False,
        True,
    ]
    # A dense full layer has RoPE only when the dense prefix has no windows at all.
    assert [layer.rope is not None for layer in spec.layers] == [True, False, True, True, False, True]


def test_mlp_layer_types_stand_for_first_k_dense_replace():
    kinds = ["dense"] + ["sparse"] * 48
    expected = read_config(config(NORTH))
    assert read_config(config(NORTH, mlp_layer_types=kinds)) == expected
    assert read_config(config(NORTH, mlp_layer_types=kinds, first_k_dense_replace=...)) == expected


def test_a_dense_layer_without_a_width_of_its_own_has_the_experts_width():
    spec = read_config(config(NORTH, prefix_dense_intermediate_size=None))
    assert spec.layers[0].mlp == DenseMlp(kind="dense", width=768)


def test_a_softmax_over_the_picked_experts_is_a_renormalised_softmax():
    spec = read_config(config(NORTH, expert_selection_fn="softmax", norm_topk_prob=False))
    assert (spec.layers[1].mlp.score, spec.layers[1].mlp.renormalise) == ("softmax", True)


def test_qwen_dense_layers_follow_from_the_list_and_the_step():
    spec = read_config(config(QWEN, mlp_only_layers=[1], decoder_sparse_step=2, num_hidden_layers=6))
    assert [layer.mlp.kind for layer in spec.layers] == [
        "dense",
        "dense",
        "dense",
        "routed",
        "dense",
        "routed",
    ]
    assert spec.layers[0].mlp.width == 6144


def test_qwen_window_is_on_every_layer():
    spec = read_config(config(QWEN, use_sliding_window=True, sliding_window=64, max_window_layers=0))
    assert {layer.window_tokens for layer in spec.layers} == {64}


def test_qwen_head_dim_defaults_to_an_equal_share_of_the_hidden_size():
    assert read_config(config(QWEN, head_dim=...)).head_dim == 64


@pytest.mark.parametrize(("ids", "expected"), [(None, ()), (7, (7,)), ([7, 8], (7, 8)), ([], ())])
def test_end_tokens_may_be_one_several_or_none(ids, expected):
    assert read_config(config(NORTH, eos_token_id=ids)).eos_token_ids == expected
    assert read_config(config(QWEN, eos_token_id=ids)).eos_token_ids == expected


def test_rope_may_stand_in_rope_parameters():
    plain = {"rope_type": "default", "rope_theta": 50000}
    for name in (NORTH, QWEN):
        spec = read_config(config(name, rope_theta=..., rope_parameters=plain))
        assert spec.layers[0].rope.theta == 50000.0
    # The cohere2_moe class writes its default at the top level beside the value that it uses.
    spec = read_config(config(NORTH, rope_theta=10000.0, rope_parameters=plain))
    assert spec.layers[0].rope.theta == 50000.0


# ----------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (QWEN, {"model_type": ...}, "`model_type` is missing; supported: cohere2_moe, qwen3_moe"),
        (
            QWEN,
            {"model_type": "mixtral"},
            '`model_type` is "mixtral"; supported: one of cohere2_moe, qwen3_moe',
        ),
        (QWEN, {"model_type": ["qwen3_moe"]}, '`model_type` is ["qwen3_moe"]'),
        (QWEN, {"hidden_size": ...}, "`hidden_size` is missing; needed: an integer from 1"),
        (QWEN, {"hidden_size": None}, "`hidden_size` is null; supported: an integer from 1"),
        (QWEN, {"hidden_size": 2048.0}, "`hidden_size` is 2048.0; supported: an integer"),
        (QWEN, {"hidden_size": "2048"}, '`hidden_size` is "2048"; supported: an integer'),
        (QWEN, {"hidden_size": True}, "`hidden_size` is true; supported: an integer"),
        (QWEN, {"hidden_size": 0}, "`hidden_size` is 0; supported: an integer from 1"),
        (QWEN, {"hidden_size": 10**30}, "supported: an integer from 1 to 2147483647"),
        (QWEN, {"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000; supported: at most 1024"),
        (QWEN, {"rms_norm_eps": ..., "rms_nrom_eps": 1}, "the nearest field in the file is `rms_nrom_eps`"),
        (QWEN, {"rms_norm_eps": 0}, "`rms_norm_eps` is 0; supported: a positive finite number"),
        (QWEN, {"rms_norm_eps": float("nan")}, "`rms_norm_eps` is NaN; supported: a positive finite number"),
        (QWEN, {"rope_theta": 10**400}, "supported: a positive finite number"),
        (QWEN, {"rope_theta": ...}, "`rope_theta` is missing; needed: a positive number"),
        (QWEN, {"num_key_value_heads": 5}, "`num_key_value_heads` is 5; supported: a divisor of"),
        (
            QWEN,
            {"num_experts_per_tok": 129},
            "`num_experts_per_tok` is 129; supported: at most `num_experts`",
        ),
        (QWEN, {"num_experts_per_tok": 0}, "`num_experts_per_tok` is 0; supported: an integer from 1"),
        (QWEN, {"num_experts": 0}, "`num_experts` is 0; supported: an integer from 1"),
        (QWEN, {"num_local_experts": 64}, "`num_experts` is 128; supported: the same as `num_local_experts`"),
        (QWEN, {"head_dim": 63}, "`head_dim` is 63; supported: an even number"),
        (
            QWEN,
            {"head_dim": ..., "num_attention_heads": 24},
            "`num_attention_heads` is 24; supported: a divisor",
        ),
        (QWEN, {"head_dim": ..., "hidden_size": 96}, "hidden_size / num_attention_heads is 3, which is odd"),
        (QWEN, {"attention_bias": True}, "`attention_bias` is true; supported: false"),
        (QWEN, {"attention_bias": 0}, "`attention_bias` is 0; supported: false"),
        (QWEN, {"qkv_bias": True}, "`qkv_bias` is true; supported: false"),
        (QWEN, {"use_qk_norm": False}, "`use_qk_norm` is false; supported: true"),
        (QWEN, {"hidden_act": "gelu"}, '`hidden_act` is "gelu"; supported: "silu"'),
        (
            QWEN,
            {"shared_expert_intermediate_size": 512},
            "`shared_expert_intermediate_size` is 512; supported: 0",
        ),
        (
            QWEN,
            {"quantization_config": {"bits": 8}},
            '`quantization_config` is {"bits": 8}; supported: no such',
        ),
        (QWEN, {"norm_topk_prob": ...}, "`norm_topk_prob` is missing; needed: true or false"),
        (QWEN, {"norm_topk_prob": 1}, "`norm_topk_prob` is 1; supported: true or false"),
        (QWEN, {"tie_word_embeddings": "no"}, '`tie_word_embeddings` is "no"; supported: true or false'),
        (QWEN, {"mlp_only_layers": [48]}, "`mlp_only_layers` holds 48; supported: layers 0 to 47"),
        (QWEN, {"mlp_only_layers": 3}, "`mlp_only_layers` is 3; supported: a list"),
        (QWEN, {"mlp_only_layers": [0], "intermediate_size": ...}, "`intermediate_size` is missing"),
        (QWEN, {"decoder_sparse_step": 0}, "`decoder_sparse_step` is 0; supported: an integer from 1"),
        (QWEN, {"use_sliding_window": True}, "`max_window_layers` is 48; supported: 0 or absent when"),
        (QWEN, {"use_sliding_window": True, "max_window_layers": 0}, "`sliding_window` is null; supported:"),
        (QWEN, {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, '`rope_scaling.rope_type` is "yarn"'),
        (QWEN, {"rope_scaling": {"rope_theta": 5}}, "`rope_scaling.rope_theta` is 5; supported: plain RoPE"),
        (QWEN, {"rope_scaling": "yarn"}, '`rope_scaling` is "yarn"; supported: an object'),
        (
            QWEN,
            {"rope_parameters": {"rope_theta": 7}},
            "`rope_theta` is 1000000.0, but `rope_parameters.rope_theta`",
        ),
        (
            QWEN,
            {"rope_parameters": {"rope_theta": -7}},
            "`rope_parameters.rope_theta` is -7; supported: a positive",
        ),
        (
            QWEN,
            {"rope_parameters": {"full_attention": {"rope_theta": 7}}},
            '`rope_parameters.full_attention` is {"rope_theta": 7}; supported: plain RoPE',
        ),
        (QWEN, {"eos_token_id": "end"}, '`eos_token_id` is "end"; supported: a token id, a list'),
        (QWEN, {"eos_token_id": [1, -1]}, "`eos_token_id` is [1, -1]; supported: a token id, a list"),
        (
            NORTH,
            {"rms_norm_eps": None},
            "`rms_norm_eps` is null, which selects LayerNorm; supported: RMSNorm",
        ),
        (
            NORTH,
            {"rms_norm_eps": ...},
            "`rms_norm_eps` is missing, which selects LayerNorm; supported: RMSNorm",
        ),
        (NORTH, {"use_parallel_block": False}, "`use_parallel_block` is false; supported: true"),
        (NORTH, {"use_qk_norm": True}, "`use_qk_norm` is true; supported: false"),
        (NORTH, {"num_shared_experts": 4}, "`num_shared_experts` is 4; supported: 0"),
        (NORTH, {"rotary_pct": 0.5}, "`rotary_pct` is 0.5; supported: 1.0"),
        (
            NORTH,
            {"position_embedding_type": "alibi"},
            '`position_embedding_type` is "alibi"; supported: "rope_gptj"',
        ),
        (
            NORTH,
            {"final_logit_softcapping": 30.0},
            "`final_logit_softcapping` is 30.0; supported: no such field",
        ),
        (
            NORTH,
            {"expert_selection_fn": "relu"},
            '`expert_selection_fn` is "relu"; supported: "sigmoid" or "softmax"',
        ),
        (NORTH, {"expert_selection_fn": ...}, "`expert_selection_fn` is missing"),
        (NORTH, {"num_hidden_layers": 48}, "`layer_types` has 49 entries, but `num_hidden_layers` is 48"),
        (
            NORTH,
            {"layer_types": ["linear"] * 49},
            '`layer_types.0` is "linear"; supported: "full_attention" or',
        ),
        (NORTH, {"layer_types": [["full_attention"]] * 49}, '`layer_types.0` is ["full_attention"]'),
        (NORTH, {"layer_types": ...}, "`layer_types` is missing; needed: the attention of each layer, or"),
        (
            NORTH,
            {"mlp_layer_types": ["sparse"] * 49},
            "`mlp_layer_types` contradicts `first_k_dense_replace` 1",
        ),
        (
            NORTH,
            {"mlp_layer_types": ["dense"]},
            "`mlp_layer_types` has 1 entries, but `num_hidden_layers` is 49",
        ),
        (NORTH, {"first_k_dense_replace": 50}, "`first_k_dense_replace` is 50; supported: at most"),
        (NORTH, {"sliding_window": None}, "`sliding_window` is null; supported: an integer from 1"),
        (NORTH, {"sliding_window": ...}, "`sliding_window` is missing; needed: an integer from 1"),
        (NORTH, {"logit_scale": ...}, "`logit_scale` is missing; needed: a positive number"),
        (NORTH, {"logit_scale": -1}, "`logit_scale` is -1; supported: a positive finite number"),
    ],
)
def test_a_field_that_cannot_be_used_is_refused_by_name(name, changes, message):
    said = refusal(config(name, **changes))
    assert said.startswith("config.json: ")
    assert message in said


NESTED = {"model_type": "cohere2_vision", "text_config": {"model_type": "cohere2_moe"}}


@pytest.mark.parametrize("model_type", ["cohere2_vision", "gpt_oss", "qwen3_next", "gemma4", "deepseek_v2", ""])
def test_other_families_are_refused_with_the_supported_ones(model_type):
    said = refusal(NESTED | {"model_type": model_type})
    assert said == f'config.json: `model_type` is "{model_type}"; supported: one of cohere2_moe, qwen3_moe'
    assert all(family in said for family in SUPPORTED_FAMILIES)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.mark.parametrize("name", [NORTH, QWEN])
@given(data=st.data())
def test_any_change_of_one_field_is_read_or_refused_cleanly(name, data):
    good = config(name)
    field = data.draw(st.sampled_from([*good, "rope_parameters", "rope_scaling", "mlp_layer_types"]))
    changed = good | {field: data.draw(JSON_VALUES)}
    try:
        assert isinstance(read_config(changed, "config.json"), ModelSpec)
    except ConfigError as error:
        said = str(error)
    else:
        return
    assert said.startswith("config.json: `")


# ------------------------------------------------------------------------------------- the spec by itself


def test_a_spec_refuses_sizes_that_do_not_fit_together():
    spec = read_model(shipped(NORTH)).model_dump()
    for changes in ({"num_kv_heads": 3}, {"head_dim": 127}, {"layers": ()}, {"hidden_size": 0}):
        with pytest.raises(ValidationError):
            ModelSpec(**{**spec, **changes})
    with pytest.raises(ValidationError, match="top_k 9 exceeds num_experts 8"):
        RoutedMlp(kind="routed", num_experts=8, top_k=9, width=8, score="softmax", renormalise=True)
