"""Prefill and decode of a `CpuModel` as the engine asks for them: the plainest complete backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megakernel.model import ModelSpec
from runtime.engine.backend import Chunk, Result, Row, Span, Tables, Want
from runtime.engine.cpu_model import CpuModel, Stretch
from runtime.sampling import sample
from runtime.weights import Weights


class CpuBackend:
    """See `Backend`. `pages` has one entry a group of the model's layers (`kv_pages.layer_groups`)."""

    decodes_ahead = False

    def __init__(
        self,
        model: ModelSpec,
        weights: Weights,
        *,
        rows: int = 4,
        page_tokens: int = 16,
        pages: tuple[int, ...],
        max_steps: int = 1,
    ) -> None:
        """Take `weights` as they are, in their dtype; ValueError where pages are no whole tiles."""
        self.model = CpuModel(model, weights, page_tokens, pages)
        self.vocab_size, self.max_context_tokens = model.vocab_size, model.max_context_tokens
        self.rows, self.page_tokens, self.pages = rows, page_tokens, pages
        self.windows = self.model.windows
        self.prefill_tokens, self.prefill_layers, self.max_steps = (16, 512), model.num_layers, max_steps
        self._unfinished: dict[int, Stretch] = {}

    @torch.no_grad()
    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        """See `Backend`; residuals wait here between the calls of a chunk that is cut by layers."""
        begin, end = chunk.layers
        if begin == 0:
            self._unfinished = {
                span.slot: Stretch([self.model.embed(token) for token in span.tokens], span.begin, _pages(span.tables))
                for span in chunk.spans
            }
        stretches = [self._unfinished[span.slot] for span in chunk.spans]
        for layer in range(begin, end):
            self.model.layer(layer, stretches)
        if end < self.prefill_layers:
            return ()
        self._unfinished = {}
        return tuple(self._results(chunk.spans, stretches))

    @torch.no_grad()
    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        """See `Backend`; rows run one after another, which changes nothing for them."""
        tokens = {row.slot: [row.token] for row in rows}
        results: list[Result] = []
        for step in range(steps):
            stretches = [
                # a row that drew nothing has no next token; it goes on with any, unread
                Stretch([self.model.embed(max(0, tokens[row.slot][-1]))], row.position + step, _pages(row.tables))
                for row in rows
            ]
            for layer in range(self.prefill_layers):
                self.model.layer(layer, stretches)
            results = self._results(rows, stretches)
            for row, result in zip(rows, results, strict=True):
                tokens[row.slot].extend(result.tokens)
        return tuple(
            Result(tuple(tokens[row.slot][1:]), result.logits) for row, result in zip(rows, results, strict=True)
        )

    def _results(self, rows: Sequence[Row | Span], stretches: list[Stretch]) -> list[Result]:
        """What each row wants after its stretch, through the last layer."""
        results: list[Result] = []
        head = self.model.head()
        for row, stretch in zip(rows, stretches, strict=True):
            match row.want:
                case Want.NOTHING:
                    results.append(Result())
                case Want.ALL_LOGITS:
                    results.append(Result(logits=np.stack([head(stream).numpy() for stream in stretch.stream])))
                case Want.LOGITS:
                    results.append(Result(logits=head(stretch.stream[-1]).numpy()))
                case Want.TOKEN:
                    logits = head(stretch.stream[-1]).double().numpy()
                    results.append(Result(tokens=(sample(logits, row.sampling, stretch.end - 1),)))
        return results


def _pages(tables: Tables) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(table.astype(np.int64)) for table in tables)
