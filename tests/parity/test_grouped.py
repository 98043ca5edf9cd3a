"""The products of a prefill, on a card or in Triton's interpreter: those of torch, whatever falls to whom."""

from __future__ import annotations

import pytest
import torch

from megakernel.model import RoutedMlp
from runtime.weights import paired_units, split_units, units

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}[DEVICE]
APART = {"cuda": 0.01, "cpu": 1e-5}[DEVICE]
pytest.importorskip("triton", reason="Triton comes with CUDA builds of torch, or by itself")

from runtime.gpu.grouped import Blocks, laid, most_tiles, product  # noqa: E402
from runtime.gpu.routing import combine, route  # noqa: E402

BLOCKS = [Blocks(tokens=32, rows=64, depth=32), Blocks(tokens=16, rows=128, depth=64)]
EXPERTS, COLUMNS = 5, 96


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(DTYPE)


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    distance = (found.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert distance < APART, f"they are {distance:.6f} apart"


def test_columns_are_laid_as_a_tile_s_matrix_instruction_meets_them():
    order = laid(torch.arange(64))
    assert order[:6].tolist() == [0, 1, 8, 9, 16, 17]
    assert order[32 + 8 : 32 + 12].tolist() == [34, 35, 42, 43]
    assert sorted(order.tolist()) == list(range(64))


@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 50])
@pytest.mark.parametrize(("height", "splits"), [(16, 1), (80, 1), (192, 2)])
def test_one_matrix_for_all(tokens, height, splits, blocks):
    torch.manual_seed(0)
    matrix, x, plus = drawn(height, COLUMNS * splits), drawn(tokens, COLUMNS * splits), drawn(tokens, height)
    packed = split_units(matrix, splits).to(DEVICE)
    found = product(laid(x).to(DEVICE), packed, plus=plus.to(DEVICE), splits=splits, blocks=blocks)
    same(found, x.double() @ matrix.double().mT + plus.double())


@pytest.mark.parametrize("tokens", [1, 40])
def test_gates_meet_what_they_let_through(tokens):
    torch.manual_seed(0)
    gate, up, x = drawn(96, COLUMNS), drawn(96, COLUMNS), drawn(tokens, COLUMNS)
    found = product(laid(x).to(DEVICE), paired_units(gate, up).to(DEVICE), gated=True, blocks=BLOCKS[0])
    same(found, laid(torch.nn.functional.silu(x @ gate.mT) * (x @ up.mT)))


def chosen_by(mlp: RoutedMlp, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights [tokens, top_k], as the plain model has them."""
    scores = scores.softmax(-1) if mlp.score == "softmax" else scores
    chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, : mlp.top_k]
    weight = scores.gather(1, chosen)
    weight = weight.sigmoid() if mlp.score == "sigmoid" else weight
    return chosen, weight / weight.sum(-1, keepdim=True) if mlp.renormalise else weight


@pytest.mark.parametrize("spread", ["random", "all to the first", "ties"])
@pytest.mark.parametrize(("score", "renormalise"), [("sigmoid", False), ("softmax", True)])
@pytest.mark.parametrize("tokens", [1, 45])
def test_every_token_meets_its_experts(tokens, score, renormalise, spread):
    """Groups hold every pair once, with its own expert; products over them, combined, are the plain model's sums."""
    torch.manual_seed(1)
    mlp = RoutedMlp(kind="routed", num_experts=EXPERTS, top_k=3, width=32, score=score, renormalise=renormalise)
    x, router = drawn(tokens, COLUMNS).abs(), drawn(EXPERTS, COLUMNS)
    if spread == "all to the first":
        router = -0.05 * torch.arange(EXPERTS)[:, None].expand(EXPERTS, COLUMNS).to(DTYPE)
    elif spread == "ties":
        router = torch.zeros_like(router)
    for blocks in BLOCKS:
        routed = route(laid(x).to(DEVICE), router.to(DEVICE), mlp, blocks.tokens)
        chosen, weight = chosen_by(mlp, x.float() @ router.float().mT)
        groups, places = routed.groups, routed.places.cpu().long()
        assert sorted(places.flatten().tolist()) == list(range(3 * tokens))
        owner = torch.empty(3 * tokens, dtype=torch.long)
        owner[places] = torch.arange(tokens)[:, None].expand(-1, 3)
        assert groups.rows.cpu().tolist() == owner.tolist()
        expert_of = torch.empty(3 * tokens, dtype=torch.long)
        expert_of[places] = chosen
        seen: list[int] = []
        for matrix, begin, end in groups.tiles.cpu().T.tolist():
            if matrix >= 0:
                block = range(begin, min(begin + blocks.tokens, end))
                assert {int(expert_of[pair]) for pair in block} == {matrix}
                seen += block
        assert sorted(seen) == list(range(3 * tokens))
        assert groups.tiles.shape[1] == most_tiles(3 * tokens, EXPERTS, blocks.tokens)
        same(routed.weights, weight)

        gate, up, down = drawn(EXPERTS, 32, COLUMNS), drawn(EXPERTS, 32, COLUMNS), drawn(EXPERTS, COLUMNS, 32)
        packed = torch.cat([paired_units(*pair) for pair in zip(gate, up, strict=True)]).to(DEVICE)
        act = product(laid(x).to(DEVICE), packed, groups, gathers=True, gated=True, blocks=blocks)
        results = product(act, torch.cat([units(each) for each in down]).to(DEVICE), groups, blocks=blocks)
        after = drawn(tokens, COLUMNS)
        found = combine(after.to(DEVICE), results, routed)
        gates = torch.einsum("tc,tkwc->tkw", x.double(), gate.double()[chosen])
        lets = torch.einsum("tc,tkwc->tkw", x.double(), up.double()[chosen])
        each = torch.einsum("tkw,tkcw->tkc", torch.nn.functional.silu(gates) * lets, down.double()[chosen])
        same(found, after.double() + (each * weight.double()[..., None]).sum(1))
