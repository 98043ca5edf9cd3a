"""Products of many tokens with packed matrices, on a card: all of a prefill's, those of experts grouped by expert.

Reads units of 16 rows where they lie (`runtime/weights.py`): a unit's tile is what a matrix instruction takes from
registers, lane by lane, so weights go from memory through the ring of a block's copies to the instruction as they are.
The price is that columns of the other operand stand in the order in which the instruction meets a tile's: `laid`.
Refuses routing: it is told whose tokens are whose.
"""

# Triton's language is not Python's, and how it is typed differs from version to version.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from megakernel.tiling import TILE_COLUMNS, UNIT_ROWS
from runtime.gpu.kernel import Kernel


@dataclass(frozen=True)
class Blocks:
    """What one program of the grid computes: `tokens` by `rows` of a matrix, and how it streams what it needs."""

    tokens: int = 128
    rows: int = 128
    depth: int = 64
    stages: int = 4
    warps: int = 8


BLOCKS = Blocks()


@dataclass(frozen=True)
class Groups:
    """Pairs of a token and a matrix that it meets, those of a matrix together.

    `rows` [pairs] int32 are the pairs' tokens, `tiles` [3, most] int32 blocks of up to `tokens` pairs of one matrix:
    the matrix (-1 where there is no block), its first pair, and the end of the matrix' pairs.
    """

    matrices: int
    tokens: int
    rows: Tensor
    tiles: Tensor


def most_tiles(pairs: int, matrices: int, tokens: int) -> int:
    """Blocks of `tokens` pairs that there may be, each of one matrix, however pairs fall to them."""
    return min(pairs, pairs // tokens + matrices)


def laid(x: Tensor) -> Tensor:
    """Columns [..., columns] in the order in which the matrix unit meets a tile's: 8 t + 4 h + 2 p + e at h p t e."""
    return x.unflatten(-1, (-1, 4, 2, 2, 2)).movedim(-4, -2).flatten(-5)


def product(
    x: Tensor,
    units: Tensor,
    groups: Groups | None = None,
    *,
    gathers: bool = False,
    gated: bool = False,
    plus: Tensor | None = None,
    splits: int = 1,
    blocks: Blocks = BLOCKS,
) -> Tensor:
    """Products [pairs, matrix rows] of rows of x [tokens, columns], `laid`, with their matrices; without groups one.

    `units` [matrices * splits * units, columns / splits / 32, 16, 32]; `gathers`: a pair takes the row of x that its
    group names, else x has the groups' order. `gated`: rows are pairs of a gate and what it lets through, and the
    result their activations [pairs, rows / 2], laid. `plus` [pairs, matrix rows] is added. Sums are wide, products
    rounded to x's dtype before they are gated or added to.
    """
    pairs = len(x) if groups is None else len(groups.rows)
    matrices = 1 if groups is None else groups.matrices
    tall = blocks.tokens if groups is None else groups.tokens
    columns = units.shape[1] * TILE_COLUMNS
    height = units.shape[0] // (matrices * splits) * UNIT_ROWS
    out = torch.empty(pairs, height // 2 if gated else height, dtype=x.dtype, device=x.device)
    wide = min(blocks.rows, max(UNIT_ROWS, triton.next_power_of_2(height)))
    most = -(-pairs // tall) if groups is None else groups.tiles.shape[1]
    _product(
        (-(-height // wide), most),
        x, units, groups and groups.rows, groups and groups.tiles, out, plus, pairs, most,
        height=height, columns=columns, splits=splits, gathers=gathers, gated=gated, tall=tall, wide=wide,
        depth=min(blocks.depth, columns & -columns), stages=blocks.stages, warps=blocks.warps,
    )  # fmt: skip
    return out


@Kernel
@triton.jit(do_not_specialize=["pairs", "most"])
def _product(
    x, units, rows, tiles, out, plus, pairs, most,
    height: tl.constexpr, columns: tl.constexpr, splits: tl.constexpr, gathers: tl.constexpr, gated: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """One block of the result; one that has pairs for no more than half of it is computed as half a block."""
    matrix = 0
    begin = tl.program_id(1) * tall
    end = pairs
    if tiles is not None:
        matrix = tl.load(tiles + tl.program_id(1))
        if matrix < 0:
            return
        begin = tl.load(tiles + most + tl.program_id(1))
        end = tl.load(tiles + 2 * most + tl.program_id(1))
    of_matrix = units + tl.cast(matrix, tl.int64) * (splits * height * columns)
    if end - begin > tall // 2:
        _block(x, of_matrix, rows, out, plus, begin, end, height, columns, splits, gathers, gated, tall, wide, depth)
    else:
        _block(
            x, of_matrix, rows, out, plus, begin, end, height, columns, splits, gathers, gated, tall // 2, wide, depth
        )


@triton.jit
def _block(
    x, of_matrix, rows, out, plus, begin, end,
    height: tl.constexpr, columns: tl.constexpr, splits: tl.constexpr, gathers: tl.constexpr, gated: tl.constexpr,
    tall: tl.constexpr, wide: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    pair = begin + tl.arange(0, tall)
    is_there = pair < end
    row = tl.load(rows + pair, mask=is_there, other=0) if gathers else pair
    x_at = x + row[None, :] * (splits * columns) + tl.arange(0, depth)[:, None]
    unit = tl.program_id(0) * (wide // 16) + tl.arange(0, wide // 16)
    is_unit = unit < height // 16
    total = tl.zeros((wide, tall), tl.float32)
    for split in range(splits):
        w_at = of_matrix + split * height * columns
        w_at = w_at + unit[:, None] * (16 * columns) + tl.arange(0, depth * 16)[None, :]
        for column in range(0, columns, depth):
            packed = tl.load(w_at, mask=is_unit[:, None], other=0.0)
            taken = tl.load(x_at, mask=is_there[None, :], other=0.0)
            # unit, tile, then h g t p r e of row g + 8 r and column 8 t + 4 h + 2 p + e: see runtime/weights.py
            parts = tl.reshape(packed, [wide // 16, depth // 32, 2, 8, 4, 2, 2, 2])
            weights = tl.reshape(tl.permute(parts, (0, 6, 3, 1, 2, 5, 4, 7)), [wide, depth])
            # always so; a sum that is looked at is waited for, before its registers of weights are loaded again: Triton
            # 3.6 does not see to that by itself (triton-lang/triton#9433)
            total = tl.where(column >= 0, tl.dot(weights, taken, total), total)
            x_at += depth
            w_at += depth * 16
    kind: tl.constexpr = out.dtype.element_ty
    if gated:
        halves = tl.permute(tl.reshape(total, [wide // 16, 2, 8, tall]), (0, 2, 3, 1))
        gate, linear = tl.split(halves)
        gate = gate.to(kind).to(tl.float32)
        act = (gate * tl.sigmoid(gate)).to(kind) * linear.to(kind)
        in_order = tl.permute(tl.reshape(act, [wide // 64, 4, 2, 2, 2, tall]), (0, 2, 3, 1, 4, 5))
        found = tl.trans(tl.reshape(in_order, [wide // 2, tall]))
        across = tl.program_id(0) * (wide // 2) + tl.arange(0, wide // 2)
        stride = height // 2
    else:
        found = tl.trans(total).to(kind)
        across = tl.program_id(0) * wide + tl.arange(0, wide)
        stride = height
    at = pair[:, None] * stride + across[None, :]
    mask = is_there[:, None] & (across < stride)[None, :]
    if plus is not None:
        found = tl.load(plus + at, mask=mask, other=0.0) + found
    tl.store(out + at, found, mask=mask)
