"""A model in torch, many tokens at once, over the packed weights and paged KV that the kernel uses: the prefill.

Weights stay packed where they are; a layer unpacks one matrix or one expert at a time into scratch, of which
`scratch_bytes` is the most. Products are taken in the weights' dtype with wide sums, attention in torch's own, so
numbers differ from the kernel's by rounding. Runs anywhere; `gpu/card_model.py` has what a card does faster. Refuses
bit-equal results whatever the chunk: `CpuModel` has those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from megakernel.model import LayerSpec, ModelSpec, Rope, RoutedMlp
from runtime.kv_pages import layer_groups, read, write
from runtime.reference.ops import accumulator, rms_norm
from runtime.weights import LayerWeights, Weights, rotary_table, rows_of, unit_rows

QUERY_TOKENS = 512
"""Queries that attend together: their scores take as much scratch as the context is long."""


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one row: positions `begin` up to `end`, and page ids by group."""

    begin: int
    end: int
    pages: tuple[Tensor, ...]


@dataclass
class Batch:
    """Stretches that go through the layers together: residuals [tokens, hidden] of all, one behind the other.

    `places` are what a model has found out of the stretches, by group of layers.
    """

    stream: Tensor
    stretches: Sequence[Stretch]
    places: dict[int, object] = field(default_factory=dict[int, object])

    @property
    def sizes(self) -> list[int]:
        """Tokens of each stretch."""
        return [stretch.end - stretch.begin for stretch in self.stretches]

    def streams(self) -> tuple[Tensor, ...]:
        """Residuals of each stretch."""
        return self.stream.split(self.sizes)

    def only(self, kept: Sequence[int]) -> Batch:
        """The batch without all stretches but these, whose numbers ascend."""
        if len(kept) == len(self.stretches):
            return self
        streams = self.streams()
        return Batch(torch.cat([streams[idx] for idx in kept]), [self.stretches[idx] for idx in kept])


