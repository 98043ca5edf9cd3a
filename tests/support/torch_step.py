"""A decode step in torch as one would write it for speed, to compare with: what a strong baseline is made of.

Q, K and V in one product, torch's scaled-dot-product attention over a contiguous KV cache (FlashAttention, which splits
long contexts), experts by one grouped product each way, or gathered: only the routed experts' rows are read, by a sum
that the compiler fuses with the gather. Shapes and positions are fixed, so that a CUDA graph holds a whole step, and
every layer is one function that `torch.compile` may take. Weights are whatever matrices it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from megakernel.model import LayerSpec, ModelSpec, Rope, RoutedMlp

Experts = Literal["grouped", "gathered"]
Times = Callable[[Tensor, Tensor], Tensor]
"""A product [rows, outputs] of activations and a matrix."""


class Matrices(NamedTuple):
    """A layer's weights: rows are outputs; experts first. `up` has all gate rows before all up rows."""

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
class Kind:
    """What layers of a kind have in common, in plain numbers that the compiler takes as constants."""

    position: int
    begin: int
    heads: tuple[int, int, int]
    head_dim: int
    eps: float
    sequential: bool
    pairing: str | None
    top_k: int
    score: str
    renormalise: bool
    experts: str
    times: Times

    @staticmethod
    def of(model: ModelSpec, spec: LayerSpec, position: int, experts: Experts, times: Times) -> Kind:
        """Of a layer at a position; a dense one has `top_k` 0."""
        mlp = spec.mlp
        routed = mlp if isinstance(mlp, RoutedMlp) else None
        return Kind(
            position=position,
            begin=max(0, position + 1 - (spec.window_tokens or position + 1)),
            heads=(model.num_heads, model.num_kv_heads, model.num_kv_heads),
            head_dim=model.head_dim,
            eps=model.norm_eps,
            sequential=model.block == "sequential",
            pairing=spec.rope.pairing if spec.rope else None,
            top_k=routed.top_k if routed else 0,
            score=routed.score if routed else "",
            renormalise=bool(routed and routed.renormalise),
            experts=experts,
            times=times,
        )


class TorchStep:
    """Steps of rows that all stand at one position."""

    def __init__(
        self,
        model: ModelSpec,
        layers: list[Matrices],
        ends: tuple[Tensor, Tensor, Tensor],
        kv: list[Tensor],
        position: int,
        *,
        experts: Experts,
        compiled: str | None = None,
    ) -> None:
        """`ends` are embedding, head and final norm; `kv`, one a layer, [2, rows, KV heads, tokens, head_dim].

        `compiled` names torch.compile's backend.
        """
        torch._dynamo.config.recompile_limit = 64  # one function has a few kinds of layers, in a few steps
        self.model, self.layers, self.kv, self.position = model, layers, kv, position
        self.embedding, self.head, self.final_norm = ends
        rows, device = kv[0].shape[1], kv[0].device
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        ropes = {spec.rope for spec in model.layers if spec.rope}
        self.angles = {rope: _angles(rope, position, model.head_dim, kv[0]) for rope in ropes}
        # one row is a stream of weights: a fused sum reads it faster than a matrix product does
        times = _sum_of_products if compiled and rows == 1 else _product

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return torch.compile(function, dynamic=False, fullgraph=True, backend=compiled) if compiled else function

        self._layers = {
            spec: wrap(partial(_layer, Kind.of(model, spec, position, experts, times))) for spec in model.layers
        }
        self._ends = wrap(partial(_ends, model.norm_eps, model.logit_scale, times))

    @torch.no_grad()
    def step(self) -> Tensor:
        """One step from `tokens`, which become the next ones; logits [rows, vocabulary]."""
        x = self.embedding[self.tokens]
        for spec, weights, kv in zip(self.model.layers, self.layers, self.kv, strict=True):
            x = self._layers[spec](weights, x, kv, self.angles[spec.rope] if spec.rope else None)
        logits, chosen = self._ends(x, self.final_norm, self.head)
        self.tokens.copy_(chosen)
        return logits


