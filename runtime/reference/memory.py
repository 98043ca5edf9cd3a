"""Device memory of one table: scratch buffers, the paged KV cache, the rows' state, and counters.

KV lies in pages (`runtime.kv_pages`): one pool a layer, and one table of page ids for each group of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megakernel.build import BuiltStep
from megakernel.workload import ROW_TILE
from runtime.kv_pages import allocate, layer_groups, read, write
from runtime.reference.ops import accumulator
from runtime.rows import Command, Decodes, Drop, Extend, Join, Pages
from runtime.sampling import GREEDY, SamplingParams

PARTIAL_RESULTS = ("router", "qkv", "partial", "logits", "best")
"""Buffers in the accumulator's type; the others are activations."""


class Memory(Decodes):
    """Buffers of `step` for a model of `dtype`; scratch starts as NaN, so that a read too early shows."""

    def __init__(self, step: BuiltStep, dtype: torch.dtype, pages: Sequence[Tensor] | None = None) -> None:
        """`pages` are the groups' tables [rows, pages a row], int64; without them, rows own consecutive pages."""
        model, bucket, rounding = step.model, step.bucket, step.choices.rounding
        self.step, self.dtype = step, dtype
        self.page_tokens = rounding.page_tokens
        pages_per_row = -(-bucket.max_context_tokens // self.page_tokens)
        windows, self.groups = layer_groups(model)
        if pages is None:
            own = torch.arange(bucket.rows * pages_per_row).reshape(bucket.rows, pages_per_row)
            pages = [own] * len(windows)
        self.pages = tuple(pages)
        counts = [int(self.pages[group].max()) + 1 for group in self.groups]
        self.kv = [allocate(model, count, self.page_tokens, dtype).fill_(float("nan")) for count in counts]
        self.tokens = [0] * bucket.rows
        self.positions = [0] * bucket.rows
        self.active = [False] * bucket.rows
        self.end_positions = [0] * bucket.rows
        self.stops: list[tuple[int, ...]] = [()] * bucket.rows
        self.mail: dict[int, Command] = {}
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

    def carry_out(self, row: int, command: Command) -> None:
        """Change a row at a step boundary; what is in `mail` is carried out where the step samples."""
        match command:
            case Join():
                self._put_pages(row, 0, command.pages or ())
                self.tokens[row], self.positions[row], self.active[row] = command.token, command.position, True
                self.sampling[row] = command.sampling
                self.end_positions[row], self.stops[row] = command.end_position, command.stops
            case Drop():
                self.active[row] = False
            case Extend():
                self._put_pages(row, command.begin, command.pages)
                self.end_positions[row] = command.end_position

    def _put_pages(self, row: int, begin: int, pages: Pages) -> None:
        for table, ids in zip(self.pages, pages, strict=False):
            # what is never read needs an id that exists, as a card loads whole chunks
            table[row, begin : begin + len(ids)] = torch.from_numpy(np.maximum(ids, 0).astype(np.int64))

    def write_kv(self, layer: int, row: int, head: int, position: int, kv: Tensor) -> None:
        """Store K and V [2, tokens, head_dim] of consecutive tokens from `position` on."""
        pool = self.kv[layer][:, head : head + 1]
        write(pool, self.pages[self.groups[layer]][row], position, kv[:, None])

    def read_kv(self, layer: int, row: int, head: int, begin: int, end: int) -> Tensor:
        """K and V [2, tokens, head_dim] of positions `begin` to `end`."""
        pool = self.kv[layer][:, head : head + 1]
        return read(pool, self.pages[self.groups[layer]][row], begin, end)[:, 0].clone()
