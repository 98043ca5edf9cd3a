"""Backends that decode ahead without a card: over scripts, and over interpreted tables."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from support.chained import InterpretedDevice

from runtime.engine import ScriptedBackend
from runtime.engine.backend import Chunk, Result, Row, Want
from runtime.gpu.ahead import Ahead
from runtime.reference import Memory
from runtime.rows import Decodes, Pages
from runtime.sampling import GREEDY, NO_TOKEN, SamplingParams


class Bucket(InterpretedDevice):
    """A device with its logits, which makes up to three steps between two looks at it."""

    def __init__(self, machine, *, ring_steps: int = 16, seed: int = 0) -> None:
        super().__init__(machine, ring_steps=ring_steps)
        self.rng = random.Random(seed)
        self.launches: list[int] = []

    @property
    def step(self):
        return self.memory.step

    def begin(self, steps: int) -> int:
        self.launches.append(steps)
        return super().begin(steps)

    def is_running(self) -> bool:
        return all(super(Bucket, self).is_running() for _ in range(self.rng.randrange(1, 4)))

    def logits(self, row: int) -> np.ndarray:
        return self.memory.scratch("logits")[row].numpy()


class ScriptedMemory(Decodes):
    """Rows that play a scripted backend's part, over the pages that it keeps tokens in."""

    carry_out = Memory.carry_out

    def __init__(self, backend: ScriptedBackend, rows: int) -> None:
        self.step = SimpleNamespace(bucket=SimpleNamespace(rows=rows))
        entries = -(-backend.max_context_tokens // backend.page_tokens)
        self.pages = [torch.full((rows, entries), -1) for _ in backend.pages]
        self.tokens, self.positions, self.end_positions = [0] * rows, [0] * rows, [0] * rows
        self.active = [False] * rows
        self.stops: list[tuple[int, ...]] = [()] * rows
        self.mail: dict = {}
        self.sampling: list[SamplingParams] = [GREEDY] * rows
        self._logits = torch.zeros(rows, backend.vocab_size, dtype=torch.float64)

    def _put_pages(self, row: int, begin: int, pages: Pages) -> None:
        """What the engine has not given stays recognisable."""
        for table, ids in zip(self.pages, pages, strict=False):
            table[row, begin : begin + len(ids)] = torch.from_numpy(ids.astype(np.int64))

    def scratch(self, name: str) -> torch.Tensor:
        assert name == "logits"
        return self._logits


class ScriptedMachine:
    """Makes steps of scripted rows."""

    def __init__(self, backend: ScriptedBackend, rows: int) -> None:
        self.backend, self.memory, self.step_idx = backend, ScriptedMemory(backend, rows), 0

    def step(self) -> None:
        memory, backend = self.memory, self.backend
        for row in np.flatnonzero(memory.active).tolist():
            tables = tuple(table[row].numpy().astype(np.int32) for table in memory.pages)
            position = memory.positions[row]
            backend._store(tables, position, memory.tokens[row])
            found = backend._result(tables, position, memory.sampling[row], Want.TOKEN)
            memory.tokens[row], memory.positions[row] = found.tokens[0], position + 1
            logits = backend._result(tables, position, memory.sampling[row], Want.LOGITS).logits
            memory._logits[row] = torch.from_numpy(logits)
            ends = memory.tokens[row] in (*memory.stops[row], NO_TOKEN)
            memory.active[row] = not ends and position + 1 < memory.end_positions[row]
        for row, command in list(memory.mail.items()):
            del memory.mail[row]
            memory.carry_out(row, command)
        self.step_idx += 1


class AheadBackend(ScriptedBackend):
    """A scripted backend whose decode steps are made ahead, over buckets of so many rows."""

    decodes_ahead = True

    def __init__(self, script, *, buckets: Sequence[int] = (1, 2, 4), seed: int = 0, **sizes) -> None:
        sizes = {"rows": max(buckets), "max_steps": 12} | sizes
        super().__init__(script, **sizes)
        self.tables = [Bucket(ScriptedMachine(self, rows), seed=seed) for rows in buckets]
        self.ahead = Ahead(self.tables)

    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        self.ahead.land()
        if chunk.layers[0] == 0:
            self.ahead.forget([span.slot for span in chunk.spans])
        assert all(span.want in (Want.NOTHING, Want.ALL_LOGITS) for span in chunk.spans), "the last token is decoded"
        return super().prefill(chunk)

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        return self.ahead.decode(rows, steps)
