"""The demo model as a checkpoint folder in Hugging Face's layout: seeded random weights, tokenizer, chat template.

Owns its geometry: the layer kinds of North Mini Code (dense first layer, full and windowed attention, sigmoid router),
small enough for a CPU. What it says means nothing.
"""

from importlib.resources import files
from pathlib import Path

from megakernel.config import pretty_json, write_text_atomic
from runtime.demo.tokenizer import CONTROL, VOCABULARY, demo_tokenizer

CONFIG: dict[str, object] = {
    "architectures": ["Cohere2MoeForCausalLM"],
    "model_type": "cohere2_moe",
    "attention_bias": False,
    "bos_token_id": CONTROL.index("<BOS_TOKEN>"),
    "dtype": "float32",
    "eos_token_id": CONTROL.index("<|END_OF_TURN_TOKEN|>"),
    "expert_selection_fn": "sigmoid",
    "first_k_dense_replace": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 32,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "logit_scale": 0.5,
    "max_position_embeddings": 8192,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "num_shared_experts": 0,
    "pad_token_id": CONTROL.index("<PAD>"),
    "prefix_dense_intermediate_size": 64,
    "prefix_dense_sliding_window_pattern": 1,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000,
    "sliding_window": 64,
    "tie_word_embeddings": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
    "vocab_size": VOCABULARY,
}


def write_tokenizer(folder: Path) -> None:
    """Write what text needs: tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    write_text_atomic(folder / "tokenizer.json", demo_tokenizer().to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "pad_token": "<PAD>",
        "clean_up_tokenization_spaces": False,
    }
    write_text_atomic(folder / "tokenizer_config.json", pretty_json(settings))
    template = files("runtime.demo").joinpath("chat_template.jinja").read_text(encoding="utf-8")
    write_text_atomic(folder / "chat_template.jinja", template)


def write_checkpoint(folder: Path) -> None:
    """Write the whole checkpoint; equal bytes on every call."""
    import torch  # noqa: PLC0415 - tokenizers alone need no torch
    from safetensors.torch import save_file  # noqa: PLC0415
    from transformers import Cohere2MoeConfig, Cohere2MoeForCausalLM  # noqa: PLC0415

    write_tokenizer(folder)
    write_text_atomic(folder / "config.json", pretty_json(CONFIG))
    sampling = {"temperature": 1.0, "top_p": 0.95, "eos_token_id": CONFIG["eos_token_id"]}
    write_text_atomic(folder / "generation_config.json", pretty_json(sampling))
    model = Cohere2MoeForCausalLM(Cohere2MoeConfig.from_dict(CONFIG))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(value.shape, generator=generator) * (1.0 if "norm" in name else 0.25)
        for name, value in sorted(model.state_dict().items())
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
