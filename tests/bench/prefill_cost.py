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
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import triton
from support import north

from runtime.engine.backend import Chunk, Row, Span, Want
from runtime.gpu.backend import GpuBackend
from runtime.gpu.grouped import Blocks, laid, product
from runtime.gpu.heads import normed
from runtime.gpu.opening import Sizes, open_card
from runtime.gpu.routing import route
from runtime.kv_pages import read
from runtime.sampling import GREEDY
from runtime.torch_model import Batch, Stretch

SWEPT = (
    Blocks(), Blocks(stages=4), Blocks(64, 128, 64, 4, 4), Blocks(128, 256, 64, 3, 8), Blocks(256, 128, 64, 3, 8),
    Blocks(128, 64, 64, 4, 4),
)  # fmt: skip
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


def sweep(backend: GpuBackend, tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a routed layer's products, by blocks."""
    model, found = backend.model, {}
    weights, mlp = model.weights.layers[1], model.model.layers[1].mlp
    x = torch.randn(tokens, model.model.hidden_size, device="cuda", dtype=torch.bfloat16)
    heads = torch.randn(tokens, model.model.q_size, device="cuda", dtype=torch.bfloat16)
    act = torch.randn(tokens * mlp.top_k, mlp.width, device="cuda", dtype=torch.bfloat16)
    for blocks in SWEPT:
        groups = route(x, weights.router, mlp, blocks.tokens).groups
        runs = {
            "qkv": partial(product, x, weights.qkv, blocks=blocks),
            "output": partial(product, heads, weights.output, plus=x, blocks=blocks),
            "up": partial(product, x, weights.up, groups, gathers=True, gated=True, blocks=blocks),
            "down": partial(product, act, weights.down, groups, blocks=blocks),
        }
        try:
            found[str(blocks)] = {name: timed(run) for name, run in runs.items()}
        except triton.runtime.errors.OutOfResources as error:  # a block takes too much shared memory
            found[str(blocks)] = {str(error): float("nan")}
    runs = {
        "route": partial(route, x, weights.router, mlp),
        "norm": partial(normed, x, weights.input_norm, 1e-6),
        "laid": partial(laid, heads),
    }
    return found | {"others": {name: timed(run) for name, run in runs.items()}}


def timed(run) -> float:
    """Of the card alone: it is kept busy until everything is queued."""
    run(), run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(9)]
    flush = torch.empty(128 * 2**20, dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(20_000_000)
    for begin, end in events:
        flush.zero_()
        begin.record(), run(), end.record()
    torch.cuda.synchronize()
    return round(statistics.median(begin.elapsed_time(end) for begin, end in events), 4)


def layers_apart(backend: GpuBackend, cuts: tuple[int, ...]) -> int:
    """Layers whose K or V is not bit for bit the same when a prompt is prefilled whole and cut."""
    tables = [span_of(backend, 1, slot).tables for slot in (0, 1)]
    text = span_of(backend, cuts[-1]).tokens
    for own, ends in zip(tables, ((0, cuts[-1]), cuts), strict=True):
        for begin, end in itertools.pairwise(ends):
            span = Span(0, text[begin:end], begin, GREEDY, Want.NOTHING, own, tables_changed=True)
            backend.prefill(Chunk((span,), (0, backend.prefill_layers)))
    pages = [torch.from_numpy(own[0].astype(np.int64)).cuda() for own in tables]
    found = 0
    for pool in backend.model.pools:
        whole, cut = (read(pool, ids, 0, cuts[-1]) for ids in pages)
        found += not torch.equal(whole, cut)
    return found


def queued_ms(backend: GpuBackend, tokens: int) -> float:
    """What the host takes to ask for a prefill, while the card has not begun with it."""
    span = span_of(backend, tokens)
    stretch = Stretch(0, tokens, tuple(map(backend._placed, span.tables)))
    ids = backend._placed(span.tokens)
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    begin = time.perf_counter()
    with torch.no_grad():
        batch = Batch(backend.model.embed(ids), [stretch])
        for layer in range(backend.prefill_layers):
            backend.model.layer(layer, batch)
    taken = 1e3 * (time.perf_counter() - begin)
    torch.cuda.synchronize()
    return taken


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
    record["prefill_ms"]["8 x 1023"] = round(
        statistics.median(prefill_ms(backend, *(span_of(backend, 1023, slot) for slot in range(8))) for _ in range(3)),
        2,
    )
    record["layers_apart"] = layers_apart(backend, (0, 1000, 1001, 4300, 5000))
    record["queued_ms"] = {tokens: round(queued_ms(backend, tokens), 2) for tokens in (64, 1023)}
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