def _layer(kind: Kind, weights: Matrices, x: Tensor, kv: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
    normed = rms_norm(x, x.shape[-1:], weights.input_norm, kind.eps)
    q, k, v = kind.times(normed, weights.qkv).unflatten(-1, (-1, kind.head_dim)).split(kind.heads, dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q = rms_norm(q, q.shape[-1:], weights.q_norm, kind.eps)
        k = rms_norm(k, k.shape[-1:], weights.k_norm, kind.eps)
    if angles is not None and kind.pairing is not None:
        q, k = _turn(q, angles, kind.pairing), _turn(k, angles, kind.pairing)
    kv[:, :, :, kind.position] = torch.stack([k, v])
    seen = kv[:, :, :, kind.begin : kind.position + 1]
    attended = scaled_dot_product_attention(q[:, :, None], seen[0], seen[1], enable_gqa=True)
    after = x + kind.times(attended.flatten(1), weights.output)
    if kind.sequential:
        normed = rms_norm(after, x.shape[-1:], weights.mlp_norm, kind.eps)
    if weights.router is None:
        gate, up = kind.times(normed, weights.up[0]).chunk(2, dim=-1)
        return after + kind.times(silu(gate) * up, weights.down[0])
    logits = normed.float() @ weights.router.float().mT
    if kind.score == "softmax":
        scores, chosen = logits.softmax(-1).topk(kind.top_k, dim=-1)
    else:
        scores, chosen = logits.topk(kind.top_k, dim=-1)
        scores = scores.sigmoid()
    if kind.renormalise:
        scores = scores / scores.sum(-1, keepdim=True)
    mixed = (_gathered if kind.experts == "gathered" else _grouped)(normed, weights, chosen)
    return after + (mixed.float() * scores[..., None]).sum(1).to(x.dtype)


def _gathered(x: Tensor, weights: Matrices, chosen: Tensor) -> Tensor:
    """Outputs [rows, top_k, hidden] of each row's experts, each read where it lies."""
    pair = (weights.up[chosen].float() * x[:, None, None].float()).sum(-1).to(x.dtype)
    gate, up = pair.chunk(2, dim=-1)
    hidden = silu(gate) * up
    return (weights.down[chosen].float() * hidden[:, :, None].float()).sum(-1).to(x.dtype)


def _grouped(x: Tensor, weights: Matrices, chosen: Tensor) -> Tensor:
    """The same by grouped products: rows sorted by expert, each expert read once."""
    top_k, experts = chosen.shape[1], len(weights.up)
    ids, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(ids, torch.arange(experts, device=x.device), right=True).int()
    pair = torch._grouped_mm(x[order // top_k], weights.up.mT, offs=ends)
    gate, up = pair.chunk(2, dim=-1)
    out = torch._grouped_mm(silu(gate) * up, weights.down.mT, offs=ends)
    return torch.zeros_like(out).index_copy(0, order, out).unflatten(0, (-1, top_k))


def _ends(eps: float, scale: float, times: Times, x: Tensor, norm: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    logits = times(rms_norm(x, x.shape[-1:], norm, eps), head) * scale
    return logits, logits.argmax(-1)


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    return x @ matrix.mT


def _sum_of_products(x: Tensor, matrix: Tensor) -> Tensor:
    return (x[:, None].float() * matrix[None].float()).sum(-1).to(x.dtype)


def _angles(rope: Rope, position: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    frequency = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    angle = (position * frequency).to(like.device)
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def _turn(x: Tensor, angles: tuple[Tensor, Tensor], pairing: str) -> Tensor:
    """RoPE of x [rows, heads, head_dim]."""
    cos, sin = angles
    axis = -1 if pairing == "interleaved" else -2
    first, second = x.float().unflatten(-1, (-1, 2) if axis == -1 else (2, -1)).unbind(axis)
    return torch.stack([first * cos - second * sin, second * cos + first * sin], axis).flatten(-2).to(x.dtype)
