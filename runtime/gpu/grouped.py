"""Products of many tokens with some of many packed matrices, on a card: the experts of a prefill, in Triton.

Reads units of 16 rows where they lie, tile by tile (`runtime/weights.py`), so that no expert is unpacked: a chunk of a
thousand tokens touches all of them, and a copy would cost as much again as the product. Refuses routing: it is told
whose tokens are whose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from megakernel.tiling import TILE_COLUMNS, UNIT_ROWS


@dataclass(frozen=True)
class Blocks:
    """What one program of the grid computes: rows and columns of the result, and how it streams what it needs."""

    rows: int = 64
    columns: int = 128
    depth: int = 64
    stages: int = 4
    warps: int = 4


BLOCKS = Blocks()


@dataclass(frozen=True)
class Groups:
    """Pairs of a token and a matrix that it meets, sorted by matrix.

    `order` [pairs] are the pairs' places before, `ends` [matrices] where each matrix' pairs end.
    """

    order: Tensor
    ends: Tensor

    @staticmethod
    def sort(matrix: Tensor, matrices: int) -> Groups:
        """From each pair's matrix, [pairs] int64; without a word to the host."""
        found, order = matrix.sort(stable=True)
        every = torch.arange(matrices, device=matrix.device)
        return Groups(order, torch.searchsorted(found, every, right=True))


def grouped_product(x: Tensor, rows: Tensor, units: Tensor, groups: Groups, blocks: Blocks = BLOCKS) -> Tensor:
    """Products [pairs, matrix rows], in the order of the groups, of rows of x [tokens, columns] with their matrix.

    `rows` [pairs] says which row of `x` a pair takes; `units` [matrices * units, columns / 32, 16, 32] the matrices.
    Sums are wide, results rounded once to x's dtype.
    """
    matrices, pairs = len(groups.ends), len(rows)
    columns = units.shape[1] * TILE_COLUMNS
    height = units.shape[0] // matrices * UNIT_ROWS
    out = torch.empty(pairs, height, dtype=x.dtype, device=x.device)
    begins = torch.cat([groups.ends.new_zeros(1), groups.ends[:-1]])
    tile_ends = ((groups.ends - begins + blocks.rows - 1) // blocks.rows).cumsum(0)
    most = min(pairs, pairs // blocks.rows + matrices)
    wide = min(blocks.columns, max(UNIT_ROWS, triton.next_power_of_2(height)))
    grid = (triton.cdiv(height, wide), most)
    _product[grid](  # pyright: ignore[reportIndexIssue]
        x, rows, units, out, begins, groups.ends, tile_ends, height, matrices, x.stride(0),
        columns=columns, power=triton.next_power_of_2(matrices), tall=blocks.rows, wide=wide,
        depth=min(blocks.depth, columns), num_stages=blocks.stages, num_warps=blocks.warps,
    )  # fmt: skip
    return out


@triton.jit
def _product(
    x, rows, units, out, begins, ends, tile_ends, height, matrices, x_stride,
    columns: tl.constexpr, power: tl.constexpr, tall: tl.constexpr, wide: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    """One block of the result: pairs of one matrix x rows of that matrix."""
    tile = tl.program_id(1)
    every = tl.arange(0, power)
    before = tl.load(tile_ends + every, mask=every < matrices, other=2**62)
    matrix = tl.sum((before <= tile).to(tl.int32), 0)  # whose tiles end behind this one
    if matrix >= matrices:
        return
    last = tl.sum(tl.where(every == matrix, before, 0), 0)
    end = tl.load(ends + matrix)
    begin = tl.load(begins + matrix)
    # tiles of a matrix are counted from its last: the first may be any
    first_tile = last - (end - begin + tall - 1) // tall
    pair = begin + (tile - first_tile) * tall + tl.arange(0, tall)
    is_there = pair < end
    row = tl.load(rows + pair, mask=is_there, other=0)

    across = tl.program_id(0) * wide + tl.arange(0, wide)
    x_at = x + row[:, None] * x_stride + tl.arange(0, depth)[None, :]
    of_matrix = units + matrix.to(tl.int64) * (height * columns)
    # a unit is 16 rows; what is taken of it at once lies together
    unit = tl.program_id(0) * (wide // 16) + tl.arange(0, wide // 16)
    w_at = of_matrix + unit[:, None] * (16 * columns) + tl.arange(0, depth * 16)[None, :]
    is_unit = unit < height // 16
    total = tl.zeros((tall, wide), tl.float32)
    for _ in range(0, columns, depth):
        taken = tl.load(x_at, mask=is_there[:, None], other=0.0)
        packed = tl.load(w_at, mask=is_unit[:, None], other=0.0)
        # unit, tile, then h g t p r e of row g + 8 r and column 8 t + 4 h + 2 p + e: see runtime/weights.py
        parts = tl.reshape(packed, [wide // 16, depth // 32, 2, 8, 4, 2, 2, 2])
        weights = tl.reshape(tl.permute(parts, (1, 4, 2, 5, 7, 0, 6, 3)), [depth, wide])
        total = tl.dot(taken, weights, total)
        x_at += depth
        w_at += depth * 16
    is_row = across < height
    at = out + pair.to(tl.int64)[:, None] * height + across[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_there[:, None] & is_row[None, :])
