"""The layout of paged KV: the only code that knows where a token's K and V lie.

One pool a layer, `[pages, KV heads, K or V, tokens / 8, head_dim / 8, 8 tokens, 8 dims]`: contiguous per page and KV
head, and inside it tiles of 8 tokens by 8 dims, 128 bytes of bfloat16 each, which the matrix unit's loads take without
bank conflicts, K as it is and V transposed. Layers with the same window form a group; a row's page ids stand in one
table a group, because layers with a window give pages back that full ones keep. Shared by kernel, prefill, engine and
tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megakernel.model import ModelSpec

TILE = 8
"""Tokens, and dims, of one tile of a page."""


def layer_groups(model: ModelSpec) -> tuple[tuple[int | None, ...], tuple[int, ...]]:
    """Windows of the groups (None: all of the context, first if present), and every layer's group."""
    windows = sorted({layer.window_tokens for layer in model.layers}, key=lambda window: window or 0)
    return tuple(windows), tuple(windows.index(layer.window_tokens) for layer in model.layers)


def allocate(
    model: ModelSpec, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Tensor:
    """One layer's pool of `pages`, all zero; ValueError where pages or heads are not whole tiles."""
    if page_tokens % TILE or model.head_dim % TILE:
        raise ValueError(f"pages of {page_tokens} tokens and heads of {model.head_dim}, needed multiples of {TILE}")
    shape = (pages, model.num_kv_heads, 2, page_tokens // TILE, model.head_dim // TILE, TILE, TILE)
    return torch.zeros(shape, dtype=dtype, device=device)


def page_bytes(model: ModelSpec, page_tokens: int, element_bytes: int = 2) -> int:
    """Bytes of one page of one layer."""
    return 2 * model.num_kv_heads * page_tokens * model.head_dim * element_bytes


def pack(tokens: Tensor) -> Tensor:
    """`[..., tokens, head_dim]` as tiles `[..., tokens / 8, head_dim / 8, 8, 8]`; tokens are whole tiles."""
    *lead, count, dim = tokens.shape
    return tokens.reshape(*lead, count // TILE, TILE, dim // TILE, TILE).transpose(-3, -2)


def unpack(tiles: Tensor) -> Tensor:
    """Tiles `[..., tokens / 8, head_dim / 8, 8, 8]` as `[..., tokens, head_dim]`."""
    *lead, rows, columns, _, _ = tiles.shape
    return tiles.transpose(-3, -2).reshape(*lead, rows * TILE, columns * TILE)


def write(pool: Tensor, pages: Tensor, begin: int, kv: Tensor) -> None:
    """Store K and V `[2, KV heads, tokens, head_dim]` of consecutive positions from `begin` on.

    `pages` [pages of the row] are its page ids, int64, on the pool's device.
    """
    positions = torch.arange(begin, begin + kv.shape[2], device=pool.device)
    page_tokens = pool.shape[3] * TILE
    page, slot = pages[positions // page_tokens], positions % page_tokens
    tiles = kv.permute(2, 1, 0, 3).unflatten(-1, (-1, TILE))  # [tokens, heads, 2, dim / 8, 8]
    pool[page, :, :, slot // TILE, :, slot % TILE] = tiles.to(pool.dtype)


def read(pool: Tensor, pages: Tensor, begin: int, end: int) -> Tensor:
    """K and V `[2, KV heads, end - begin, head_dim]` of positions `begin` to `end`."""
    page_tokens = pool.shape[3] * TILE
    if begin >= end:
        return pool.new_zeros(2, pool.shape[1], 0, pool.shape[4] * TILE)
    first, last = begin // page_tokens, (end - 1) // page_tokens
    taken = unpack(pool[pages[first : last + 1]])  # [pages, heads, 2, tokens, dim]
    whole = taken.permute(2, 1, 0, 3, 4).flatten(2, 3)
    return whole[:, :, begin - first * page_tokens : end - first * page_tokens]


def write_cache(
    cache: Iterable[tuple[Tensor, Tensor]], row: int, pools: Sequence[Tensor], pages: Sequence[Tensor], tokens: int
) -> None:
    """Store a row of a transformers cache of `tokens` tokens; `pools` and the row's `pages` are one a layer.

    `cache` is every layer's keys and values, [rows, KV heads, tokens, head_dim]. Layers with a window hold their last
    tokens only: earlier entries of their pages stay as they are.
    """
    for (keys, values), pool, table in zip(cache, pools, pages, strict=True):
        kv = torch.stack([keys[row], values[row]])
        write(pool, table, tokens - kv.shape[2], kv.to(pool.device))
