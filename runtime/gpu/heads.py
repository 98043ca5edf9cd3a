"""Residuals to norms and projections to heads, on a card: RMS norms, RoPE, and K and V to their pages, in Triton.

Attention reads K and V of a chunk's rows one behind the other, so what is appended goes there too, and what lies in
pages from before is gathered beside it. Refuses attention itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from megakernel.model import ModelSpec, Rope
from megakernel.tiling import TILE_COLUMNS
from runtime.kv_pages import TILE

_TOKENS = 16
"""Of one head, that one program turns or copies."""


@dataclass(frozen=True)
class Places:
    """Where tokens of a chunk, and those before them that they see, lie: in pages and among the keys, int32.

    `slots` [tokens] are a token's page times the page's tokens and its place in it, `at` [tokens] its place among the
    `count` keys, `positions` [tokens]. `before` are slots and places of what was appended earlier. `ends` are where
    each row's queries and keys begin, and the last ones end.
    """

    positions: Tensor
    slots: Tensor
    at: Tensor
    before: tuple[Tensor, Tensor] | None
    count: int
    ends: tuple[tuple[int, ...], tuple[int, ...]]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [tokens, hidden], columns `laid`; rounded before the weight, as transformers does."""
    tokens, hidden = x.shape
    out = torch.empty_like(x)
    launch: Any = _norm[(tokens,)]  # pyright: ignore[reportIndexIssue] - takes options besides
    launch(x, weight, out, eps, hidden=hidden, power=triton.next_power_of_2(hidden), num_warps=4)
    return out


