"""Weights in the layout that tasks read: units of 16 rows, contiguous, in the order in which they are streamed.

One copy, whoever reads it. A unit is tiles of 16 rows x 32 columns, each 1 KB and row-major: two 16-byte loads a lane
feed two matrix instructions without bank conflicts, and a prefill reads the tiles in place. A unit of the up weights
pairs 8 gate rows with the 8 up rows that meet them, so that a product and its activation stay in one task; K splits of
the projection are whole blocks of units. `units` and `unit_rows` are the only code that knows the layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megakernel.config import ConfigError
from megakernel.model import LayerSpec, ModelSpec, Rope, RoutedMlp
from megakernel.tiling import PAIRED_COLUMNS, TILE_COLUMNS, UNIT_ROWS, Rounding


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Unit tensors are [units, columns / 32, 16, 32]; absent ones are None.

    `qkv` has [splits * units] of hidden / splits columns, split-major; `output` hidden / 16 of heads * head_dim; `up`
    [experts * width / 8] of hidden; `down` [experts * hidden / 16] of width; `router` [experts, hidden]; norms [hidden]
    or [head_dim].
    """

    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv: Tensor
    output: Tensor
    router: Tensor | None
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Weights:
    """A model: `embedding` and `head` are vocab / 16 units of hidden columns, one tensor when tied."""

    embedding: Tensor
    head: Tensor
    final_norm: Tensor
    layers: tuple[LayerWeights, ...]


def pack_weights(model: ModelSpec, tensors: Mapping[str, Tensor], rounding: Rounding, dtype: torch.dtype) -> Weights:
    """Pack tensors with the names of a Hugging Face checkpoint (or of a transformers model's state dict).

    ConfigError names a missing tensor or a wrong shape.
    """
    source = _Checkpoint(tensors, dtype)
    embedding = units(source.get("model.embed_tokens.weight", (model.vocab_size, model.hidden_size)))
    head = embedding
    if not model.tied_embeddings:
        head = units(source.get("lm_head.weight", (model.vocab_size, model.hidden_size)))
    return Weights(
        embedding=embedding,
        head=head,
        final_norm=source.get("model.norm.weight", (model.hidden_size,)),
        layers=tuple(_pack_layer(model, spec, source, idx, rounding) for idx, spec in enumerate(model.layers)),
    )


def units(matrix: Tensor) -> Tensor:
    """[rows, columns] as units [rows / 16, columns / 32, 16, 32]."""
    rows, columns = matrix.shape
    tiles = matrix.reshape(rows // UNIT_ROWS, UNIT_ROWS, columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.transpose(1, 2).contiguous()


def unit_rows(tiles: Tensor) -> Tensor:
    """Rows [..., 16, columns] of units [..., columns / 32, 16, 32]."""
    return tiles.transpose(-3, -2).flatten(-2)


def paired_units(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up rows [width, columns] as width / 8 units: 8 gate rows, then their 8 up rows."""
    columns = gate.shape[1]
    pair = torch.stack([gate.reshape(-1, PAIRED_COLUMNS, columns), up.reshape(-1, PAIRED_COLUMNS, columns)], dim=1)
    return units(pair.reshape(-1, columns))


def split_units(matrix: Tensor, splits: int) -> Tensor:
    """[rows, columns] as splits * rows / 16 units of columns / splits, split after split."""
    return torch.cat([units(part) for part in matrix.chunk(splits, dim=1)])


def rotary_table(rope: Rope, positions: int, head_dim: int) -> Tensor:
    """Cosine and sine [positions, head_dim / 2, 2] in bfloat16: float32 angles, as transformers computes them."""
    frequency = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], dim=-1).to(torch.bfloat16)


class _Checkpoint:
    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors, self._dtype = tensors, dtype

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._tensors:
            raise ConfigError(f"the checkpoint has no tensor {name!r}, needed with shape {list(shape)}")
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise ConfigError(f"tensor {name!r} has shape {list(tensor.shape)}, needed {list(shape)}")
        return tensor.detach().to(self._dtype)


def _pack_layer(model: ModelSpec, spec: LayerSpec, source: _Checkpoint, layer: int, rounding: Rounding) -> LayerWeights:
    hidden, width = model.hidden_size, spec.mlp.width
    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    qkv = torch.cat(
        [
            source.get(f"{attention}.{name}_proj.weight", (size, hidden))
            for name, size in (("q", model.q_size), ("k", model.kv_size), ("v", model.kv_size))
        ]
    )
    input_norm = source.get(f"{prefix}.input_layernorm.weight", (hidden,))
    sequential = model.block == "sequential"
    router = None
    if isinstance(spec.mlp, RoutedMlp):
        router = source.get(f"{prefix}.mlp.gate.weight", (spec.mlp.num_experts, hidden))
        experts = [_expert(source, f"{prefix}.mlp.experts", expert, spec.mlp, hidden) for expert in
                   range(spec.mlp.num_experts)]  # fmt: skip
    else:
        names = (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width)))
        gate, up, down = (source.get(f"{prefix}.mlp.{name}_proj.weight", shape) for name, shape in names)
        experts = [(gate, up, down)]
    return LayerWeights(
        input_norm=input_norm,
        mlp_norm=source.get(f"{prefix}.post_attention_layernorm.weight", (hidden,)) if sequential else input_norm,
        q_norm=source.get(f"{attention}.q_norm.weight", (model.head_dim,)) if model.qk_norm else None,
        k_norm=source.get(f"{attention}.k_norm.weight", (model.head_dim,)) if model.qk_norm else None,
        qkv=split_units(qkv, rounding.project_k_splits),
        output=units(source.get(f"{attention}.o_proj.weight", (hidden, model.q_size))),
        router=router,
        up=torch.cat([paired_units(gate, up) for gate, up, _ in experts]),
        down=torch.cat([units(down) for _, _, down in experts]),
    )


def _expert(
    source: _Checkpoint, prefix: str, expert: int, mlp: RoutedMlp, hidden: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of one expert; checkpoints keep them apart, transformers' modules fused."""
    if source.has(f"{prefix}.gate_up_proj"):
        fused = source.get(f"{prefix}.gate_up_proj", (mlp.num_experts, 2 * mlp.width, hidden))[expert]
        down = source.get(f"{prefix}.down_proj", (mlp.num_experts, hidden, mlp.width))[expert]
        return fused[: mlp.width], fused[mlp.width :], down
    return (
        source.get(f"{prefix}.{expert}.gate_proj.weight", (mlp.width, hidden)),
        source.get(f"{prefix}.{expert}.up_proj.weight", (mlp.width, hidden)),
        source.get(f"{prefix}.{expert}.down_proj.weight", (hidden, mlp.width)),
    )
