"""Weights in the layout that tasks read: units of 16 rows, contiguous, in the order in which they are streamed.

One copy, whoever reads it. A unit is tiles of 16 rows x 32 columns, each 1 KB. Inside a tile elements lie as the matrix
instruction takes them: lane 4 g + t loads twice 16 bytes, four registers that are row g and row g + 8 in turn, first of
columns 8 t to 8 t + 3, then of 8 t + 4 to 8 t + 7; no load meets another's bank, and no register is moved. A unit of
the up weights pairs 8 gate rows with the 8 up rows that meet them, so that a product and its activation stay in one
task; K splits of the projection are whole blocks of units. `units` and `unit_rows` are the only code that knows the
layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

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
    parts: dict[str, list[Tensor]] = {}
    for piece in pack_pieces(model, tensors, rounding, dtype):
        parts.setdefault(piece.name, []).append(piece.tensor)
    packed = {name: found[0] if len(found) == 1 else torch.cat(found) for name, found in parts.items()}

    def layer(idx: int) -> LayerWeights:
        own = {name: packed.get(f"L{idx}.{name}") for name in LayerWeights.__dataclass_fields__}
        return LayerWeights(**own)  # pyright: ignore[reportArgumentType]

    return Weights(
        embedding=packed["embedding"],
        head=packed.get("head", packed["embedding"]),
        final_norm=packed["final_norm"],
        layers=tuple(layer(idx) for idx in range(model.num_layers)),
    )


@dataclass(frozen=True)
class Piece:
    """Part of a packed tensor: `tensor` lies at units (or rows, or elements) `begin` on.

    Names are those of a step's buffers: "embedding", "head", "L3.up"; norms are "final_norm", "L3.input_norm", ...
    `source_bytes`: of the checkpoint, read for it.
    """

    name: str
    begin: int
    tensor: Tensor
    source_bytes: int = 0

    @property
    def bytes(self) -> int:
        """Packed."""
        return self.tensor.numel() * self.tensor.element_size()


@runtime_checkable
class RowSource(Protocol):
    """A checkpoint that reads part of a tensor."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor that is not read."""
        ...

    def rows(self, name: str, begin: int, end: int) -> Tensor:
        """Rows [end - begin, ...] of a tensor's first dimension."""
        ...


MOST_PIECE_BYTES = 64 * 2**20
"""Of rows of the vocabulary. Other pieces are one matrix, or one expert's."""


def pack_pieces(
    model: ModelSpec, tensors: Mapping[str, Tensor], rounding: Rounding, dtype: torch.dtype
) -> Iterator[Piece]:
    """The packed tensors piece by piece, in the order in which a checkpoint has them: no more is held than a piece.

    ConfigError names a missing tensor or a wrong shape.
    """
    source = _Checkpoint(tensors, dtype)
    yield from _vocabulary(model, source, "embedding", "model.embed_tokens.weight")
    for idx, spec in enumerate(model.layers):
        for piece in _layer_pieces(model, spec, source, idx, rounding):
            yield replace(piece, name=f"L{idx}.{piece.name}")
    yield source.whole("final_norm", "model.norm.weight", (model.hidden_size,))
    if not model.tied_embeddings:
        yield from _vocabulary(model, source, "head", "lm_head.weight")


def weight_pieces(weights: Weights) -> Iterator[Piece]:
    """Packed weights as whole pieces."""
    yield Piece("embedding", 0, weights.embedding)
    if weights.head is not weights.embedding:
        yield Piece("head", 0, weights.head)
    yield Piece("final_norm", 0, weights.final_norm)
    for idx, layer in enumerate(weights.layers):
        for name in LayerWeights.__dataclass_fields__:
            tensor = getattr(layer, name)
            if tensor is not None:
                yield Piece(f"L{idx}.{name}", 0, tensor)


