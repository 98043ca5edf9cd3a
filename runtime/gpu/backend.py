"""A card behind the engine: prefill in torch, decode by the kernel, both over one copy of weights and pages.

The kernel takes the whole card, so a slice of prefill waits until what decodes has landed. Prompts' last tokens are the
kernel's: it draws the first answer as it draws all others. Refuses masks and penalties: a row that needs them gets its
logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from megakernel.build import BuiltStep
from runtime.engine.backend import Chunk, Result, Row, Want
from runtime.gpu.ahead import Ahead, Bucket
from runtime.kv_pages import layer_groups
from runtime.torch_model import Batch, Stretch, TorchModel

MAX_STEPS = 64
"""Of one launch. What comes between two costs a step's twentieth, and rows have pages for so many tokens ahead."""

PREFILL_TOKENS: tuple[int, int] = (4096, 8192)
"""A chunk reads nearly all experts, however short: below the first that costs more than its tokens, and a stall ends
between its layers. What the second takes of memory is in `room.py`."""


class Table(Bucket, Protocol):
    """A bucket's step on a device; a `Decoder`, or what stands for one in tests."""

    step: BuiltStep


class GpuBackend:
    """See `Backend`."""

    decodes_ahead = True

    def __init__(
        self, model: TorchModel, tables: Sequence[Table], *, rows: int | None = None, max_steps: int = MAX_STEPS
    ) -> None:
        """Take `tables`, of buckets that differ in rows and read the model's weights and pools, as one's own.

        No more than `rows` decode at once, where the largest bucket has seats for more.
        """
        self.model, self.tables = model, tables
        largest = max((table.step for table in tables), key=lambda step: step.bucket.rows)
        self.vocab_size, self.rows = model.model.vocab_size, min(largest.bucket.rows, rows or largest.bucket.rows)
        self.page_tokens = largest.choices.rounding.page_tokens
        self.windows, _ = layer_groups(model.model)
        self.pages = (len(model.pools[0]),) * len(self.windows)
        longest = min(table.step.bucket.max_context_tokens for table in tables)
        self.max_context_tokens = min(longest, model.model.max_context_tokens)
        self.prefill_tokens, self.prefill_layers, self.max_steps = PREFILL_TOKENS, model.model.num_layers, max_steps
        self._ahead = Ahead(tables)
        self._unfinished: Batch | None = None
        self._slots: list[int] = []  # of its stretches

    @torch.no_grad()
    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        """See `Backend`; residuals wait here between the calls of a chunk that is cut by layers."""
        self._ahead.land()
        begin, end = chunk.layers
        if begin == 0:
            self._ahead.forget([span.slot for span in chunk.spans])
            stretches = [Stretch(span.begin, span.end, tuple(map(self._placed, span.tables))) for span in chunk.spans]
            tokens = [token for span in chunk.spans for token in span.tokens]
            self._unfinished = Batch(self.model.embed(self._placed(tokens)), stretches)
        elif self._unfinished is not None:
            self._unfinished = self._unfinished.only([self._slots.index(span.slot) for span in chunk.spans])
        batch, self._slots = self._unfinished, [span.slot for span in chunk.spans]
        assert batch is not None, "a chunk begins with its first layer"
        for layer in range(begin, end):
            self.model.layer(layer, batch)
        if end < self.prefill_layers:
            self._wait()
            return ()
        self._unfinished = None
        found = tuple(
            Result(logits=self.model.logits(stream).float().cpu().numpy()) if span.want is Want.ALL_LOGITS else Result()
            for span, stream in zip(chunk.spans, batch.streams(), strict=True)
        )
        self._wait()
        return found

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        """See `Backend`."""
        return self._ahead.decode(rows, steps)

    def _placed(self, ids: Iterable[int] | np.ndarray) -> Tensor:
        # a window has passed what is negative: it is not read, but is indexed
        return torch.from_numpy(np.maximum(np.asarray(ids, dtype=np.int64), 0)).to(self.model.pools[0].device)

    def _wait(self) -> None:
        """The next launch runs on another stream, and slices are timed."""
        if self.model.pools[0].is_cuda:
            torch.cuda.synchronize()
