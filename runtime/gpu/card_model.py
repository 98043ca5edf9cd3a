"""The prefill's model as a card runs it: eleven launches a layer, over packed weights and pages where they lie.

Every product reads the packed tiles (`grouped.py`), experts are grouped without a word to the host (`routing.py`),
heads go to their pages as they are turned (`heads.py`), and attention is one call for all rows. Numbers differ from the
plain model's by rounding.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from megakernel.model import DenseMlp, RoutedMlp
from megakernel.tiling import TILE_COLUMNS
from runtime.gpu.grouped import laid, product
from runtime.gpu.heads import Places, append, normed
from runtime.gpu.routing import combine, route
from runtime.kv_pages import TILE
from runtime.torch_model import Batch, TorchModel
from runtime.weights import LayerWeights

KEY_BLOCK = 128
"""Keys that flash attention weighs at once: so many for heads of up to 64 dims, half as many for larger ones."""


class CardModel(TorchModel):
    """See `TorchModel`; weights and pools lie on the card, in bfloat16."""

    def layer(self, idx: int, batch: Batch) -> None:
        """See `TorchModel`."""
        model, spec, weights = self.model, self.model.layers[idx], self.weights.layers[idx]
        places = self._places(self.groups[idx], batch)
        x = normed(batch.stream, weights.input_norm, model.norm_eps)
        splits = model.hidden_size // (weights.qkv.shape[1] * weights.qkv.shape[3])
        angles = None if spec.rope is None else self._rotary_table(spec.rope, batch)
        norms = weights.q_norm, weights.k_norm
        qkv = product(x, weights.qkv, splits=splits)
        q, keys, values = append(model, spec.rope, qkv, norms, angles, self.pools[idx], places)
        attended = ragged_attention(q, keys, values, places.ends, spec.window_tokens).flatten(1)
        if model.head_dim % TILE_COLUMNS:  # else V was laid, see `append`
            attended = laid(attended)
        after = product(attended, weights.output, plus=batch.stream)
        if model.block == "sequential":
            x = normed(after, weights.mlp_norm, model.norm_eps)
        batch.stream = self._gate_and_add(spec.mlp, weights, x, after)

    def _gate_and_add(self, mlp: RoutedMlp | DenseMlp, weights: LayerWeights, x: Tensor, after: Tensor) -> Tensor:
        if isinstance(mlp, DenseMlp):
            return product(product(x, weights.up, gated=True), weights.down, plus=after)
        assert weights.router is not None
        routed = route(x, weights.router, mlp)
        act = product(x, weights.up, routed.groups, gathers=True, gated=True)
        return combine(after, product(act, weights.down, routed.groups), routed)

    def _places(self, group: int, batch: Batch) -> Places:
        """Where the batch's tokens lie in a group's pages; the same for all its layers."""
        found = batch.places.get(group)
        if found is None:
            found = batch.places[group] = self._find_places(group, batch)
        assert isinstance(found, Places)
        return found

    def _find_places(self, group: int, batch: Batch) -> Places:
        device, page_tokens = batch.stream.device, self.pools[0].shape[3] * TILE
        window = self.model.layers[self.groups.index(group)].window_tokens
        positions, slots, at, slots_before, at_before = ([] for _ in range(5))
        queries_end, keys_end = [0], [0]
        for stretch in batch.stretches:
            # from a block's begin: blocks of keys are the same then, and so are sums, wherever a prompt is cut
            window_begin = 0 if window is None else max(0, stretch.begin + 1 - window)
            first = window_begin // KEY_BLOCK * KEY_BLOCK
            seen = torch.arange(first, stretch.end, dtype=torch.int32, device=device)
            there = seen.clamp(min=window_begin)  # pages before may be others' by now
            slot = stretch.pages[group].int()[there // page_tokens] * page_tokens + there % page_tokens
            place, before = seen + (keys_end[-1] - first), stretch.begin - first
            positions.append(seen[before:])
            for parts, own in ((slots, slot[before:]), (at, place[before:])):
                parts.append(own)
            for parts, own in ((slots_before, slot[:before]), (at_before, place[:before])):
                parts.append(own)
            queries_end.append(queries_end[-1] + stretch.end - stretch.begin)
            keys_end.append(keys_end[-1] + stretch.end - first)
        before = (torch.cat(slots_before), torch.cat(at_before))
        return Places(
            positions=torch.cat(positions), slots=torch.cat(slots), at=torch.cat(at),
            before=before if len(before[0]) else None, count=keys_end[-1],
            ends=(tuple(queries_end), tuple(keys_end)),
        )  # fmt: skip


def ragged_attention(
    q: Tensor, keys: Tensor, values: Tensor, ends: tuple[tuple[int, ...], tuple[int, ...]], window: int | None
) -> Tensor:
    """Attention [queries, heads, dim] of rows that lie one behind the other, in one launch.

    Queries and keys of row i are those from `ends[0][i]`, `ends[1][i]` to the next; a row's last query stands beside
    its last key, and sees `window` keys up to it. The operation is that of torch's `varlen_attn`, whose arguments move.
    """
    most_queries, most_keys = (max(b - a for a, b in pairwise(each)) for each in ends)
    found, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
        q, keys, values, _starts(*ends[0]), _starts(*ends[1]), most_queries, most_keys,
        dropout_p=0.0, is_causal=True, return_debug_mask=False,
        window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
    return found


@lru_cache(maxsize=64)
def _starts(*ends: int) -> Tensor:
    """The same for all layers of a chunk that have the same window."""
    return torch.tensor(ends, dtype=torch.int32).pin_memory().to("cuda", non_blocking=True)
