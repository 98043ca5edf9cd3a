"""A model in plain torch on the CPU, over the packed weights and the paged KV that the kernel uses.

Token by token: every product is one matrix by one vector, every sum's shape follows from the model and the token's
position alone, and operands lie in fresh memory. So no token's numbers depend on its neighbours, on how its prompt was
cut, or on which pages were cached: they are equal to the bit, in every dtype, as long as torch keeps its number of
threads. Rounding points are those of `runtime.reference.ops`: sums are wide, what is stored has the weights' dtype.

Weights stay packed; a layer unpacks one matrix at a time. Refuses speed: for tests, and for models that need no device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megakernel.model import LayerSpec, ModelSpec, Rope, RoutedMlp
from runtime.kv_pages import allocate, layer_groups, read, write
from runtime.reference.ops import accumulator, gated, rms_norm, route
from runtime.weights import LayerWeights, Weights, unit_rows


@dataclass
class Stretch:
    """Consecutive tokens of one row: `stream` holds each one's residual [hidden], positions run from `begin`.

    `pages` are the row's page ids, one int64 tensor a group.
    """

    stream: list[Tensor]
    begin: int
    pages: tuple[Tensor, ...]

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.begin + len(self.stream)


class CpuModel:
    """`pages[group]` pages of KV in every layer of a group, and the model's mathematics on them."""

    def __init__(self, model: ModelSpec, weights: Weights, page_tokens: int, pages: tuple[int, ...]) -> None:
        """Allocate zeroed pools in the weights' dtype; ValueError where pages are no whole tiles."""
        self.model, self.weights = model, weights
        self.dtype = weights.embedding.dtype
        self.wide = accumulator(self.dtype)
        self.windows, self.groups = layer_groups(model)
        self.kv = [allocate(model, pages[group], page_tokens, self.dtype) for group in self.groups]
        self._turns = cache(self._angles)

    def embed(self, token: int) -> Tensor:
        """First residual [hidden] of a token."""
        units, rows = self.weights.embedding, self.weights.embedding.shape[-2]
        return unit_rows(units[token // rows])[token % rows].clone()

    def head(self) -> Callable[[Tensor], Tensor]:
        """Logits [vocab], in the accumulator's type, that follow a token with some last residual [hidden]."""
        matrix = cache(lambda: self._matrix(self.weights.head))

        def logits(stream: Tensor) -> Tensor:
            x = rms_norm(stream, self.weights.final_norm, self.model.norm_eps)
            return matrix() @ x.to(self.wide) * self.model.logit_scale

        return logits

    def layer(self, idx: int, stretches: list[Stretch]) -> None:
        """Run one layer over all stretches: append their K and V, and replace their residuals."""
        spec, weights = self.model.layers[idx], self.weights.layers[idx]
        project, output = self._projection(weights), self._matrix(weights.output)
        mlp = self._mlp(spec, weights)
        for stretch in stretches:
            normed = [rms_norm(x, weights.input_norm, self.model.norm_eps) for x in stretch.stream]
            queries = self._append(idx, stretch, [project(x) for x in normed])
            for offset, (x, query) in enumerate(zip(stretch.stream, queries, strict=True)):
                attended = self._attend(idx, stretch, stretch.begin + offset, query)
                after = x + (output @ attended.to(self.wide)).to(self.dtype)
                if self.model.block == "sequential":
                    normed[offset] = rms_norm(after, weights.mlp_norm, self.model.norm_eps)
                stretch.stream[offset] = after + mlp(normed[offset])

    def _matrix(self, units: Tensor) -> Tensor:
        """Units as one matrix [rows, columns] in the accumulator's type, in fresh memory."""
        return unit_rows(units).flatten(0, -2).to(self.wide)

    def _projection(self, weights: LayerWeights) -> Callable[[Tensor], Tensor]:
        """Q, K and V of a normed token, the K splits summed in ascending order."""
        rows = self.model.q_size + 2 * self.model.kv_size
        parts = self._matrix(weights.qkv).reshape(-1, rows, weights.qkv.shape[1] * weights.qkv.shape[3]).unbind()

        def project(x: Tensor) -> Tensor:
            wide = x.to(self.wide)
            total = torch.zeros(rows, dtype=self.wide)
            for part, piece in zip(parts, wide.chunk(len(parts)), strict=True):
                total = total + part @ piece.clone()
            return total.to(self.dtype).reshape(-1, self.model.head_dim)

        return project

    def _append(self, idx: int, stretch: Stretch, projected: list[Tensor]) -> list[Tensor]:
        """Store K and V of a stretch; its queries, [heads, head_dim] each, normed and turned."""
        model, weights, rope = self.model, self.weights.layers[idx], self.model.layers[idx].rope
        heads, kv_heads = model.num_heads, model.num_kv_heads
        queries, keys, values = [], [], []
        for position, qkv in enumerate(projected, stretch.begin):
            q, k = qkv[:heads], qkv[heads : heads + kv_heads]
            if weights.q_norm is not None and weights.k_norm is not None:
                q, k = rms_norm(q, weights.q_norm, model.norm_eps), rms_norm(k, weights.k_norm, model.norm_eps)
            if rope is not None:
                q, k = self._turn(torch.cat([q, k]), position, rope).split([heads, kv_heads])
            queries.append(q)
            keys.append(k)
            values.append(qkv[heads + kv_heads :])
        kv = torch.stack([torch.stack(keys, dim=1), torch.stack(values, dim=1)])
        write(self.kv[idx], stretch.pages[self.groups[idx]], stretch.begin, kv)
        return queries

    def _angles(self, theta: float, position: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine [head_dim / 2]: float32 angles, rounded to storage."""
        dim = self.model.head_dim
        angle = position * (1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)))
        return angle.cos().to(self.dtype).to(self.wide), angle.sin().to(self.dtype).to(self.wide)

    def _turn(self, x: Tensor, position: int, rope: Rope) -> Tensor:
        """RoPE of x [heads, head_dim]."""
        cos, sin = self._turns(rope.theta, position)
        wide = x.to(self.wide)
        pairs = wide.unflatten(-1, (-1, 2)) if rope.pairing == "interleaved" else wide.unflatten(-1, (2, -1))
        dim = -1 if rope.pairing == "interleaved" else -2
        first, second = pairs.unbind(dim)
        return torch.stack([first * cos - second * sin, second * cos + first * sin], dim).flatten(-2).to(self.dtype)

    def _attend(self, idx: int, stretch: Stretch, position: int, query: Tensor) -> Tensor:
        """Attention output [heads * head_dim] of one token over what its layer lets it see."""
        window = self.model.layers[idx].window_tokens
        begin = 0 if window is None else max(0, position + 1 - window)
        seen = read(self.kv[idx], stretch.pages[self.groups[idx]], begin, position + 1)
        keys, values = seen.to(self.wide, copy=True, memory_format=torch.contiguous_format)
        q = query.to(self.wide).reshape(self.model.num_kv_heads, self.model.queries_per_kv, -1)
        scores = q @ keys.mT * self.model.head_dim**-0.5
        mass = torch.exp(scores - scores.amax(-1, keepdim=True))
        sums = mass.to(self.dtype).to(self.wide) @ values
        return (sums / mass.sum(-1, keepdim=True)).to(self.dtype).flatten()

    def _mlp(self, spec: LayerSpec, weights: LayerWeights) -> Callable[[Tensor], Tensor]:
        """The layer's MLP of one normed token; experts are unpacked when a token first picks them."""
        width = spec.mlp.width
        up_units, down_units = width // 8, self.model.hidden_size // 16

        @cache
        def expert(which: int) -> tuple[Tensor, Tensor]:
            return (
                self._matrix(weights.up[which * up_units : (which + 1) * up_units]),
                self._matrix(weights.down[which * down_units : (which + 1) * down_units]),
            )

        def one(which: int, wide: Tensor) -> Tensor:
            up, down = expert(which)
            gate, linear = (up @ wide).reshape(-1, 2, 8).unbind(1)
            return down @ gated(gate.flatten(), linear.flatten(), self.dtype).to(self.wide)

        def run(x: Tensor) -> Tensor:
            wide = x.to(self.wide)
            if not isinstance(spec.mlp, RoutedMlp):
                return one(0, wide).to(self.dtype)
            assert router is not None
            total = torch.zeros(self.model.hidden_size, dtype=self.wide)
            for which, score in zip(*route(router @ wide, spec.mlp), strict=True):
                total = total + score * one(which, wide)
            return total.to(self.dtype)

        router = None if weights.router is None else weights.router.to(self.wide)
        return run
