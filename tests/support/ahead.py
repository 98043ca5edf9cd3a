"""Backends that decode ahead without a card: over scripts, and over interpreted tables."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch
from support.chained import InterpretedDevice
from support.engines import tiny
from support.tiny_models import built

from runtime.engine import ScriptedBackend
from runtime.engine.backend import Chunk, Result, Row, Want
from runtime.gpu.ahead import Ahead
from runtime.gpu.backend import GpuBackend
from runtime.kv_pages import layer_groups
from runtime.reference import Interpreter, Memory
from runtime.rows import Decodes, Pages
from runtime.sampling import GREEDY, NO_TOKEN, SamplingParams
from runtime.torch_model import TorchModel


class Bucket(InterpretedDevice):
    """A device with its logits, which makes up to three steps between two looks at it."""

    def __init__(self, machine, *, ring_steps: int = 16, seed: int = 0) -> None:
        """`seed` picks how many."""
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
        """All rows are empty."""
        self.step = SimpleNamespace(bucket=SimpleNamespace(rows=rows))
        entries = -(-backend.max_context_tokens // backend.page_tokens)
        self.pages = [torch.full((rows, entries), -1) for _ in backend.pages]
        self.tokens, self.positions, self.end_positions = [0] * rows, [0] * rows, [0] * rows
        self.active = [False] * rows
        self.stops: list[tuple[int, ...]] = [()] * rows
        self.mail: dict = {}
        self.sampling: list[SamplingParams] = [GREEDY] * rows

    def _put_pages(self, row: int, begin: int, pages: Pages) -> None:
        """What the engine has not given stays recognisable."""
        for table, ids in zip(self.pages, pages, strict=False):
            table[row, begin : begin + len(ids)] = torch.from_numpy(ids.astype(np.int64))


class ScriptedMachine:
    """Makes steps of scripted rows."""

    def __init__(self, backend: ScriptedBackend, rows: int) -> None:
        """Nothing was made."""
        self.backend, self.memory, self.step_idx = backend, ScriptedMemory(backend, rows), 0

    def step(self) -> None:
        memory, backend = self.memory, self.backend
        for row in np.flatnonzero(memory.active).tolist():
            tables = tuple(table[row].numpy().astype(np.int32) for table in memory.pages)
            position = memory.positions[row]
            backend._store(tables, position, memory.tokens[row])
            token = 0  # what a row draws that wants logits is nobody's
            if backend.place(tables, position) not in backend.silent:
                (token,) = backend._result(tables, position, memory.sampling[row], Want.TOKEN).tokens
            memory.tokens[row], memory.positions[row] = token, position + 1
            ends = memory.tokens[row] in (*memory.stops[row], NO_TOKEN)
            memory.active[row] = not ends and position + 1 < memory.end_positions[row]
        for row, command in list(memory.mail.items()):
            del memory.mail[row]
            memory.carry_out(row, command)
        self.step_idx += 1


class ScriptedBucket(Bucket):
    """A bucket of scripted rows, whose logits their backend asks for itself."""

    def logits(self, row: int) -> np.ndarray:
        del row
        return np.zeros(0)


class AheadBackend(ScriptedBackend):
    """A scripted backend whose decode steps are made ahead, over buckets of so many rows."""

    decodes_ahead = True

    def __init__(self, script, *, buckets: Sequence[int] = (1, 2, 4), seed: int = 0, **sizes) -> None:
        """`sizes` are a scripted backend's."""
        sizes = {"rows": max(buckets), "max_steps": 12} | sizes
        super().__init__(script, **sizes)
        self.tables = [ScriptedBucket(ScriptedMachine(self, rows), seed=seed) for rows in buckets]
        self.ahead = Ahead(self.tables)
        self.silent: set[tuple[int, int]] = set()

    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        self.ahead.land()
        if chunk.layers[0] == 0:
            self.ahead.forget([span.slot for span in chunk.spans])
        assert all(span.want in (Want.NOTHING, Want.ALL_LOGITS) for span in chunk.spans), "the last token is decoded"
        return super().prefill(chunk)

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        time.sleep(self.seconds)
        self.silent = {self.place(row.tables, row.position) for row in rows if row.want is Want.LOGITS}
        results = self.ahead.decode(rows, steps)
        return tuple(
            self._result(row.tables, row.position, row.sampling, row.want) if row.want is Want.LOGITS else result
            for row, result in zip(rows, results, strict=True)
        )

    def place(self, tables, position: int) -> tuple[int, int]:
        """What tells a row's step apart: where it stands, and on which page."""
        return position, int(tables[0][position // self.page_tokens])


def interpreted(family: str, buckets: Sequence[int] = (1, 3), *, pages: int = 32, seed: int = 0) -> GpuBackend:
    """The card's backend with the interpreter in place of the card: a tiny model in double precision."""
    _, spec, weights = tiny(family)
    groups, tables, pools = len(layer_groups(spec)[0]), [], []
    for rows in buckets:
        step = built(spec, rows)
        entries = 256 // step.choices.rounding.page_tokens
        # the largest page id says how many pages a pool needs
        memory = Memory(step, torch.float64, [torch.full((rows, entries), pages - 1) for _ in range(groups)])
        pools = pools or memory.kv
        memory.kv = pools
        tables.append(Bucket(Interpreter(step.table, memory, weights, seed=seed), seed=seed))
    return GpuBackend(TorchModel(spec, weights, pools), tables, max_steps=10)
