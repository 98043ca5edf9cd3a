"""Device memory of one table: weights, KV pages, scratch, live inputs, and the addresses of all of them.

Owns every allocation of a step and its layout. Weights lie in one block, in the order of the graph's buffers, and KV in
one pool of pages a layer. In streaming mode their bytes are random: zeros stream faster than real data. Refuses to
launch; `launch` takes the addresses from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megakernel.abi import LAYER, ROW_STATE
from megakernel.build import BuiltStep
from megakernel.graph import Buffer
from megakernel.model import RoutedMlp
from runtime.gpu.specialize import pages_per_row

ALIGNMENT = 1024
"""Bulk copies need 16; whole sub-tiles of weights begin at multiples of this."""


@dataclass(frozen=True)
class Addresses:
    """What a launch record says about memory; 0 where a table has no such thing."""

    buffers: int = 0
    layers: int = 0
    head: int = 0
    embedding: int = 0
    rows: int = 0
    pages: int = 0
    routed: int = 0
    arena: int = 0


@dataclass
class LiveInputs:
    """Device inputs of a step, as arrays on the host: positions of active rows, page ids, routed experts."""

    rows: np.ndarray
    pages: np.ndarray
    routed: np.ndarray = field(repr=False)


def random_inputs(step: BuiltStep, positions: tuple[int, ...], seed: int = 0) -> LiveInputs:
    """Rows at `positions`, shuffled pages, and independent, uniformly routed experts."""
    rng = np.random.default_rng(seed)
    bucket = step.bucket
    rows = np.zeros(bucket.rows, ROW_STATE.dtype)
    rows["position"][: len(positions)] = positions
    rows["active"][: len(positions)] = 1
    per_row = pages_per_row(bucket, step.choices)
    pages = rng.permutation(bucket.rows * per_row).astype("<u4").reshape(bucket.rows, per_row)
    mlps = [layer.mlp if isinstance(layer.mlp, RoutedMlp) else None for layer in step.model.layers]
    most = max((mlp.top_k for mlp in mlps if mlp), default=1)
    routed = np.zeros((len(mlps), bucket.rows, most), "<u4")
    for layer, mlp in enumerate(mlps):
        for row in range(bucket.rows if mlp else 0):
            assert mlp is not None
            routed[layer, row, : mlp.top_k] = rng.permutation(mlp.num_experts)[: mlp.top_k]
    return LiveInputs(rows, pages, routed)


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


class StepBuffers:
    """All device memory of a step in streaming mode."""

    def __init__(self, step: BuiltStep, model: StepBuffers | None = None) -> None:
        """Allocate and fill; with `model`, weights and KV are those of another table of the same model and bucket."""
        self.step = step
        self.model = model
        taken = {} if model is None else {name: at for name, at in model.address.items() if name in model.permanent}
        self.permanent = {
            buffer.name for buffer in step.graph.buffers if buffer.read_only or buffer.name.endswith(".kv")
        }
        own = [buffer for buffer in step.graph.buffers if buffer.name not in taken]
        sizes = [-(-self._size(buffer) // ALIGNMENT) * ALIGNMENT for buffer in own]
        self.num_bytes = sum(sizes)
        self.block = random_bytes(self.num_bytes + ALIGNMENT)
        self.begin = -(-self.block.data_ptr() // ALIGNMENT) * ALIGNMENT
        placed = zip(own, np.cumsum([0, *sizes]), strict=False)
        self.address = taken | {buffer.name: self.begin + int(offset) for buffer, offset in placed}
        self._buffers = upload(np.array([self.address[buffer.name] for buffer in step.graph.buffers], "<u8"))
        self._layers = upload(self._layer_records())
        self._live: list[Tensor] = []

    def set_inputs(self, inputs: LiveInputs) -> Addresses:
        """Upload live inputs; the addresses of everything."""
        self._live = [upload(inputs.rows), upload(inputs.pages), upload(inputs.routed)]
        rows, pages, routed = (tensor.data_ptr() for tensor in self._live)
        embedding = self.address["embedding"]
        return Addresses(
            buffers=self._buffers.data_ptr(),
            layers=self._layers.data_ptr(),
            head=self.address.get("head", embedding),
            embedding=embedding,
            rows=rows,
            pages=pages,
            routed=routed,
        )

    def words(self, address: int, num_bytes: int) -> np.ndarray:
        """32-bit words of device memory, copied to the host."""
        begin = address - self.block.data_ptr()
        return self.block[begin : begin + num_bytes].cpu().numpy().view("<u4")

    def _size(self, buffer: Buffer) -> int:
        if not buffer.name.endswith(".kv"):
            return buffer.bytes
        model, bucket, choices = self.step.model, self.step.bucket, self.step.choices
        pages = bucket.rows * pages_per_row(bucket, choices)
        return pages * choices.rounding.page_tokens * model.kv_bytes_per_token_per_layer

    def _layer_records(self) -> np.ndarray:
        names = {"project": "qkv", "router": "router", "kv": "kv", "output": "output", "up": "up", "down": "down"}
        layers = np.zeros(self.step.model.num_layers, LAYER.dtype)
        for idx, spec in enumerate(self.step.model.layers):
            for name, buffer in names.items():
                layers[name][idx] = self.address.get(f"L{idx}.{buffer}", 0)
            layers["window_tokens"][idx] = spec.window_tokens or 0
            layers["mlp_width"][idx] = spec.mlp.width
            if isinstance(spec.mlp, RoutedMlp):
                layers["num_experts"][idx] = spec.mlp.num_experts
                layers["top_k"][idx] = spec.mlp.top_k
        return layers
