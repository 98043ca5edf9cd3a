"""Where weights and KV lie: what is packed is found again, at the place that the kernel computes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from support import north
from support.tiny_models import cohere2_moe, spec_of

from megakernel.tiling import Rounding, slice_of
from megakernel.workspace import chunk_pieces, least_copy_bytes, workspace
from runtime import kv_pages
from runtime.reference import ops
from runtime.weights import paired_units, rotary_table, row_in_place, rows_of, unit_rows, units


def test_a_unit_is_tiles_of_16_rows_by_32_columns_each_in_the_order_of_the_matrix_instruction() -> None:
    """PTX's fragment of A for m16n8k16: a0, a2 are row g, a1, a3 row g + 8; a2, a3 hold later columns than a0, a1."""
    matrix = torch.arange(48 * 96).reshape(48, 96)
    packed = units(matrix).reshape(3, 3, 2, 32, 4, 2)  # unit, tile, load, lane, register, element
    for unit, tile, load, lane, register, element in np.ndindex(*packed.shape):
        row = unit * 16 + lane // 4 + register % 2 * 8
        column = tile * 32 + lane % 4 * 8 + load * 4 + register // 2 * 2 + element
        assert packed[unit, tile, load, lane, register, element] == matrix[row, column]
    assert torch.equal(unit_rows(units(matrix)).reshape(48, 96), matrix)


def test_a_unit_of_the_up_weights_pairs_eight_gate_rows_with_theirs() -> None:
    gate, up = torch.randn(24, 64), torch.randn(24, 64)
    rows = unit_rows(paired_units(gate, up))
    assert torch.equal(rows[1, :8], gate[8:16])
    assert torch.equal(rows[1, 8:], up[8:16])


def test_kv_lies_in_tiles_of_8_tokens_by_8_dims_contiguous_per_page_and_head() -> None:
    spec = spec_of(cohere2_moe())
    pool = kv_pages.allocate(spec, 5, 16, torch.float64)
    table = torch.tensor([3, 0, 4])
    kv = torch.randn(2, spec.num_kv_heads, 40, spec.head_dim, dtype=torch.float64)
    kv_pages.write(pool, table, 0, kv)
    flat = pool.flatten()
    for which, head, token, dim in [(0, 0, 0, 0), (1, 1, 17, 9), (0, 1, 39, 15), (1, 0, 31, 3)]:
        page = int(table[token // 16])
        half = (page * spec.num_kv_heads + head) * 2 + which
        tile = half * 4 + token % 16 // 8 * 2 + dim // 8
        assert flat[tile * 64 + token % 8 * 8 + dim % 8] == kv[which, head, token, dim]
    assert torch.equal(kv_pages.read(pool, table, 5, 33), kv[:, :, 5:33])
    assert kv_pages.read(pool, table, 7, 7).shape == (2, spec.num_kv_heads, 0, spec.head_dim)


def test_pages_that_are_no_whole_tiles_are_refused() -> None:
    with pytest.raises(ValueError, match="pages of 12 tokens and heads of 16, needed multiples of 8"):
        kv_pages.allocate(spec_of(cohere2_moe()), 2, 12, torch.float32)


@pytest.mark.parametrize("position", [0, 1, 37, 4095])
def test_the_table_of_angles_turns_heads_as_the_interpreter_does(position: int) -> None:
    rope = next(layer.rope for layer in spec_of(cohere2_moe()).layers if layer.rope)
    x = torch.randn(3, 16).to(torch.bfloat16)
    cos, sin = rotary_table(rope, 4096, 16)[position].float().unbind(-1)
    first, second = x[:, 0::2].float(), x[:, 1::2].float()
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    assert torch.equal(turned.to(torch.bfloat16), ops.rotate(x, position, rope))


@pytest.mark.parametrize("columns", [32, 64, 96, 768, 2048, 3072, 4096])
@pytest.mark.parametrize("longest", [32, 128, 256])
def test_slices_are_whole_tiles_equal_and_no_longer_than_allowed(columns: int, longest: int) -> None:
    found = slice_of(columns, Rounding(slice_columns=longest))
    assert columns % found == 0
    assert found % 32 == 0
    assert found <= longest
    longer = [size for size in range(found + 32, min(longest, columns) + 1, 32) if columns % size == 0]
    assert longer == []


def test_more_rows_and_more_stages_take_more_of_the_workspace() -> None:
    choices = north.choices("hand")
    sizes = [
        workspace(north.model(), north.BUCKET.model_copy(update={"rows": rows}), choices).bytes for rows in (1, 4, 8)
    ]
    assert all(fewer < more for fewer, more in pairwise(sizes))
    deeper = choices.model_copy(update={"ring": choices.ring.model_copy(update={"stages": 25})})
    assert (
        workspace(north.model(), north.BUCKET, deeper).slice_slots
        > workspace(north.model(), north.BUCKET, choices).slice_slots
    )


def test_a_copy_holds_a_slice_a_router_row_and_a_block_of_keys() -> None:
    model = north.model()
    assert least_copy_bytes(model, Rounding()) == 16 * 256 * 2
    assert least_copy_bytes(model, Rounding(slice_columns=32)) == 32 * 128 * 2
    assert chunk_pieces(model, Rounding(), 8192) == 4
    assert chunk_pieces(model, Rounding(), 16384) == 2


def test_rows_are_found_in_units_and_changed_there() -> None:
    matrix = torch.randn(64, 96)
    packed, numbers = units(matrix), torch.tensor([0, 5, 8, 15, 16, 47, 63, 33, 7])
    assert torch.equal(rows_of(packed, numbers), matrix[numbers])
    row_in_place(packed, 47).mul_(2.0)
    matrix[47] *= 2.0
    assert torch.equal(unit_rows(packed).reshape(64, 96), matrix)
