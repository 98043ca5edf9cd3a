"""North's decode step on a card, against what it replaces: launches, barriers, and torch. One record, all interleaved.

    python tests/bench/decode_baselines.py RECORD.json [--context 8192] [--without-compiler] [ROWS...]

- megakernel: the table that measured best, one launch a step.
- operators: the same tasks in the same lists, compiled from the same source, one launch an operator in one CUDA graph.
  A launch is the whole loop for one phase, with its ring and barriers set up anew and half a microsecond at most until
  its watch has seen the end; nothing waits, nothing runs ahead.
- barriers: the megakernel with every wait replaced by one for the whole grid (`support.ablations`), for loads as well,
  or for runs alone while weights whose address is known still load ahead.
- torch: `support.torch_step` in a CUDA graph, eager with grouped products and compiled with either kind of experts.

Random weights, the same bytes for all: torch reads as rows what the kernel reads as tiles. Rows carry different tokens.
The operators' and the barriers' logits are compared with the megakernel's, bit for bit, before anything is timed.
"""

# ruff: noqa: T201 - a script reports on stdout

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from cuda.core import LaunchConfig, launch  # pyright: ignore[reportAttributeAccessIssue]
from support import north
from support.ablations import grid_synced, operators
from support.card import best_step, chip
from support.torch_step import Matrices, TorchStep

from megakernel.abi import LAUNCH
from megakernel.build import BuiltStep
from megakernel.model import RoutedMlp
from runtime.gpu.buffers import StepBuffers, upload
from runtime.gpu.card import read_card
from runtime.gpu.compile import compile_kernel
from runtime.gpu.launch import LoadedTable
from runtime.gpu.measure import record, take
from runtime.gpu.specialize import KernelOptions, specialize
from runtime.gpu.streaming import PlanBench, first_tokens

OPTIONS = KernelOptions()
ROUNDS = 15
SPARE_TOKENS = 64
COMPILE_SECONDS = 120


class OperatorGraph:
    """A loaded table's step as one launch an operator, in a CUDA graph."""

    def __init__(self, loaded: LoadedTable, step: BuiltStep) -> None:
        """`loaded` is armed for one step, and is what its own launches would be."""
        parts = operators(step)
        self.loaded = loaded
        self._arrays = [(upload(part.offsets), upload(part.records)) for part in parts]
        records = np.repeat(loaded._record, len(parts))
        for idx, (offsets, rows) in enumerate(self._arrays):
            records["offsets"][idx], records["records"][idx] = offsets.data_ptr(), rows.data_ptr()
        self._launches = upload(records)
        spec = loaded.compiled.specialization
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=loaded.stream):
            for idx, part in enumerate(parts):
                config = LaunchConfig(grid=part.num_sms, block=spec.block_threads, shmem_size=spec.shared_bytes)
                address = self._launches.data_ptr() + idx * LAUNCH.dtype.itemsize
                launch(loaded._core_stream, config, loaded._kernel, address)
        self.launches = len(parts)

    def run_ms(self) -> float:
        """Milliseconds of a step."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.loaded.reset()
        begin.record(self.loaded.stream)
        with torch.cuda.stream(self.loaded.stream):
            self._graph.replay()
        end.record(self.loaded.stream)
        self.loaded.finish()
        return begin.elapsed_time(end)


class TorchGraph:
    """A torch step in a CUDA graph."""

    def __init__(self, step: TorchStep, tokens: torch.Tensor) -> None:
        """`tokens` are what every step begins with."""
        self.step, self.tokens = step, tokens.long()
        self.stream = torch.cuda.Stream()
        with torch.cuda.stream(self.stream):
            for _ in range(2):
                step.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            step.step()

    def run_ms(self) -> float:
        """Milliseconds of a step."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            self.step.tokens.copy_(self.tokens)
            begin.record()
            self.graph.replay()
            end.record()
        self.stream.synchronize()
        return begin.elapsed_time(end)


