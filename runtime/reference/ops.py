"""Mathematics of the task kinds on one tile of eight rows, with the kernel's rounding points.

Activations and weights have the storage dtype (`x.dtype`), sums and partial results the accumulator's: float32, or
float64 for a float64 model. Products go unit by unit, 16 weight rows by 8 token rows, so that neither the cut nor the
other rows can change a sum's order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megakernel.model import Rope, RoutedMlp
from megakernel.workload import ROW_TILE
from runtime.weights import unit_rows


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Type of sums over values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last dimension; rounds the normalised value before the weight, as transformers does."""
    wide = x.to(accumulator(x.dtype))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def tile_product(unit: Tensor, x: Tensor) -> Tensor:
    """A unit [K / 32, 16, 32] times a tile [8, K] of rows: [8, 16] in the accumulator's type."""
    assert x.shape[0] == ROW_TILE, f"a tile of {x.shape[0]} rows, products take {ROW_TILE}"
    wide = accumulator(x.dtype)
    return (x.to(wide)[:, None, :] * unit_rows(unit).to(wide)[None, :, :]).sum(-1)


def rotate(x: Tensor, position: int, rope: Rope) -> Tensor:
    """RoPE of x [heads, head_dim] at `position`: float32 angles, cos and sin rounded to storage, one last rounding."""
    dim = x.shape[-1]
    frequency = 1.0 / (rope.theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim))
    angle = position * frequency
    wide = accumulator(x.dtype)
    cos, sin = angle.cos().to(x.dtype).to(wide), angle.sin().to(x.dtype).to(wide)
    if rope.pairing == "interleaved":
        first, second = x[..., 0::2].to(wide), x[..., 1::2].to(wide)
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    else:
        first, second = x[..., : dim // 2].to(wide), x[..., dim // 2 :].to(wide)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return turned.to(x.dtype)


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Partial softmax of q [heads, dim] over k, v [tokens, dim]: [heads, dim + 2] of sums, then maximum and mass.

    Probabilities are rounded to storage before they meet v, as the matrix unit wants them; their mass is not.
    """
    wide = accumulator(q.dtype)
    scores = (q.to(wide)[:, None, :] * k.to(wide)[None, :, :]).sum(-1) * scale
    peak = scores.max(dim=-1, keepdim=True).values
    mass = torch.exp(scores - peak)
    sums = (mass.to(q.dtype).to(wide)[:, :, None] * v.to(wide)[None, :, :]).sum(1)
    return torch.cat([sums, peak, mass.sum(-1, keepdim=True)], dim=-1)


def merge_chunks(partial: Tensor) -> Tensor:
    """Merge of one head's chunks [chunks, dim + 2], in ascending order: [dim] in the accumulator's type."""
    peak = partial[:, -2].max()
    total = torch.zeros_like(partial[0, :-2])
    mass = torch.zeros_like(peak)
    for chunk in partial:
        weight = torch.exp(chunk[-2] - peak)
        total = total + weight * chunk[:-2]
        mass = mass + weight * chunk[-1]
    return total / mass


def route(logits: Tensor, mlp: RoutedMlp) -> tuple[list[int], list[float]]:
    """Experts of one row in ascending order, and their scores, from router logits [experts]; ties take the lower id."""
    if mlp.score == "softmax":
        logits = torch.softmax(logits, dim=-1)
    order = torch.sort(logits, descending=True, stable=True).indices[: mlp.top_k]
    experts = torch.sort(order).values
    scores = torch.sigmoid(logits[experts]) if mlp.score == "sigmoid" else logits[experts]
    if mlp.renormalise:
        scores = scores / scores.sum()
    return [int(expert) for expert in experts], [float(score) for score in scores]


def gated(gate: Tensor, up: Tensor, dtype: torch.dtype) -> Tensor:
    """`silu(gate) * up`, each rounded to storage as transformers' modules do."""
    return torch.nn.functional.silu(gate.to(dtype)) * up.to(dtype)