def units(matrix: Tensor) -> Tensor:
    """[rows, columns] as units [rows / 16, columns / 32, 16, 32], the last two of them mixed (see above)."""
    rows, columns = matrix.shape
    # row g + 8 r of a unit; column 32 c + 8 t + 4 h + 2 p + e
    parts = matrix.reshape(rows // UNIT_ROWS, 2, 8, columns // TILE_COLUMNS, 4, 2, 2, 2)
    mixed = parts.permute(0, 3, 5, 2, 4, 6, 1, 7)  # unit c h g t p r e
    return mixed.reshape(rows // UNIT_ROWS, columns // TILE_COLUMNS, UNIT_ROWS, TILE_COLUMNS).contiguous()


def unit_rows(tiles: Tensor) -> Tensor:
    """Rows [..., 16, columns] of units [..., columns / 32, 16, 32]."""
    *outer, columns, _, _ = tiles.shape
    parts = tiles.reshape(*outer, columns, 2, 8, 4, 2, 2, 2)  # c h g t p r e
    n = len(outer)
    rows = parts.permute(*range(n), n + 5, n + 2, n, n + 3, n + 1, n + 4, n + 6)  # r g c t h p e
    return rows.reshape(*outer, UNIT_ROWS, columns * TILE_COLUMNS)


def rows_of(tiles: Tensor, rows: Tensor) -> Tensor:
    """Rows [rows, columns] of units [units, columns / 32, 16, 32], by number; no unit is unpacked."""
    units, row = rows // UNIT_ROWS, rows % UNIT_ROWS
    found = _parts(tiles)[units, :, :, row % 8, :, :, row // 8]  # row c h t p e
    return found.permute(0, 1, 3, 2, 4, 5).flatten(1)


def row_in_place(tiles: Tensor, row: int) -> Tensor:
    """A view of a row of units [units, columns / 32, 16, 32], its columns in their own order."""
    unit, at = divmod(row, UNIT_ROWS)
    return _parts(tiles)[unit, :, :, at % 8, :, :, at // 8]


def _parts(tiles: Tensor) -> Tensor:
    return tiles.view(*tiles.shape[:2], 2, 8, 4, 2, 2, 2)  # unit c h g t p r e


def paired_units(gate: Tensor, up: Tensor) -> Tensor:
    """Gate and up rows [width, columns] as width / 8 units: 8 gate rows, then their 8 up rows."""
    columns = gate.shape[1]
    pair = torch.stack([gate.reshape(-1, PAIRED_COLUMNS, columns), up.reshape(-1, PAIRED_COLUMNS, columns)], dim=1)
    return units(pair.reshape(-1, columns))


def split_units(matrix: Tensor, splits: int) -> Tensor:
    """[rows, columns] as splits * rows / 16 units of columns / splits, split after split."""
    return torch.cat([units(part) for part in matrix.chunk(splits, dim=1)])


def rotary_table(rope: Rope, positions: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Cosine and sine [positions, head_dim / 2, 2] rounded to `dtype`: float32 angles, as transformers has them."""
    frequency = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    angle = torch.arange(positions, dtype=torch.float32)[:, None] * frequency
    return torch.stack([angle.cos(), angle.sin()], dim=-1).to(dtype)


class _Checkpoint:
    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._tensors, self._dtype = tensors, dtype

    def has(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.rows(name, shape, 0, shape[0])

    def rows(self, name: str, shape: tuple[int, ...], begin: int, end: int) -> Tensor:
        """Rows of a tensor that should have `shape`."""
        if name not in self._tensors:
            raise ConfigError(f"the checkpoint has no tensor {name!r}, needed with shape {list(shape)}")
        tensors = self._tensors
        found = tensors.shape(name) if isinstance(tensors, RowSource) else tuple(tensors[name].shape)
        if found != shape:
            raise ConfigError(f"tensor {name!r} has shape {list(found)}, needed {list(shape)}")
        rows = tensors.rows(name, begin, end) if isinstance(tensors, RowSource) else tensors[name][begin:end]
        if not rows.is_floating_point() or rows.element_size() < 2:
            dtype = str(rows.dtype).removeprefix("torch.")
            raise ConfigError(
                f"tensor {name!r} is {dtype}, quantized: needed are weights as bfloat16, float16 or float32"
            )
        return rows.detach().to(self._dtype)

    def whole(self, name: str, tensor: str, shape: tuple[int, ...]) -> Piece:
        """A tensor that is not packed."""
        return _piece(name, 0, self.get(tensor, shape), ())


def _piece(name: str, begin: int, packed: Tensor, sources: tuple[Tensor, ...]) -> Piece:
    return Piece(name, begin, packed, sum(source.numel() * source.element_size() for source in sources))


def _vocabulary(model: ModelSpec, source: _Checkpoint, name: str, tensor: str) -> Iterator[Piece]:
    vocab, hidden = model.vocab_size, model.hidden_size
    step = max(MOST_PIECE_BYTES // (hidden * 2) // UNIT_ROWS, 1) * UNIT_ROWS
    for begin in range(0, vocab, step):
        rows = source.rows(tensor, (vocab, hidden), begin, min(begin + step, vocab))
        yield _piece(name, begin // UNIT_ROWS, units(rows), (rows,))


def _layer_pieces(
    model: ModelSpec, spec: LayerSpec, source: _Checkpoint, layer: int, rounding: Rounding
) -> Iterator[Piece]:
    hidden, width = model.hidden_size, spec.mlp.width
    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    sizes = (("q", model.q_size), ("k", model.kv_size), ("v", model.kv_size))
    parts = tuple(source.get(f"{attention}.{name}_proj.weight", (size, hidden)) for name, size in sizes)
    yield _piece("qkv", 0, split_units(torch.cat(parts), rounding.project_k_splits), parts)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield source.whole(name, f"{attention}.{name}.weight", (model.head_dim,))
    output = source.get(f"{attention}.o_proj.weight", (hidden, model.q_size))
    yield _piece("output", 0, units(output), (output,))
    yield source.whole("input_norm", f"{prefix}.input_layernorm.weight", (hidden,))
    # a parallel block norms once
    second = "post_attention_layernorm" if model.block == "sequential" else "input_layernorm"
    yield source.whole("mlp_norm", f"{prefix}.{second}.weight", (hidden,))
    experts = 1
    if isinstance(spec.mlp, RoutedMlp):
        experts = spec.mlp.num_experts
        yield source.whole("router", f"{prefix}.mlp.gate.weight", (experts, hidden))
    for expert in range(experts):
        gate, up, down = _mlp(source, f"{prefix}.mlp", spec, expert, hidden)
        yield _piece("up", expert * (width // PAIRED_COLUMNS), paired_units(gate, up), (gate, up))
        yield _piece("down", expert * (hidden // UNIT_ROWS), units(down), (down,))


def _mlp(source: _Checkpoint, prefix: str, spec: LayerSpec, expert: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, up and down of an expert, or of a dense layer; checkpoints keep experts apart, modules may not."""
    mlp, width = spec.mlp, spec.mlp.width
    if isinstance(mlp, RoutedMlp):
        prefix = f"{prefix}.experts"
        if source.has(f"{prefix}.gate_up_proj"):
            shape = (mlp.num_experts, 2 * width, hidden)
            fused = source.rows(f"{prefix}.gate_up_proj", shape, expert, expert + 1)[0]
            shape = (mlp.num_experts, hidden, width)
            down = source.rows(f"{prefix}.down_proj", shape, expert, expert + 1)[0]
            return fused[:width], fused[width:], down
        prefix = f"{prefix}.{expert}"
    return (
        source.get(f"{prefix}.gate_proj.weight", (width, hidden)),
        source.get(f"{prefix}.up_proj.weight", (width, hidden)),
        source.get(f"{prefix}.down_proj.weight", (hidden, width)),
    )
