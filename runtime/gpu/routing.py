"""Which tokens of a prefill meet which experts, on a card: scores, choice and groups in two launches, and the way back.

Pairs of an expert lie in whatever order they came to be counted in; nothing that is computed depends on it. Refuses the
products between.
"""

# Triton's language is not Python's, and how it is typed differs from version to version.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

from megakernel.model import RoutedMlp
from runtime.gpu.grouped import BLOCKS, Groups, most_tiles
from runtime.gpu.kernel import Kernel

_ROUTED = 16
"""Tokens that one program routes: the fewest that a matrix instruction takes."""

_PLACED = 32
"""Pairs, and blocks of pairs, that one program places."""


@dataclass(frozen=True)
class Routed:
    """Groups of pairs, where a token's lie in them (`places` [tokens, top_k] int32), and their `weights`, float32."""

    groups: Groups
    places: Tensor
    weights: Tensor


def route(x: Tensor, router: Tensor, mlp: RoutedMlp, tokens: int = BLOCKS.tokens) -> Routed:
    """The experts of tokens x [tokens, hidden], laid, by `router` [experts, hidden]; of equals the lower id.

    Blocks of the groups have up to `tokens` pairs.
    """
    count, hidden = x.shape
    pairs = count * mlp.top_k
    chosen = torch.empty(count, mlp.top_k, dtype=torch.int32, device=x.device)
    ranks, places, rows = torch.empty_like(chosen), torch.empty_like(chosen), torch.empty_like(chosen)
    weights = torch.empty_like(chosen, dtype=torch.float32)
    counts = torch.zeros(mlp.num_experts, dtype=torch.int32, device=x.device)
    tiles = torch.empty(3, most_tiles(pairs, mlp.num_experts, tokens), dtype=torch.int32, device=x.device)
    power = max(triton.next_power_of_2(mlp.num_experts), 16)
    _route(
        (-(-count // _ROUTED),),
        x, router, chosen, weights, ranks, counts, count, experts=mlp.num_experts, hidden=hidden, power=power,
        top_k=mlp.top_k, kept=triton.next_power_of_2(mlp.top_k), softmax=mlp.score == "softmax",
        renormalise=mlp.renormalise, tall=_ROUTED, depth=min(128, hidden & -hidden),
    )  # fmt: skip
    _place(
        (-(-max(pairs, tiles.shape[1]) // _PLACED),),
        chosen, ranks, counts, places, rows, tiles, pairs, tiles.shape[1], experts=mlp.num_experts, top_k=mlp.top_k,
        power=power, tall=tokens, block=_PLACED,
    )  # fmt: skip
    return Routed(Groups(mlp.num_experts, tokens, rows.view(-1), tiles), places, weights)


def combine(after: Tensor, results: Tensor, routed: Routed) -> Tensor:
    """`after` [tokens, hidden] and each token's weighted `results` [pairs, hidden], whose sum is wide and rounded."""
    tokens, hidden = after.shape
    out = torch.empty_like(after)
    _combine(
        (tokens,),
        after, results, routed.places, routed.weights, out,
        hidden=hidden, power=triton.next_power_of_2(hidden), top_k=routed.places.shape[1],
    )  # fmt: skip
    return out


@Kernel
@triton.jit(do_not_specialize=["tokens"])
def _route(
    x, router, chosen, weights, ranks, counts, tokens,
    experts: tl.constexpr, hidden: tl.constexpr, power: tl.constexpr, top_k: tl.constexpr, kept: tl.constexpr,
    softmax: tl.constexpr, renormalise: tl.constexpr, tall: tl.constexpr, depth: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * tall + tl.arange(0, tall)
    is_token = token < tokens
    expert = tl.arange(0, power)
    is_expert = expert < experts
    x_at = x + token[:, None] * hidden + tl.arange(0, depth)[None, :]
    router_at = router + expert[None, :] * hidden + tl.arange(0, depth)[:, None]
    scores = tl.zeros((tall, power), tl.float32)
    for _ in range(0, hidden, depth):
        laid = tl.load(x_at, mask=is_token[:, None], other=0.0)
        columns = tl.permute(tl.reshape(laid, [tall, depth // 32, 2, 2, 4, 2]), (0, 1, 4, 2, 3, 5))
        taken = tl.reshape(columns, [tall, depth])
        scores = tl.dot(taken, tl.load(router_at, mask=is_expert[None, :], other=0.0), scores)
        x_at += depth
        router_at += depth
    scores = tl.where(is_expert[None, :], scores, -float("inf"))
    if softmax:
        scores = tl.exp(scores - tl.max(scores, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
        scores = tl.where(is_expert[None, :], scores, -1.0)
    place = tl.arange(0, kept)
    found = tl.zeros((tall, kept), tl.float32)
    for idx in tl.static_range(top_k):
        best = tl.max(scores, 1)
        which = tl.minimum(tl.argmax(scores, 1), experts - 1)
        scores = tl.where(expert[None, :] == which[:, None], -float("inf"), scores)
        found = tl.where(place[None, :] == idx, (best if softmax else tl.sigmoid(best))[:, None], found)
        rank = tl.atomic_add(counts + which, 1, mask=is_token)
        tl.store(chosen + token * top_k + idx, which, mask=is_token)
        tl.store(ranks + token * top_k + idx, rank, mask=is_token)
    if renormalise:
        found = found / tl.sum(found, 1)[:, None]
    is_kept = is_token[:, None] & (place < top_k)[None, :]
    tl.store(weights + token[:, None] * top_k + place[None, :], found, mask=is_kept)


@Kernel
@triton.jit(do_not_specialize=["pairs", "most"])
def _place(
    chosen, ranks, counts, places, rows, tiles, pairs, most,
    experts: tl.constexpr, top_k: tl.constexpr, power: tl.constexpr, tall: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Pairs behind those of the experts before theirs, in their own order; and the blocks of every expert's pairs."""
    expert = tl.arange(0, power)
    count = tl.load(counts + expert, mask=expert < experts, other=0)
    ends = tl.cumsum(count, 0)
    begins = ends - count
    pair = tl.program_id(0) * block + tl.arange(0, block)
    is_pair = pair < pairs
    mine = tl.load(chosen + pair, mask=is_pair, other=0)
    place = _at(begins, mine, expert) + tl.load(ranks + pair, mask=is_pair, other=0)
    tl.store(places + pair, place, mask=is_pair)
    tl.store(rows + place, pair // top_k, mask=is_pair)

    blocks = (count + tall - 1) // tall
    last = tl.cumsum(blocks, 0)
    matrix = tl.sum((last[None, :] <= pair[:, None]).to(tl.int32), 1)
    begin = _at(begins, matrix, expert) + (pair - _at(last - blocks, matrix, expert)) * tall
    tl.store(tiles + pair, tl.where(matrix < experts, matrix, -1), mask=pair < most)
    tl.store(tiles + most + pair, begin, mask=pair < most)
    tl.store(tiles + 2 * most + pair, _at(ends, matrix, expert), mask=pair < most)


@triton.jit
def _at(values, index, every):
    """`values[index]`."""
    return tl.sum(tl.where(index[:, None] == every[None, :], values[None, :], 0), 1)


@Kernel
@triton.jit
def _combine(
    after, results, places, weights, out, hidden: tl.constexpr, power: tl.constexpr, top_k: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, power)
    is_there = column < hidden
    total = tl.zeros((power,), tl.float32)
    for idx in tl.static_range(top_k):
        place = tl.load(places + token * top_k + idx).to(tl.int64)
        result = tl.load(results + place * hidden + column, mask=is_there, other=0.0)
        total += tl.load(weights + token * top_k + idx) * result.to(tl.float32)
    before = tl.load(after + token * hidden + column, mask=is_there, other=0.0)
    tl.store(out + token * hidden + column, before + total.to(before.dtype), mask=is_there)
