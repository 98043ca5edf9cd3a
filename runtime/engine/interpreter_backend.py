"""A packed table, interpreted on the CPU, as a backend: what the engine does with a device, step by step and slowly.

A prompt is fed token by token through decode steps, the spans of a chunk side by side in their slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from megakernel.build import BuiltStep
from runtime.engine.backend import Chunk, Result, Row, Span, Want
from runtime.kv_pages import layer_groups
from runtime.reference import Interpreter, Memory
from runtime.sampling import GREEDY, NO_TOKEN
from runtime.weights import Weights


class InterpreterBackend:
    """See `Backend`. Rows, page and context sizes are the step's; `pages` has one entry a group of layers."""

    decodes_ahead = False

    def __init__(self, step: BuiltStep, weights: Weights, pages: tuple[int, ...], seed: int = 0) -> None:
        """`weights` are packed with the step's rounding; `seed` picks interleavings, which change nothing."""
        self.windows, _ = layer_groups(step.model)
        self.vocab_size, self.rows, self.pages = step.model.vocab_size, step.bucket.rows, pages
        self.page_tokens = step.choices.rounding.page_tokens
        self.max_context_tokens = min(step.bucket.max_context_tokens, step.model.max_context_tokens)
        self.prefill_tokens, self.prefill_layers, self.max_steps = (1, 64), 1, 1
        blocks = -(-step.bucket.max_context_tokens // self.page_tokens)
        # the largest page id says how many pages a pool needs
        tables = [torch.full((self.rows, blocks), count - 1, dtype=torch.int64) for count in pages]
        self.memory = Memory(step, weights.embedding.dtype, tables)
        self.machine = Interpreter(step.table, self.memory, weights, seed=seed)

    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        """See `Backend`."""
        found: dict[int, list[np.ndarray]] = {span.slot: [] for span in chunk.spans}
        last: dict[int, Result] = {}
        for offset in range(max(len(span.tokens) for span in chunk.spans)):
            spans = [span for span in chunk.spans if offset < len(span.tokens)]
            for span in spans:
                self._join(span, span.tokens[offset], span.begin + offset)
            self._step(span.slot for span in spans)
            for span in spans:
                last[span.slot] = self._result(span)
                if span.want is Want.ALL_LOGITS:
                    found[span.slot].append(self._logits(span.slot))
        return tuple(
            Result(logits=np.stack(found[span.slot])) if found[span.slot] else last[span.slot] for span in chunk.spans
        )

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        """See `Backend`."""
        assert steps == 1, f"{steps} steps asked for, the interpreter chains none"
        for row in rows:
            self._join(row, row.token, row.position)
        self._step(row.slot for row in rows)
        return tuple(self._result(row) for row in rows)

    def _join(self, row: Row | Span, token: int, position: int) -> None:
        for pages, table in zip(self.memory.pages, row.tables, strict=True):
            blocks = min(pages.shape[1], len(table))
            pages[row.slot, :blocks] = torch.from_numpy(table[:blocks].astype(np.int64))
        self.memory.join(row.slot, token, position, row.sampling if row.want is Want.TOKEN else GREEDY)

    def _step(self, slots: Iterable[int]) -> None:
        self.machine.step()
        for slot in slots:
            self.memory.leave(slot)

    def _logits(self, slot: int) -> np.ndarray:
        return self.memory.scratch("logits")[slot, : self.vocab_size].to(torch.float64).numpy().copy()

    def _result(self, row: Row | Span) -> Result:
        """What the row wants of the step that just ran."""
        match row.want:
            case Want.LOGITS:
                return Result(logits=self._logits(row.slot))
            case Want.TOKEN:
                is_finite = np.isfinite(self._logits(row.slot).max())
                return Result(tokens=(self.memory.tokens[row.slot] if is_finite else NO_TOKEN,))
            case _:
                return Result()
