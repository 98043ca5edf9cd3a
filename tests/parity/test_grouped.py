"""The grouped products of a prefill, on a card or in Triton's interpreter: those of torch, whatever falls to whom."""

from __future__ import annotations

import pytest
import torch

from runtime.weights import units

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or by itself")

from runtime.gpu.grouped import Blocks, Groups, grouped_product  # noqa: E402

SMALL = Blocks(rows=16, columns=32, depth=32)
MATRICES, COLUMNS = 5, 96


def packed(height: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Matrices [5, height, 96] as they are and packed."""
    matrices = torch.randn(MATRICES, height, COLUMNS)
    return matrices, torch.cat([units(matrix) for matrix in matrices])


@pytest.mark.parametrize("height", [16, 64, 80])
@pytest.mark.parametrize(
    "chosen",
    [[3], [0] * 40, [4] * 16 + [0] * 17, [0, 4, 1, 4, 0, 2] * 9, [2, 2, 2]],
    ids=["one pair", "all to the first", "whole and broken tiles", "mixed", "nobody for most"],
)
def test_pairs_meet_their_matrix(height, chosen):
    torch.manual_seed(0)
    matrices, tiles = packed(height)
    x, matrix = torch.randn(7, COLUMNS), torch.tensor(chosen)
    rows = torch.randint(0, len(x), (len(chosen),))
    groups = Groups.sort(matrix.to(DEVICE), MATRICES)
    found = grouped_product(x.to(DEVICE), rows.to(DEVICE)[groups.order], tiles.to(DEVICE), groups, SMALL).cpu()
    expected = torch.einsum("pc,phc->ph", x[rows], matrices[matrix])[groups.order.cpu()]
    # a card multiplies float32 with eleven bits
    assert torch.allclose(found, expected, atol=1e-4 if DEVICE == "cpu" else 0.05)


def test_pairs_are_sorted_by_matrix_and_keep_their_order_within_one():
    groups = Groups.sort(torch.tensor([2, 0, 2, 1, 0]), 4)
    assert groups.order.tolist() == [1, 4, 3, 0, 2]
    assert groups.ends.tolist() == [2, 3, 5, 5]
