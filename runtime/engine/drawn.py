"""A checkpoint of random numbers, tensor by tensor as they are asked for: for measuring and for tests."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from megakernel.model import ModelSpec, RoutedMlp


class DrawnTensors(Mapping[str, Tensor]):
    """Normal numbers under the names that Hugging Face gives a model's tensors; the same for the same seed."""

    def __init__(self, model: ModelSpec, *, std: float, seed: int = 0) -> None:
        """`std` is that of all but norms, whose weights are spread by one."""
        self._shapes, self._std, self._seed = shapes(model), std, seed

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + self._seed)
        return torch.randn(shape, generator=generator) * (1.0 if "norm" in name else self._std)

    def __contains__(self, name: object) -> bool:
        return name in self._shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor's shape, by name."""
    hidden = model.hidden_size
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not model.tied_embeddings:
        found["lm_head.weight"] = (model.vocab_size, hidden)
    for idx, layer in enumerate(model.layers):
        prefix, mlp = f"model.layers.{idx}", layer.mlp
        attention = f"{prefix}.self_attn"
        found |= {
            f"{attention}.q_proj.weight": (model.q_size, hidden),
            f"{attention}.k_proj.weight": (model.kv_size, hidden),
            f"{attention}.v_proj.weight": (model.kv_size, hidden),
            f"{attention}.o_proj.weight": (hidden, model.q_size),
            f"{prefix}.input_layernorm.weight": (hidden,),
        }
        if model.block == "sequential":
            found[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if model.qk_norm:
            found |= {f"{attention}.{name}_norm.weight": (model.head_dim,) for name in "qk"}
        experts = [""]
        if isinstance(mlp, RoutedMlp):
            found[f"{prefix}.mlp.gate.weight"] = (mlp.num_experts, hidden)
            experts = [f".experts.{expert}" for expert in range(mlp.num_experts)]
        for expert in experts:
            found |= {f"{prefix}.mlp{expert}.{name}_proj.weight": (mlp.width, hidden) for name in ("gate", "up")}
            found[f"{prefix}.mlp{expert}.down_proj.weight"] = (hidden, mlp.width)
    return found
