"""How long the engine's own loop takes a step: scheduling, page tables, sampling parameters, hand-over.

    python tests/bench/engine_loop.py [--steps STEPS] [--out FILE]

The backend costs next to nothing: it returns the same tokens at once. Rows decode 8192-token contexts in pages of 64,
with a full and a windowed group. Prints one JSON line: microseconds a step at 1 and 8 rows, in the plain loop and with
the thread and an asyncio reader around it, each against 5% of the step that it serves; and what a step costs that comes
from a launch that runs ahead, the host's side of the card's backend included: a card makes the next step meanwhile.
"""

# ruff: noqa: T201 - a script reports on stdout

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from megakernel.abi import TOKEN_ENDED, TOKEN_IDLE
from runtime.engine import AsyncEngine, EngineCore
from runtime.engine.backend import Chunk, Result, Row
from runtime.gpu.ahead import Ahead
from runtime.gpu.backend import MAX_STEPS
from runtime.gpu.mailbox import Mailbox
from runtime.request import Request, Stopping
from runtime.rows import Command, Drop, Join
from runtime.sampling import SamplingParams

CONTEXT = 8192
LIMITS_US = {1: 85.0, 8: 400.0}
"""5% of a decode step of 1.7 ms at one row and 8 ms at eight."""


class Instant:
    """A backend of real sizes that computes nothing."""

    vocab_size, page_tokens, max_context_tokens = 262_144, 64, 65_536
    windows, pages = (None, 4096), (16_384, 1024)
    prefill_tokens, prefill_layers, max_steps, decodes_ahead = (256, 8192), 49, 1, False

    def __init__(self, rows: int) -> None:
        """Take so many rows."""
        self.rows = rows
        self._result = Result(tokens=(7,))

    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        return tuple(self._result for _ in chunk.spans)

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        assert steps == 1
        return (self._result,) * len(rows)


class InstantTable:
    """A device for `Ahead` whose launches are over as soon as they begin."""

    def __init__(self, rows: int, ring_steps: int = 1024) -> None:
        """Take so many rows."""
        self.mailbox = Mailbox(np.zeros((2, rows, CONTEXT // 32), np.uint32), pinned=False)
        self.ring = np.zeros((ring_steps, rows), np.uint64)
        self.next_step, self.made, self.left = 0, 0, [0] * rows

    def seat(self, joins: Mapping[int, Join]) -> None:
        self.left = [
            joins[row].end_position - joins[row].position if row in joins else 0 for row in range(len(self.left))
        ]

    def carry_out(self, row: int, command: Command) -> None:
        assert isinstance(command, Drop)
        self.left[row] = 0

    def begin(self, steps: int) -> int:
        first, self.made = self.next_step, min(steps, max(self.left))
        for step in range(first, first + self.made):
            for row, left in enumerate(self.left):
                word = TOKEN_IDLE if left <= 0 else 7 | (TOKEN_ENDED if left == 1 else 0)
                self.ring[step % len(self.ring), row] = np.uint64((step + 1) << 32 | word)
            self.left = [left - 1 for left in self.left]
        return first

    def is_running(self) -> bool:
        return False

    def finish(self) -> int:
        self.next_step += self.made
        return self.made

    def logits(self, _row: int) -> np.ndarray:
        raise NotImplementedError


class InstantAhead(Instant):
    """The same behind the card's way of decoding."""

    decodes_ahead, max_steps = True, MAX_STEPS

    def __init__(self, rows: int) -> None:
        """Take so many rows."""
        super().__init__(rows)
        self.ahead = Ahead([InstantTable(rows)])

    def prefill(self, chunk: Chunk) -> tuple[Result, ...]:
        self.ahead.land()
        return tuple(Result() for _ in chunk.spans)

    def decode(self, rows: Sequence[Row], steps: int) -> tuple[Result, ...]:
        return self.ahead.decode(rows, steps)


def requests(rows: int, steps: int) -> list[Request]:
    params = SamplingParams(temperature=1.0, top_p=0.95)
    end = frozenset({255_001})
    return [
        Request(str(row), tuple(range(row, row + CONTEXT)), params, Stopping(steps + 2, end_ids=end))
        for row in range(rows)
    ]


def plain(rows: int, steps: int, backend: type[Instant] = Instant) -> dict[str, float]:
    """Microseconds of each `EngineCore.step`."""
    core = EngineCore(backend(rows))
    for each in requests(rows, steps):
        core.submit(each)
    while any(sequence.left > 1 for sequence in core.roster.by_id.values()):
        core.step()
    spent: list[float] = []
    while core.has_work:
        begin = time.perf_counter()
        core.step()
        spent.append((time.perf_counter() - begin) * 1e6)
    spent.sort()
    return {"median_us": statistics.median(spent), "p99_us": spent[int(0.99 * len(spent))]}


async def threaded(rows: int, steps: int) -> float:
    """Microseconds a step, wall, with all streams read on the loop: an upper bound, since a real step frees the GIL.

    Prefill is counted in: readers may first be scheduled long after the first step, so they can't say when it was.
    """
    engine = AsyncEngine(EngineCore(Instant(rows)))

    async def read(request: Request) -> None:
        async for _ in engine.generate(request):
            pass

    begin = time.perf_counter()
    await asyncio.gather(*map(read, requests(rows, steps)))
    seconds = time.perf_counter() - begin
    engine.close()
    return seconds / steps * 1e6


def main() -> None:
    """Run as a script."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--steps", type=int, default=5000)
    options.add_argument("--out", type=Path)
    chosen = options.parse_args()
    cells = []
    for rows, limit in LIMITS_US.items():
        plain(rows, 200)  # warm
        cell = {"rows": rows, "limit_us": limit, **plain(rows, chosen.steps)}
        cell |= {f"ahead_{name}": value for name, value in plain(rows, chosen.steps, InstantAhead).items()}
        cell["with_thread_us"] = asyncio.run(threaded(rows, chosen.steps))
        cells.append({key: round(value, 1) for key, value in cell.items()} | {"holds": cell["median_us"] < limit})
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()[0]}
    record = {"context": CONTEXT, "steps": chosen.steps, "machine": machine, "cells": cells}
    print(json.dumps(record))
    if chosen.out:
        chosen.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