def as_matrices(step: BuiltStep, buffers: StepBuffers) -> tuple[list[Matrices], tuple[torch.Tensor, ...]]:
    """The step's weights as torch reads them: the same bytes, taken as rows."""
    model = step.model
    hidden = model.hidden_size

    def rows(name: str, *shape: int) -> torch.Tensor:
        return buffers.tensor(name, shape, torch.bfloat16)

    layers: list[Matrices] = []
    for idx, spec in enumerate(model.layers):
        experts = spec.mlp.num_experts if isinstance(spec.mlp, RoutedMlp) else 1
        norms = {name: buffers.constants.get(f"L{idx}.{name}") for name in ("q_norm", "k_norm")}
        layers.append(
            Matrices(
                **norms,
                input_norm=buffers.constants[f"L{idx}.input_norm"],
                mlp_norm=buffers.constants[f"L{idx}.mlp_norm"],
                qkv=rows(f"L{idx}.qkv", model.q_size + 2 * model.kv_size, hidden),
                output=rows(f"L{idx}.output", hidden, model.q_size),
                router=rows(f"L{idx}.router", experts, hidden) if isinstance(spec.mlp, RoutedMlp) else None,
                up=rows(f"L{idx}.up", experts, 2 * spec.mlp.width, hidden),
                down=rows(f"L{idx}.down", experts, hidden, spec.mlp.width),
            )
        )
    embedding = rows("embedding", model.vocab_size, hidden)
    head = embedding if model.tied_embeddings else rows("head", model.vocab_size, hidden)
    return layers, (embedding, head, buffers.constants["final_norm"])


def in_time(seconds: int, make):
    """`make()`, or what kept it from being made; a compiler that takes too long must not cost the measurement."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not ready after {seconds} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        return make()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is written down
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.alarm(0)


def measure(rows: int, context: int, *, compiler: bool) -> dict[str, object]:
    """Time everything at `rows` rows of `context` tokens."""
    position = context - 2
    step = best_step(north.model(), rows, context + SPARE_TOKENS, context)
    titles = tuple(f"counter {idx}" for idx in range(65536))
    steps = {
        "megakernel": step,
        "barriers": replace(step, table=grid_synced(step, loads_ahead=False), counter_titles=titles),
        "barriers, loads ahead": replace(step, table=grid_synced(step, loads_ahead=True), counter_titles=titles),
    }
    with ThreadPoolExecutor() as pool:
        list(
            pool.map(
                lambda each: compile_kernel(specialize(each, chip(), OPTIONS), chip().architecture), steps.values()
            )
        )
    bench = PlanBench(chip(), (position,) * rows, computes=True)
    loaded = {name: bench.load(each, OPTIONS) for name, each in steps.items()}
    expected = bench.logits(loaded["megakernel"])
    assert torch.isfinite(expected).all()
    for name in ("barriers", "barriers, loads ahead"):
        assert torch.equal(bench.logits(loaded[name]), expected), f"{name} computes something else"
    timed = {name: each.time_ms for name, each in loaded.items()}
    graph = OperatorGraph(bench.load(step, OPTIONS), step)
    graph.run_ms()
    buffers = bench._buffers[graph.loaded]
    same = torch.equal(buffers.scratch("logits", torch.float32)[:rows].cpu(), expected)
    assert same, "operators compute something else"
    timed["operators"] = graph.run_ms

    failed: dict[str, str] = {}
    layers, ends = as_matrices(step, bench._model)
    model = step.model
    shape = (2, rows, model.num_kv_heads, context, model.head_dim)
    kv = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in layers]
    kinds = [("torch, grouped experts", "grouped", None)]
    if compiler:
        kinds.append(("torch, compiled, grouped experts", "grouped", "inductor"))
    if compiler and rows == 1:
        kinds.append(("torch, compiled, gathered experts", "gathered", "inductor"))
    for name, experts, compiled in kinds:
        made = in_time(
            COMPILE_SECONDS,
            lambda experts=experts, compiled=compiled: TorchGraph(
                TorchStep(model, layers, ends, kv, position, experts=experts, compiled=compiled), first_tokens(step)
            ),
        )
        if isinstance(made, str):
            failed[name] = made
        else:
            timed[name] = made.run_ms
    taken = record(
        "baselines",
        read_card(),
        take(timed, rounds=ROUNDS),
        rows=rows,
        context=context,
        launches=graph.launches,
        torch=torch.__version__,
        **{f"no {name}": why for name, why in failed.items()},
    )
    print(f"{rows} rows, {context} tokens")
    for sample in taken.samples:
        print(f"  {sample.name:40s} {np.median(sample.ms):8.3f} ms")
    for name, why in failed.items():
        print(f"  {name}: {why}")
    return taken.model_dump(mode="json")


def main() -> None:
    """Measure and write; a number of rows that fails leaves the others' figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=int, nargs="*", default=[1])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--without-compiler", action="store_true")
    given = parser.parse_args()
    found: list[dict[str, object]] = []
    for rows in given.rows:
        found.append(measure(rows, given.context, compiler=not given.without_compiler))
        given.out.write_text(json.dumps(found, indent=1) + "\n")
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
