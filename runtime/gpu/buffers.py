"""Device memory of one table: weights, KV pages, scratch, live inputs, and the addresses of all of them.

Owns every allocation of a step and its layout. Weights lie in one block, in the order of the graph's buffers, and KV in
one pool of pages a layer. Weights are a checkpoint's, or drawn on the device: normal numbers where something is
computed, random bits in streaming mode, because zeros stream faster than real data. Refuses to launch; `launch` takes
the addresses from here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megakernel.abi import LAYER, ROW_STATE
from megakernel.build import BuiltStep
from megakernel.graph import Buffer
from megakernel.model import Rope, RoutedMlp
from runtime.gpu.specialize import pages_per_row
from runtime.gpu.tags import TAGGED
from runtime.kv_pages import layer_groups
from runtime.rows import NO_END
from runtime.weights import Piece, rotary_table

ALIGNMENT = 1024
"""Bulk copies need 16; whole tiles of weights begin at multiples of this."""

WEIGHT_STD = 0.02
"""Of drawn weights, as in most initialisations."""

Drawn = Literal["bits", "normal"]


@dataclass(frozen=True)
class Addresses:
    """What a launch record says about memory; 0 where a table has no such thing."""

    buffers: int = 0
    layers: int = 0
    head: int = 0
    embedding: int = 0
    final_norm: int = 0
    rows: int = 0
    pages: int = 0
    page_groups: int = 0
    routed: int = 0
    arena: int = 0


@dataclass
class LiveInputs:
    """Device inputs of a step, as arrays on the host: row states, page ids [groups, rows, pages], routed experts."""

    rows: np.ndarray
    pages: np.ndarray
    routed: np.ndarray = field(repr=False)


def random_inputs(step: BuiltStep, positions: tuple[int, ...], seed: int = 0) -> LiveInputs:
    """Greedy rows at `positions`, shuffled pages, and independent, uniformly routed experts."""
    rng = np.random.default_rng(seed)
    bucket = step.bucket
    rows = np.zeros(bucket.rows, ROW_STATE.dtype)
    rows["position"][: len(positions)] = positions
    rows["active"][: len(positions)] = 1
    rows["end_position"], rows["top_p"] = NO_END, 1.0
    per_row = pages_per_row(bucket, step.choices)
    groups = len(layer_groups(step.model)[0])
    pages = np.stack([rng.permutation(bucket.rows * per_row).astype("<u4") for _ in range(groups)])
    mlps = [layer.mlp if isinstance(layer.mlp, RoutedMlp) else None for layer in step.model.layers]
    most = max((mlp.top_k for mlp in mlps if mlp), default=1)
    routed = np.zeros((len(mlps), bucket.rows, most), "<u4")
    for layer, mlp in enumerate(mlps):
        for row in range(bucket.rows if mlp else 0):
            assert mlp is not None
            routed[layer, row, : mlp.top_k] = rng.permutation(mlp.num_experts)[: mlp.top_k]
    return LiveInputs(rows, pages.reshape(groups, bucket.rows, per_row), routed)


def distinct_experts(step: BuiltStep, inputs: LiveInputs) -> tuple[int, ...]:
    """Distinct experts that the active rows touch, per layer; 0 in dense layers."""
    active = inputs.rows["active"].astype(bool)
    return tuple(
        len(np.unique(inputs.routed[idx, active, : layer.mlp.top_k])) if isinstance(layer.mlp, RoutedMlp) else 0
        for idx, layer in enumerate(step.model.layers)
    )


def upload(array: np.ndarray) -> Tensor:
    """A device copy of an array, as bytes."""
    return torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy()).cuda()


def random_bytes(size: int) -> Tensor:
    """Random device memory."""
    block = torch.empty(-(-size // 8), dtype=torch.int64, device="cuda")
    block.random_()
    return block.view(torch.uint8)


def random_weights(size: int, seed: int = 0) -> Tensor:
    """Device memory of normal bfloat16 numbers."""
    generator = torch.Generator("cuda").manual_seed(seed)
    block = torch.empty(-(-size // 8) * 4, dtype=torch.bfloat16, device="cuda")
    for part in block.split(2**30):
        part.normal_(0.0, WEIGHT_STD, generator=generator)
    return block.view(torch.uint8)


class StepBuffers:
    """All device memory of a step."""

    def __init__(
        self,
        step: BuiltStep,
        model: StepBuffers | None = None,
        *,
        weights: Iterable[Piece] | None = None,
        drawn: Drawn = "bits",
        pages: int | None = None,
        has_tags: bool = False,
    ) -> None:
        """Allocate and fill; with `model`, weights and KV are those of another table of the same model.

        `weights` come piece by piece, and are copied as they come; without them they are drawn. `pages` a pool has,
        or as many as the bucket's rows can fill. With `has_tags`, router logits carry tags.
        """
        self.step, self.model, self.has_tags = step, model, has_tags
        filled = step.bucket.rows * pages_per_row(step.bucket, step.choices)
        self.num_pages = model.num_pages if model is not None else pages or filled
        taken = {} if model is None else {name: at for name, at in model.address.items() if name in model.permanent}
        self.permanent = {
            buffer.name for buffer in step.graph.buffers if buffer.read_only or buffer.name.endswith(".kv")
        }
        own = [buffer for buffer in step.graph.buffers if buffer.name not in taken]
        sizes = [-(-self._size(buffer) // ALIGNMENT) * ALIGNMENT for buffer in own]
        self.num_bytes = sum(sizes)
        if weights is not None:
            self.block = torch.zeros(self.num_bytes + ALIGNMENT, dtype=torch.uint8, device="cuda")
        else:
            self.block = (random_bytes if drawn == "bits" else random_weights)(self.num_bytes + ALIGNMENT)
        self.begin = -(-self.block.data_ptr() // ALIGNMENT) * ALIGNMENT
        placed = zip(own, np.cumsum([0, *sizes]), strict=False)
        self.address = taken | {buffer.name: self.begin + int(offset) for buffer, offset in placed}
        if model is not None:
            self.constants = model.constants
        else:
            self.constants = {name: value.cuda() for name, value in _constants(step).items()}
        self.most_host_bytes = 0
        for piece in weights or ():
            self._load(piece)
        for name in ("tokens", "row_state"):
            self.tensor(name, (self._size(self._buffer(name)),), torch.uint8).zero_()
        self._buffers = upload(np.array([self.address[buffer.name] for buffer in step.graph.buffers], "<u8"))
        self._layers = torch.empty(0)
        self._live: list[Tensor] = []

    def _load(self, piece: Piece) -> None:
        """Copy a piece to its place; norms lie apart."""
        self.most_host_bytes = max(self.most_host_bytes, piece.source_bytes + piece.bytes)
        tensor = piece.tensor.to(torch.bfloat16)
        if piece.name in self.constants:
            self.constants[piece.name].copy_(tensor)
        else:
            place = (piece.begin + len(tensor), *tensor.shape[1:])
            self.tensor(piece.name, place, torch.bfloat16)[piece.begin :].copy_(tensor)

    def set_inputs(self, inputs: LiveInputs) -> Addresses:
        """Upload live inputs; the addresses of everything."""
        self.pages, routed = upload(inputs.pages), upload(inputs.routed)
        self._layers = upload(self._layer_records(inputs.pages.shape[1:]))
        self._live = [routed]
        self.set_rows(inputs.rows)
        embedding = self.address["embedding"]
        return Addresses(
            buffers=self._buffers.data_ptr(),
            layers=self._layers.data_ptr(),
            head=self.address.get("head", embedding),
            embedding=embedding,
            final_norm=self.constants["final_norm"].data_ptr(),
            rows=self.address["row_state"],
            pages=self.pages.data_ptr(),
            page_groups=len(inputs.pages),
            routed=routed.data_ptr(),
        )

    def set_rows(self, rows: np.ndarray) -> None:
        """Overwrite the states of all rows."""
        data = upload(rows)
        self.tensor("row_state", tuple(data.shape), torch.uint8).copy_(data)

    def set_pages(self, pages: np.ndarray) -> None:
        """Overwrite the page tables of all rows, [groups, rows, pages a row]."""
        self.pages.copy_(upload(pages))

    def tensor(self, name: str, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """A buffer's memory as a tensor."""
        if name not in self.address or (
            self.model is not None and name in self.model.address and name in self.permanent
        ):
            assert self.model is not None
            return self.model.tensor(name, shape, dtype)
        begin = self.address[name] - self.block.data_ptr()
        size = int(np.prod(shape)) * dtype.itemsize
        return self.block[begin : begin + size].view(dtype).reshape(shape)

    def scratch(self, name: str, dtype: torch.dtype) -> Tensor:
        """A scratch buffer of the graph by name, without tags."""
        shape = self._buffer(name).shape
        if self._is_tagged(name):
            return self.tensor(name, (*shape, 2), dtype)[..., 0]
        return self.tensor(name, shape, dtype)

    def tags(self) -> list[tuple[Tensor, Tensor]]:
        """What has to be put back before a launch: words that carry tags, and zeros."""
        found = [buffer for buffer in self.step.graph.buffers if self._is_tagged(buffer.name)]
        words = [self.tensor(buffer.name, (self._size(buffer),), torch.uint8) for buffer in found]
        return [(each, torch.zeros_like(each)) for each in words]

    def _is_tagged(self, name: str) -> bool:
        return self.has_tags and name == TAGGED

    def words(self, address: int, num_bytes: int) -> np.ndarray:
        """32-bit words of device memory, copied to the host."""
        begin = address - self.block.data_ptr()
        return self.block[begin : begin + num_bytes].cpu().numpy().view("<u4")

    def _buffer(self, name: str) -> Buffer:
        return next(buffer for buffer in self.step.graph.buffers if buffer.name == name)

    def _size(self, buffer: Buffer) -> int:
        if buffer.name == "row_state":
            return self.step.bucket.rows * ROW_STATE.dtype.itemsize
        if not buffer.name.endswith(".kv"):
            return buffer.bytes * (2 if self._is_tagged(buffer.name) else 1)
        return self.num_pages * self.step.choices.rounding.page_tokens * self.step.model.kv_bytes_per_token_per_layer

    def _layer_records(self, table: tuple[int, ...]) -> np.ndarray:
        names = {"project": "qkv", "router": "router", "kv": "kv", "output": "output", "up": "up", "down": "down"}
        model = self.step.model
        layers = np.zeros(model.num_layers, LAYER.dtype)
        group_bytes = int(np.prod(table)) * 4
        groups = layer_groups(model)[1]
        for idx, spec in enumerate(model.layers):
            for name, buffer in names.items():
                layers[name][idx] = self.address.get(f"L{idx}.{buffer}", 0)
            for name in ("input_norm", "mlp_norm", "q_norm", "k_norm"):
                constant = self.constants.get(f"L{idx}.{name}")
                layers[name][idx] = 0 if constant is None else constant.data_ptr()
            if spec.rope is not None:
                layers["rotary"][idx] = self.constants[_rotary_name(spec.rope)].data_ptr()
            layers["pages"][idx] = self.pages.data_ptr() + groups[idx] * group_bytes
            layers["window_tokens"][idx] = spec.window_tokens or 0
            layers["mlp_width"][idx] = spec.mlp.width
            if isinstance(spec.mlp, RoutedMlp):
                layers["num_experts"][idx] = spec.mlp.num_experts
                layers["top_k"][idx] = spec.mlp.top_k
        return layers


def _rotary_name(rope: Rope) -> str:
    return f"rotary {rope.theta:g}"


def _constants(step: BuiltStep) -> dict[str, Tensor]:
    """Norms, all ones, and tables of cosine and sine, in bfloat16."""
    model = step.model
    ropes = {_rotary_name(layer.rope): layer.rope for layer in model.layers if layer.rope}
    positions = step.bucket.max_context_tokens
    found = {name: rotary_table(rope, positions, model.head_dim) for name, rope in ropes.items()}
    norms = {"input_norm": model.hidden_size, "mlp_norm": model.hidden_size}
    if model.qk_norm:
        norms |= {"q_norm": model.head_dim, "k_norm": model.head_dim}
    found["final_norm"] = torch.ones(model.hidden_size)
    for idx in range(model.num_layers):
        found |= {f"L{idx}.{name}": torch.ones(size) for name, size in norms.items()}
    return {name: value.to(torch.bfloat16).contiguous() for name, value in found.items()}
