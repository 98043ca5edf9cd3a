"""The prefill's model as a card runs it: experts as two grouped products, attention in one call for all stretches.

Only what is slow in the plain `TorchModel` is different here: a loop over experts, which waits for the host at each,
and masks of scores. Numbers differ from the plain model's by rounding.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from megakernel.model import RoutedMlp
from runtime.gpu.grouped import Groups, grouped_product
from runtime.torch_model import Stretch, TorchModel, activated
from runtime.weights import LayerWeights


class CardModel(TorchModel):
    """See `TorchModel`; weights and pools lie on the card, in bfloat16."""

    def _experts(self, mlp: RoutedMlp, weights: LayerWeights, x: Tensor, chosen: Tensor, weight: Tensor) -> Tensor:
        groups = Groups.sort(chosen.flatten(), mlp.num_experts)
        gates = grouped_product(x, groups.order // mlp.top_k, weights.up, groups)
        every = torch.arange(len(groups.order), device=x.device)
        results = grouped_product(activated(gates), every, weights.down, groups)
        places = torch.empty_like(groups.order)
        places[groups.order] = every
        of_tokens = results[places].unflatten(0, (-1, mlp.top_k)).to(weight.dtype)
        return of_tokens.mul_(weight[..., None]).sum(1).to(self.dtype)

    def _attend(self, idx: int, stretches: list[Stretch], q: Tensor) -> Tensor:
        window = self.model.layers[idx].window_tokens
        keys: list[Tensor] = []
        values: list[Tensor] = []
        queries_end, keys_end = [0], [0]
        for stretch in stretches:
            begin, own_keys, own_values = self._seen(idx, stretch, stretch.begin, stretch.end)
            keys.append(own_keys.transpose(0, 1))
            values.append(own_values.transpose(0, 1))
            queries_end.append(queries_end[-1] + len(stretch.stream))
            keys_end.append(keys_end[-1] + stretch.end - begin)
        lengths = tuple(queries_end), tuple(keys_end)
        return ragged_attention(q, torch.cat(keys), torch.cat(values), lengths, window).flatten(1)


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
