"""A model in torch, many tokens at once, over the packed weights and paged KV that the kernel uses: the prefill.

Weights stay packed where they are; a layer unpacks one matrix or one expert at a time into scratch, of which
`scratch_bytes` is the most. Products are taken in the weights' dtype with wide sums, attention in torch's own, so
numbers differ from the kernel's by rounding. Runs on a card, and on a CPU for tests. Refuses bit-equal results
whatever the chunk: `CpuModel` has those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from megakernel.model import LayerSpec, ModelSpec, Rope, RoutedMlp
from runtime.kv_pages import layer_groups, read, write
from runtime.reference.ops import accumulator, rms_norm
from runtime.weights import LayerWeights, Weights, unit_rows

QUERY_TOKENS = 512
"""Queries that attend together: their scores take as much scratch as the context is long."""


@dataclass
class Stretch:
    """Consecutive tokens of one row: residuals [tokens, hidden], the first one's position, page ids by group."""

    stream: Tensor
    begin: int
    pages: tuple[Tensor, ...]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.begin + len(self.stream)


class TorchModel:
    """The model's mathematics over `pools`, one of KV pages a layer."""

    def __init__(self, model: ModelSpec, weights: Weights, pools: list[Tensor]) -> None:
        """Take weights and pools as they are, on whatever device they lie."""
        self.model, self.weights, self.pools = model, weights, pools
        self.dtype = weights.embedding.dtype
        self.groups = layer_groups(model)[1]
        self.scratch_bytes = 0

    def embed(self, tokens: Tensor) -> Tensor:
        """First residuals [tokens, hidden] of token ids, int64."""
        units, rows = self.weights.embedding, self.weights.embedding.shape[-2]
        return units[tokens // rows, :, tokens % rows].flatten(-2).clone()

    def logits(self, stream: Tensor) -> Tensor:
        """Logits [tokens, vocab], float32 or wider, after the last residuals [tokens, hidden]."""
        x = rms_norm(stream, self.weights.final_norm, self.model.norm_eps)
        # part by part: a vocabulary is the largest matrix of all
        parts = [self._times(x, units) for units in self.weights.head.split(4096)]
        return torch.cat(parts, dim=-1).to(accumulator(self.dtype)) * self.model.logit_scale

    def layer(self, idx: int, stretches: list[Stretch]) -> None:
        """Run one layer over all stretches: append their K and V, and replace their residuals."""
        spec, weights = self.model.layers[idx], self.weights.layers[idx]
        sizes = [len(stretch.stream) for stretch in stretches]
        x = torch.cat([stretch.stream for stretch in stretches])
        normed = rms_norm(x, weights.input_norm, self.model.norm_eps)
        attended = [
            self._attend(idx, stretch, qkv)
            for stretch, qkv in zip(stretches, self._project(weights, normed).split(sizes), strict=True)
        ]
        after = x + self._times(torch.cat(attended), weights.output)
        if self.model.block == "sequential":
            normed = rms_norm(after, weights.mlp_norm, self.model.norm_eps)
        after = after + self._mlp(spec, weights, normed)
        for stretch, stream in zip(stretches, after.split(sizes), strict=True):
            stretch.stream = stream

    def _times(self, x: Tensor, units: Tensor) -> Tensor:
        """Product [tokens, rows] with packed units, rounded to storage."""
        matrix = unit_rows(units).flatten(0, -2)
        self.scratch_bytes = max(self.scratch_bytes, matrix.numel() * matrix.element_size())
        return x @ matrix.mT

    def _project(self, weights: LayerWeights, x: Tensor) -> Tensor:
        """Q, K and V [tokens, heads, head_dim]; K splits are summed wide, in ascending order."""
        columns = weights.qkv.shape[1] * weights.qkv.shape[3]
        splits = self.model.hidden_size // columns
        wide = accumulator(self.dtype)
        total = sum(
            self._times(part, units).to(wide)
            for part, units in zip(x.split(columns, dim=-1), weights.qkv.chunk(splits), strict=True)
        )
        assert isinstance(total, Tensor)
        return total.to(self.dtype).unflatten(-1, (-1, self.model.head_dim))

    def _attend(self, idx: int, stretch: Stretch, qkv: Tensor) -> Tensor:
        """Attention output [tokens, heads * head_dim]; K and V go to the pages first."""
        model, spec, weights = self.model, self.model.layers[idx], self.weights.layers[idx]
        q, k, v = qkv.split([model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms_norm(q, weights.q_norm, model.norm_eps), rms_norm(k, weights.k_norm, model.norm_eps)
        if spec.rope is not None:
            q, k = (self._turn(part, stretch.begin, spec.rope) for part in (q, k))
        pages = stretch.pages[self.groups[idx]]
        write(self.pools[idx], pages, stretch.begin, torch.stack([k, v]).transpose(1, 2))
        found: list[Tensor] = []
        for offset in range(0, len(qkv), QUERY_TOKENS):
            part = q[offset : offset + QUERY_TOKENS]
            first, end = stretch.begin + offset, stretch.begin + offset + len(part)
            window = spec.window_tokens
            begin = 0 if window is None else max(0, first + 1 - window)
            keys, values = read(self.pools[idx], pages, begin, end)
            at = torch.arange(first, end, device=part.device)[:, None]
            seen = torch.arange(begin, end, device=part.device)[None, :]
            mask = (seen <= at) if window is None else (seen <= at) & (seen > at - window)
            attended = scaled_dot_product_attention(
                part.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
            )
            found.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(found)

    def _turn(self, x: Tensor, begin: int, rope: Rope) -> Tensor:
        """RoPE of x [tokens, heads, head_dim]: float32 angles, cos and sin rounded to storage."""
        dim, wide = x.shape[-1], accumulator(self.dtype)
        frequency = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
        angle = torch.arange(begin, begin + len(x)).float()[:, None] * frequency
        cos, sin = (part.to(self.dtype).to(wide).to(x.device)[:, None] for part in (angle.cos(), angle.sin()))
        pairs = x.to(wide).unflatten(-1, (-1, 2) if rope.pairing == "interleaved" else (2, -1))
        axis = -1 if rope.pairing == "interleaved" else -2
        first, second = pairs.unbind(axis)
        return torch.stack([first * cos - second * sin, second * cos + first * sin], axis).flatten(-2).to(self.dtype)

    def _mlp(self, spec: LayerSpec, weights: LayerWeights, x: Tensor) -> Tensor:
        if not isinstance(spec.mlp, RoutedMlp):
            return self._gated(x, weights.up, weights.down)
        assert weights.router is not None
        wide, mlp = accumulator(self.dtype), spec.mlp
        scores = x.to(wide) @ weights.router.to(wide).mT
        if mlp.score == "softmax":
            scores = scores.softmax(-1)
        # of equals the lower id, as everywhere
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : mlp.top_k]
        weight = scores.gather(1, chosen)
        if mlp.score == "sigmoid":
            weight = weight.sigmoid()
        if mlp.renormalise:
            weight = weight / weight.sum(-1, keepdim=True)
        total = torch.zeros(x.shape, dtype=wide, device=x.device)
        up_units, down_units = mlp.width // 8, self.model.hidden_size // 16
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            up = weights.up[expert * up_units : (expert + 1) * up_units]
            down = weights.down[expert * down_units : (expert + 1) * down_units]
            total.index_add_(0, rows, weight[rows, places, None] * self._gated(x[rows], up, down).to(wide))
        return total.to(self.dtype)

    def _gated(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """One expert, or a dense MLP; units of `up` pair 8 gate rows with their 8 up rows."""
        gate, linear = self._times(x, up).unflatten(-1, (-1, 2, 8)).unbind(-2)
        return self._times(silu(gate.flatten(-2)) * linear.flatten(-2), down)