class TorchModel:
    """The model's mathematics over `pools`, one of KV pages a layer."""

    def __init__(self, model: ModelSpec, weights: Weights, pools: list[Tensor]) -> None:
        """Take weights and pools as they are, on whatever device they lie."""
        self.model, self.weights, self.pools = model, weights, pools
        self.dtype = weights.embedding.dtype
        self.groups = layer_groups(model)[1]
        self.scratch_bytes = 0
        self._rotary: dict[Rope, Tensor] = {}

    def embed(self, tokens: Tensor) -> Tensor:
        """First residuals [tokens, hidden] of token ids, int64."""
        return rows_of(self.weights.embedding, tokens)

    def logits(self, stream: Tensor) -> Tensor:
        """Logits [tokens, vocab], float32 or wider, after the last residuals [tokens, hidden]."""
        x = rms_norm(stream, self.weights.final_norm, self.model.norm_eps)
        # part by part: a vocabulary is the largest matrix of all
        parts = [self._times(x, units) for units in self.weights.head.split(4096)]
        return torch.cat(parts, dim=-1).to(accumulator(self.dtype)) * self.model.logit_scale

    def layer(self, idx: int, batch: Batch) -> None:
        """Run one layer over a batch: append its K and V, and replace its residuals."""
        spec, weights = self.model.layers[idx], self.weights.layers[idx]
        normed = rms_norm(batch.stream, weights.input_norm, self.model.norm_eps)
        q = self._append(idx, batch, self._project(weights, normed))
        after = batch.stream + self._times(self._attend(idx, batch, q), weights.output)
        if self.model.block == "sequential":
            normed = rms_norm(after, weights.mlp_norm, self.model.norm_eps)
        batch.stream = after + self._mlp(spec, weights, normed)

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

    def _append(self, idx: int, batch: Batch, qkv: Tensor) -> Tensor:
        """Queries [tokens, heads, head_dim] of a batch; its K and V go to the pages."""
        model, spec, weights = self.model, self.model.layers[idx], self.weights.layers[idx]
        q, k, v = qkv.split([model.num_heads, model.num_kv_heads, model.num_kv_heads], dim=1)
        if weights.q_norm is not None and weights.k_norm is not None:
            q, k = rms_norm(q, weights.q_norm, model.norm_eps), rms_norm(k, weights.k_norm, model.norm_eps)
        if spec.rope is not None:
            table = self._rotary_table(spec.rope, batch)
            angles = torch.cat([table[stretch.begin : stretch.end] for stretch in batch.stretches])
            q, k = (_turn(part, angles, spec.rope) for part in (q, k))
        parts = torch.stack([k, v]).transpose(1, 2).split(batch.sizes, dim=2)
        for stretch, kv in zip(batch.stretches, parts, strict=True):
            write(self.pools[idx], stretch.pages[self.groups[idx]], stretch.begin, kv)
        return q

    def _attend(self, idx: int, batch: Batch, q: Tensor) -> Tensor:
        """Attention output [tokens, heads * head_dim] of queries [tokens, heads, head_dim] over the pages."""
        found: list[Tensor] = []
        for stretch, own in zip(batch.stretches, q.split(batch.sizes), strict=True):
            for offset in range(0, len(own), QUERY_TOKENS):
                part = own[offset : offset + QUERY_TOKENS]
                first, end = stretch.begin + offset, stretch.begin + offset + len(part)
                begin, keys, values = self._seen(idx, stretch, first, end)
                at = torch.arange(first, end, device=part.device)[:, None]
                seen = torch.arange(begin, end, device=part.device)[None, :]
                window = self.model.layers[idx].window_tokens
                mask = (seen <= at) if window is None else (seen <= at) & (seen > at - window)
                attended = scaled_dot_product_attention(
                    part.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
                )
                found.append(attended[0].transpose(0, 1).flatten(1))
        return torch.cat(found)

    def _seen(self, idx: int, stretch: Stretch, first: int, end: int) -> tuple[int, Tensor, Tensor]:
        """Where what positions `first` to `end` see begins, and its K and V [KV heads, tokens, head_dim]."""
        window = self.model.layers[idx].window_tokens
        begin = 0 if window is None else max(0, first + 1 - window)
        keys, values = read(self.pools[idx], stretch.pages[self.groups[idx]], begin, end)
        return begin, keys, values

    def _rotary_table(self, rope: Rope, batch: Batch) -> Tensor:
        """Cosine and sine [positions, head_dim / 2, 2], rounded to storage, of all positions up to the batch's last."""
        end = max(stretch.end for stretch in batch.stretches)
        table = self._rotary.get(rope)
        if table is None or len(table) < end:
            table = rotary_table(rope, 1 << (end - 1).bit_length(), self.model.head_dim, self.dtype)
            self._rotary[rope] = table = table.to(self.weights.embedding.device)
        return table

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
        total = torch.zeros(x.shape, dtype=weight.dtype, device=x.device)
        up_units, down_units = mlp.width // 8, self.model.hidden_size // 16
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            up = weights.up[expert * up_units : (expert + 1) * up_units]
            down = weights.down[expert * down_units : (expert + 1) * down_units]
            total.index_add_(0, rows, weight[rows, places, None] * self._gated(x[rows], up, down).to(weight.dtype))
        return total.to(self.dtype)

    def _gated(self, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """One expert, or a dense MLP."""
        return self._times(activated(self._times(x, up)), down)


def activated(products: Tensor) -> Tensor:
    """SiLU of gates times their partners [tokens, width]; units of `up` pair 8 gate rows with their 8 up rows."""
    gate, linear = products.unflatten(-1, (-1, 2, 8)).unbind(-2)
    return (silu(gate) * linear).flatten(-2)


def _turn(x: Tensor, angles: Tensor, rope: Rope) -> Tensor:
    """RoPE of x [tokens, heads, head_dim]."""
    wide = accumulator(x.dtype)
    cos, sin = angles.to(wide)[:, None].unbind(-1)
    pairs = x.to(wide).unflatten(-1, (-1, 2) if rope.pairing == "interleaved" else (2, -1))
    axis = -1 if rope.pairing == "interleaved" else -2
    first, second = pairs.unbind(axis)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], axis).flatten(-2).to(x.dtype)
