"""Device memory of one table: scratch buffers, the paged KV cache, the rows' state, and counters.

KV pages are contiguous per page and KV head: [page, KV head, K or V, token, head_dim], one pool per layer; a row's page
ids stand in one table for all layers. `write_kv` and `read_kv` are the only code that knows the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megakernel.build import BuiltStep
from megakernel.workload import ROW_TILE
from runtime.reference.ops import accumulator
from runtime.sampling import GREEDY, SamplingParams

PARTIAL_RESULTS = ("router", "qkv", "partial", "logits", "best")
"""Buffers in the accumulator's type; the others are activations."""


class Memory:
    """Buffers of `step` for a model of `dtype`; scratch starts as NaN, so that a read too early shows."""

    def __init__(self, step: BuiltStep, dtype: torch.dtype, pages: Tensor | None = None) -> None:
        """`pages` [rows, pages a row] is the page table; rows own consecutive pages unless it says otherwise."""
        model, bucket, rounding = step.model, step.bucket, step.choices.rounding
        self.step, self.dtype = step, dtype
        self.page_tokens = rounding.page_tokens
        pages_per_row = -(-bucket.max_context_tokens // self.page_tokens)
        if pages is None:
            pages = torch.arange(bucket.rows * pages_per_row).reshape(bucket.rows, pages_per_row)
        self.pages = pages
        shape = (int(pages.max()) + 1, model.num_kv_heads, 2, self.page_tokens, model.head_dim)
        self.kv = [torch.full(shape, float("nan"), dtype=dtype) for _ in model.layers]
        self.tokens = [0] * bucket.rows
        self.positions = [0] * bucket.rows
        self.active = [False] * bucket.rows
        self.sampling: list[SamplingParams] = [GREEDY] * bucket.rows
        self.buffers: dict[int, Tensor] = {}
        for idx, buffer in enumerate(step.graph.buffers):
            scratch = not buffer.read_only and buffer.name not in {"tokens", "row_state"} and ".kv" not in buffer.name
            if scratch:
                kind = accumulator(dtype) if buffer.name in PARTIAL_RESULTS else dtype
                self.buffers[idx] = torch.full(buffer.shape, float("nan"), dtype=kind)
        self.names = {buffer.name: idx for idx, buffer in enumerate(step.graph.buffers)}

    def scratch(self, name: str) -> Tensor:
        """A scratch buffer by name."""
        return self.buffers[self.names[name]]

    def tile(self, buffer: int, tile: int) -> Tensor:
        """Eight rows of an activation buffer; rows that the bucket lacks are zero."""
        rows = self.buffers[buffer][tile * ROW_TILE : (tile + 1) * ROW_TILE]
        missing = ROW_TILE - rows.shape[0]
        return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) if missing else rows

    def join(self, row: int, token: int, position: int, sampling: SamplingParams = GREEDY) -> None:
        """Activate `row`: the next step decodes `token` at `position`; its earlier KV is already in its pages."""
        self.tokens[row], self.positions[row], self.active[row] = token, position, True
        self.sampling[row] = sampling

    def leave(self, row: int) -> None:
        """Deactivate `row`."""
        self.active[row] = False

    def write_kv(self, layer: int, row: int, head: int, position: int, kv: Tensor) -> None:
        """Store K and V [2, tokens, head_dim] of consecutive tokens from `position` on."""
        for offset in range(kv.shape[1]):
            page, slot = divmod(position + offset, self.page_tokens)
            self.kv[layer][int(self.pages[row, page]), head, :, slot] = kv[:, offset]

    def read_kv(self, layer: int, row: int, head: int, begin: int, end: int) -> Tensor:
        """K and V [2, tokens, head_dim] of positions `begin` to `end`."""
        if begin >= end:
            return self.kv[layer].new_zeros(2, 0, self.kv[layer].shape[-1])
        first, last = begin // self.page_tokens, (end - 1) // self.page_tokens
        pages = [self.kv[layer][int(self.pages[row, page]), head] for page in range(first, last + 1)]
        start = first * self.page_tokens
        return torch.cat(pages, dim=1)[:, begin - start : end - start].clone()
