"""What a prefill and a launch cost on a card: North's geometry, drawn weights.

    python tests/bench/prefill_cost.py [--sweep] [--profile] [--out FILE]

Milliseconds of a prompt's prefill by length, of its parts at 1K (by the profiler), of the grouped products by the size
of their blocks, and of a step by how many steps a launch makes. Prints one JSON record.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import triton
from support import north

from runtime.engine.backend import Chunk, Row, Span, Want
from runtime.gpu.backend import GpuBackend
from runtime.gpu.grouped import Blocks, Groups, grouped_product
from runtime.gpu.opening import Sizes, open_card
from runtime.sampling import GREEDY

LENGTHS = (16, 64, 256, 512, 1023, 2047, 4095, 8191)


def span_of(backend: GpuBackend, tokens: int, slot: int = 0) -> Span:
    blocks = -(-16384 // backend.page_tokens)
    tables = tuple(np.arange(slot * blocks, (slot + 1) * blocks, dtype=np.int32) for _ in backend.windows)
    text = np.random.default_rng(slot).integers(1000, backend.vocab_size, tokens).tolist()
    return Span(slot, text, 0, GREEDY, Want.NOTHING, tables, tables_changed=True)


def prefill_ms(backend: GpuBackend, *spans: Span) -> float:
    begin = time.perf_counter()
    backend.prefill(Chunk(spans, (0, backend.prefill_layers)))
    return 1e3 * (time.perf_counter() - begin)


def step_ms(backend: GpuBackend, rows: int, steps: int, count: int) -> float:
    """Of a row's step, where a launch makes `steps`."""
    position, taken = 8000, []
    tokens = [7] * rows
    begin = 0.0
    for turn in range(count):
        if turn == count // 4:
            begin, taken = time.perf_counter(), []
        asked = [
            Row(slot, tokens[slot], position, GREEDY, Want.TOKEN, span_of(backend, 1, slot).tables, False)
            for slot in range(rows)
        ]
        found = backend.decode(asked, steps)
        tokens = [each.tokens[-1] for each in found]
        position += len(found[0].tokens)
        taken.append(len(found[0].tokens))
    milliseconds = 1e3 * (time.perf_counter() - begin) / sum(taken)
    backend._ahead.land()
    return milliseconds


def sweep(backend: GpuBackend, tokens: int) -> dict[str, list[float]]:
    """Milliseconds of a layer's up and down products, by blocks."""
    model, found = backend.model, {}
    weights, mlp = model.weights.layers[1], model.model.layers[1].mlp
    x = torch.randn(tokens, model.model.hidden_size, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(tokens, mlp.num_experts, device="cuda").topk(mlp.top_k).indices
    groups = Groups.sort(chosen.flatten(), mlp.num_experts)
    act = torch.randn(len(groups.order), mlp.width, device="cuda", dtype=torch.bfloat16)
    every = torch.arange(len(act), device="cuda")
    shapes = (
        *((64, 128, 64, 4, 4), (64, 128, 64, 3, 4), (64, 256, 64, 3, 8), (64, 256, 64, 3, 4), (128, 128, 64, 3, 8)),
        *((128, 128, 64, 4, 8), (64, 128, 128, 3, 4), (64, 64, 128, 4, 4), (128, 256, 64, 3, 8), (32, 128, 64, 4, 4)),
    )
    for shape in shapes:
        blocks = Blocks(*shape)
        times = []
        for run in (
            lambda blocks=blocks: grouped_product(x, groups.order // mlp.top_k, weights.up, groups, blocks),
            lambda blocks=blocks: grouped_product(act, every, weights.down, groups, blocks),
        ):
            try:
                times.append(timed(run))
            except triton.runtime.errors.OutOfResources:  # a block takes too much shared memory
                times.append(float("nan"))
        found[str(shape)] = times
    return found


def timed(run) -> float:
    run(), run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(11)]
    flush = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    taken = []
    for begin, end in itertools.pairwise(events):
        flush.zero_()
        begin.record(), run(), end.record()
        torch.cuda.synchronize()
        taken.append(begin.elapsed_time(end))
    return round(statistics.median(taken), 4)


def profiled(backend: GpuBackend) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prefill_ms(backend, span_of(backend, 1023))
    return profile.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=60)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    begin = time.perf_counter()
    opened = open_card(north.model(), None, Sizes(rows=8, max_tokens=16384))
    backend = opened.backend
    record: dict = {"start_s": round(time.perf_counter() - begin, 1), "card": opened.facts()}
    record["prefill_ms"] = {
        tokens: round(statistics.median(prefill_ms(backend, span_of(backend, tokens)) for _ in range(4)), 2)
        for tokens in LENGTHS
    }
    record["prefill_ms"]["8 x 128"] = round(
        statistics.median(prefill_ms(backend, *(span_of(backend, 128, slot) for slot in range(8))) for _ in range(3)), 2
    )
    record["step_ms"] = {
        f"{rows} rows, {steps} steps a launch": round(step_ms(backend, rows, steps, 200 // rows + 40), 4)
        for rows in (1, 8)
        for steps in (1, 8, 64)
    }
    record["gigabytes"] = round(torch.cuda.max_memory_allocated() / 1e9, 1)
    print(json.dumps(record), flush=True)
    if given.profile:
        print(profiled(backend), flush=True)
    if given.sweep:
        record["sweep_ms"] = {tokens: sweep(backend, tokens) for tokens in (1024, 4096)}
        print(json.dumps(record["sweep_ms"]), flush=True)
    if given.out:
        Path(given.out).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