def append(
    model: ModelSpec,
    rope: Rope | None,
    qkv: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    angles: Tensor | None,
    pool: Tensor,
    places: Places,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q [tokens, heads, head_dim], K and V [keys, KV heads, head_dim] of all that the chunk sees; it is in its pages.

    V has its columns `laid` where a head is whole tiles, and so has what attention makes of it. `qkv`
    [tokens, (heads + 2 KV heads) * head_dim] is written over; `angles` [positions, head_dim / 2, 2].
    """
    heads, kv_heads, dim = model.num_heads, model.num_kv_heads, model.head_dim
    keys, values = torch.empty(2, places.count, kv_heads, dim, dtype=qkv.dtype, device=qkv.device)
    is_laid = dim % TILE_COLUMNS == 0
    sizes = {
        "is_laid": is_laid,
        "kv_heads": kv_heads,
        "dim": dim,
        "page": pool.shape[3] * TILE,
        "tall": _TOKENS,
        "num_warps": 4,
    }
    grid = (triton.cdiv(len(qkv), _TOKENS), heads + 2 * kv_heads)
    launch: Any = _append[grid]  # pyright: ignore[reportIndexIssue]
    launch(
        qkv, *norms, angles, pool, keys, values, places.positions, places.slots, places.at, len(qkv), model.norm_eps,
        heads=heads, power=triton.next_power_of_2(dim // 2),
        is_interleaved=rope is not None and rope.pairing == "interleaved", **sizes,
    )  # fmt: skip
    if places.before is not None:
        slots, at = places.before
        copy: Any = _gather[triton.cdiv(len(slots), _TOKENS), 2 * kv_heads]  # pyright: ignore[reportIndexIssue]
        copy(pool, keys, values, slots, at, len(slots), power=triton.next_power_of_2(dim), **sizes)
    return qkv[:, : heads * dim].unflatten(1, (heads, dim)), keys, values


@triton.jit
def _norm(x, weight, out, eps, hidden: tl.constexpr, power: tl.constexpr):
    token = tl.program_id(0)
    at = tl.arange(0, power)
    is_there = at < hidden
    # of place h p t e in a tile
    column = at // 32 * 32 + at // 2 % 4 * 8 + at // 16 % 2 * 4 + at // 8 % 2 * 2 + at % 2
    found = tl.load(x + token * hidden + column, mask=is_there, other=0.0)
    wide = found.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / hidden + eps)
    weighted = tl.load(weight + column, mask=is_there, other=0.0) * (wide * scale).to(found.dtype)
    tl.store(out + token * hidden + at, weighted, mask=is_there)


@triton.jit(do_not_specialize=["tokens"])
def _append(
    qkv, q_norm, k_norm, angles, pool, keys, values, positions, slots, places, tokens, eps,
    heads: tl.constexpr, power: tl.constexpr, is_interleaved: tl.constexpr,
    is_laid: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, page: tl.constexpr, tall: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head: of Q, which stays where it is, or of K or V."""
    token = tl.program_id(0) * tall + tl.arange(0, tall)
    head = tl.program_id(1)
    pair = tl.arange(0, power)
    half: tl.constexpr = dim // 2
    mask = (token < tokens)[:, None] & (pair < half)[None, :]
    first_dim = pair * 2 if is_interleaved else pair
    second_dim = first_dim + 1 if is_interleaved else first_dim + half
    at = qkv + (token * (heads + 2 * kv_heads) + head)[:, None] * dim
    first = tl.load(at + first_dim[None, :], mask=mask, other=0.0)
    second = tl.load(at + second_dim[None, :], mask=mask, other=0.0)
    if head < heads + kv_heads:
        if q_norm is not None:
            norm = q_norm
            if head >= heads:
                norm = k_norm
            wide, beside = first.to(tl.float32), second.to(tl.float32)
            scale = tl.rsqrt((tl.sum(wide * wide, 1) + tl.sum(beside * beside, 1)) / dim + eps)[:, None]
            is_dim = pair < half
            first = tl.load(norm + first_dim, mask=is_dim, other=0.0)[None, :] * (wide * scale).to(first.dtype)
            second = tl.load(norm + second_dim, mask=is_dim, other=0.0)[None, :] * (beside * scale).to(first.dtype)
        if angles is not None:
            position = tl.load(positions + token, mask=token < tokens, other=0)
            turn = angles + position[:, None] * dim + pair[None, :] * 2
            cos = tl.load(turn, mask=mask, other=0.0).to(tl.float32)
            sin = tl.load(turn + 1, mask=mask, other=0.0).to(tl.float32)
            wide, beside = first.to(tl.float32), second.to(tl.float32)
            first = (wide * cos - beside * sin).to(first.dtype)
            second = (beside * cos + wide * sin).to(first.dtype)
    if head < heads:
        tl.store(at + first_dim[None, :], first, mask=mask)
        tl.store(at + second_dim[None, :], second, mask=mask)
    else:
        kv = (head - heads) // kv_heads
        kv_head = (head - heads) % kv_heads
        in_pool = pool + _slot(slots, token, tokens, kv_head, kv, kv_heads, dim, page)
        tl.store(in_pool + _in_tile(first_dim)[None, :], first, mask=mask)
        tl.store(in_pool + _in_tile(second_dim)[None, :], second, mask=mask)
        place = tl.load(places + token, mask=token < tokens, other=0)
        beside_others = keys
        if kv == 1:
            beside_others = values
            if is_laid:
                first_dim = _laid(first_dim)
                second_dim = _laid(second_dim)
        in_row = beside_others + (place * kv_heads + kv_head)[:, None] * dim
        tl.store(in_row + first_dim[None, :], first, mask=mask)
        tl.store(in_row + second_dim[None, :], second, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def _gather(
    pool, keys, values, slots, places, tokens, power: tl.constexpr,
    is_laid: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, page: tl.constexpr, tall: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * tall + tl.arange(0, tall)
    kv = tl.program_id(1) // kv_heads
    kv_head = tl.program_id(1) % kv_heads
    at = tl.arange(0, power)
    mask = (token < tokens)[:, None] & (at < dim)[None, :]
    in_pool = pool + _slot(slots, token, tokens, kv_head, kv, kv_heads, dim, page)
    found = tl.load(in_pool + _in_tile(at)[None, :], mask=mask, other=0.0)
    place = tl.load(places + token, mask=token < tokens, other=0)
    beside_others = keys
    if kv == 1:
        beside_others = values
        if is_laid:
            at = _laid(at)
    tl.store(beside_others + (place * kv_heads + kv_head)[:, None] * dim + at[None, :], found, mask=mask)


@triton.jit
def _slot(slots, token, tokens, head, kv, kv_heads: tl.constexpr, dim: tl.constexpr, page: tl.constexpr):
    """Where a head's first dims of tokens lie in a pool [pages, heads, K or V, tokens / 8, dims / 8, 8, 8]."""
    slot = tl.load(slots + token, mask=token < tokens, other=0).to(tl.int64)
    begin = ((slot // page * kv_heads + head) * 2 + kv) * page * dim
    return (begin + slot % page // 8 * (8 * dim) + slot % 8 * 8)[:, None]


@triton.jit
def _laid(column):
    """Where a column 8 t + 4 h + 2 p + e of a tile of weights is met."""
    return column // 32 * 32 + column // 4 % 2 * 16 + column // 2 % 2 * 8 + column // 8 % 4 * 2 + column % 2


@triton.jit
def _in_tile(at):
    """Where a dim of a token lies, from the token's first."""
    return at // 8 * 64 + at % 8
