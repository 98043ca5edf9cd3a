"""Residuals to norms and projections to heads, on a card: RMS norms, RoPE, and K and V to their pages, in Triton.

Attention reads K and V of a chunk's rows one behind the other, so what is appended goes there too, and what lies in
pages from before is gathered beside it. Refuses attention itself.
"""

# Triton's language is not Python's, and how it is typed differs from version to version.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from megakernel.model import ModelSpec, Rope
from megakernel.tiling import TILE_COLUMNS
from runtime.gpu.kernel import Kernel
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
    _norm((tokens,), x, weight, out, eps, hidden=hidden, power=triton.next_power_of_2(hidden))
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
    sizes: dict[str, Any] = {
        "is_laid": dim % TILE_COLUMNS == 0, "kv_heads": kv_heads, "dim": dim, "page": pool.shape[3] * TILE,
        "tall": _TOKENS,
    }  # fmt: skip
    _append(
        (-(-len(qkv) // _TOKENS), heads + 2 * kv_heads),
        qkv, *norms, angles, pool, keys, values, places.positions, places.slots, places.at, len(qkv), model.norm_eps,
        heads=heads, power=triton.next_power_of_2(dim // 2), is_half=rope is not None and rope.pairing == "half",
        **sizes,
    )  # fmt: skip
    if places.before is not None:
        slots, at = places.before
        grid = (-(-len(slots) // _TOKENS), 2 * kv_heads)
        _gather(grid, pool, keys, values, slots, at, len(slots), power=triton.next_power_of_2(dim), **sizes)
    return qkv[:, : heads * dim].unflatten(1, (heads, dim)), keys, values


@Kernel
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


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _append(
    qkv, q_norm, k_norm, angles, pool, keys, values, positions, slots, places, tokens, eps,
    heads: tl.constexpr, power: tl.constexpr, is_half: tl.constexpr,
    is_laid: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, page: tl.constexpr, tall: tl.constexpr,
):  # fmt: skip
    """Some tokens of one head: of Q, which stays where it is, or of K or V. Halves turn, or else neighbours."""
    token = tl.program_id(0) * tall + tl.arange(0, tall)
    head = tl.program_id(1)
    column = tl.arange(0, 2 * power)
    is_dim = column < dim
    half: tl.constexpr = dim // 2
    if is_half and half < power:
        is_dim = column % power < half
        column = tl.where(column < power, column, column - power + half)
    mask = (token < tokens)[:, None] & is_dim[None, :]
    at = qkv + (token * (heads + 2 * kv_heads) + head)[:, None] * dim + column[None, :]
    whole = tl.load(at, mask=mask, other=0.0)
    if head < heads + kv_heads:
        first, second = _partners(whole, power, is_half, tall)
        if q_norm is not None:
            norm = q_norm
            if head >= heads:
                norm = k_norm
            wide = whole.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 1) / dim + eps)[:, None]
            weight = tl.load(norm + column, mask=is_dim, other=0.0)[None, :]
            first, second = _partners(weight * (wide * scale).to(whole.dtype), power, is_half, tall)
        if angles is not None:
            position = tl.load(positions + token, mask=token < tokens, other=0)
            turn = angles + position[:, None] * dim + tl.arange(0, 2 * power)[None, :]
            turns = tl.load(turn, mask=(token < tokens)[:, None] & (tl.arange(0, 2 * power) < dim)[None, :], other=0.0)
            cos, sin = _partners(turns.to(tl.float32), power, is_half=False, tall=tall)
            wide, beside = first.to(tl.float32), second.to(tl.float32)
            first = (wide * cos - beside * sin).to(first.dtype)
            second = (beside * cos + wide * sin).to(first.dtype)
        both = tl.join(first, second)
        if is_half:
            both = tl.permute(both, (0, 2, 1))
        whole = tl.reshape(both, [tall, 2 * power])
    if head < heads:
        tl.store(at, whole, mask=mask)
    else:
        kv = (head - heads) // kv_heads
        kv_head = (head - heads) % kv_heads
        in_pool = pool + _slot(slots, token, tokens, kv_head, kv, kv_heads, dim, page)
        tl.store(in_pool + _in_tile(column)[None, :], whole, mask=mask)
        place = tl.load(places + token, mask=token < tokens, other=0)
        in_row = (place * kv_heads + kv_head)[:, None] * dim
        if kv == 0:
            tl.store(keys + in_row + column[None, :], whole, mask=mask)
        else:
            tl.store(values + in_row + (_laid(column) if is_laid else column)[None, :], whole, mask=mask)


@Kernel
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
    in_row = (place * kv_heads + kv_head)[:, None] * dim
    if kv == 0:
        tl.store(keys + in_row + at[None, :], found, mask=mask)
    else:
        tl.store(values + in_row + (_laid(at) if is_laid else at)[None, :], found, mask=mask)


@triton.jit
def _partners(whole, power: tl.constexpr, is_half: tl.constexpr, tall: tl.constexpr):
    """What turns together: two tensors [tall, power]."""
    if is_half:
        pairs = tl.permute(tl.reshape(whole, [tall, 2, power]), (0, 2, 1))
    else:
        pairs = tl.reshape(whole, [tall, power, 2])
    first, second = tl.split(pairs)
    return first, second


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
