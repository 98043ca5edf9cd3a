"""A card behind the engine: prefill in torch, decode by the kernel, both over one copy of weights and pages.

Rows are handed over call by call, and a call chains as many steps as the engine allows. Refuses masks and penalties: a
row that needs them gets its logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from runtime.engine.backend import Chunk, Result, Row, Span, Want
from runtime.gpu.decoder import Decoder
from runtime.kv_pages import layer_groups
from runtime.rows import Join
from runtime.sampling import GREEDY, NO_TOKEN, sample
from runtime.torch_model import Stretch, TorchModel


class GpuBackend:
    """See `Backend`. Sizes are those of the decoder's bucket; pages are shared by all rows."""

    def __init__(self, decoder: Decoder, *, max_steps: int = 8) -> None:
        """Take the decoder's rows and pages whole; nobody else may seat rows in it."""
        step = decoder.step
        self.decoder = decoder
        self.model = TorchModel(
            step.model, decoder.weights(), [decoder.pool(layer) for layer in range(step.model.num_layers)]
        )
        self.vocab_size, self.rows = step.model.vocab_size, step.bucket.rows
        self.page_tokens = step.choices.rounding.page_tokens
        self.windows, _ = layer_groups(step.model)
        self.pages = (decoder.pages[0].size,) * len(self.windows)
        self.max_context_tokens = min(step.bucket.max_context_tokens, step.model.max_context_tokens)
        self.prefill_tokens, self.prefill_layers, self.max_steps = (64, 2048), step.model.num_layers, max_steps
        self._unfinished: list[Stretch] = []

    @torch.no_grad()
    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        """See `Backend`; residuals wait here between the calls of a chunk that is cut by layers."""
        begin, end = chunk.layers
        if begin == 0:
            self._unfinished = [
                Stretch(self.model.embed(_on_card(span.tokens)), span.begin, tuple(map(_on_card, span.tables)))
                for span in chunk.spans
            ]
        for layer in range(begin, end):
            self.model.layer(layer, self._unfinished)
        if end < self.prefill_layers:
            return ()
        done, self._unfinished = self._unfinished, []
        found = tuple(self._result(span, stretch) for span, stretch in zip(chunk.spans, done, strict=True))
        torch.cuda.synchronize()
        return found

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        """See `Backend`."""
        self.decoder.seat({row.slot: self._join(row) for row in rows})
        made = self.decoder.run(steps)
        has_logits = any(row.want is Want.LOGITS for row in rows)
        logits = self.decoder.scratch("logits").numpy() if has_logits else np.empty(0)
        results: list[Result] = []
        for row in rows:
            match row.want:
                case Want.TOKEN:
                    # a row that drew nothing has ended: nothing of worth follows
                    tokens = (step[row.slot] for step in made)
                    results.append(Result(tokens=tuple(NO_TOKEN if token is None else token for token in tokens)))
                case Want.LOGITS:
                    results.append(Result(logits=logits[row.slot].copy()))
                case _:
                    results.append(Result())
        return tuple(results)

    def _join(self, row: Row) -> Join:
        entries = self.decoder.pages.shape[2]
        sampling = row.sampling if row.want is Want.TOKEN else GREEDY
        return Join(max(row.token, 0), row.position, sampling, pages=[table[:entries] for table in row.tables])

    def _result(self, span: Span, stretch: Stretch) -> Result:
        match span.want:
            case Want.NOTHING:
                return Result()
            case Want.ALL_LOGITS:
                return Result(logits=self.model.logits(stretch.stream).float().cpu().numpy())
            case Want.LOGITS:
                return Result(logits=self.model.logits(stretch.stream[-1:])[0].float().cpu().numpy())
            case Want.TOKEN:
                logits = self.model.logits(stretch.stream[-1:])[0].double().cpu().numpy()
                return Result(tokens=(sample(logits, span.sampling, stretch.end - 1),))


def _on_card(ids: Iterable[int] | np.ndarray) -> Tensor:
    # a window has passed what is negative: it is not read, but is indexed
    return torch.from_numpy(np.maximum(np.asarray(ids, dtype=np.int64), 0)).cuda()
