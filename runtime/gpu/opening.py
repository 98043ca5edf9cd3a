"""From a model and sizes to a backend on the present card: is there a card, does it fit, weights, tables, first times.

Owns the start: what can't be served is refused here, in words, before anything is asked of the server; kernels are
compiled while nothing waits for them, and everything has run once when this returns.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megakernel.assets import asset
from megakernel.config import ConfigError
from megakernel.hardware import HardwareSpec, load_hardware
from megakernel.measurement import Card
from megakernel.model import ModelSpec
from megakernel.plan import Plan
from megakernel.tiling import Rounding
from runtime.engine.backend import Chunk, Span, Want
from runtime.gpu.backend import PREFILL_TOKENS, GpuBackend
from runtime.gpu.buckets import Served, fitting, planned
from runtime.gpu.card import read_card, reasons
from runtime.gpu.compile import compile_ahead, default_cache
from runtime.gpu.decoder import Decoder
from runtime.gpu.presence import absence, present
from runtime.gpu.room import Memory, need, pages
from runtime.gpu.specialize import KernelOptions, pages_per_row, specialize
from runtime.sampling import GREEDY
from runtime.weights import Piece

CHIP = "configs/hardware/h200.toml"

KEPT = 3
"""Times over that rows of full length fit into the pool: their own pages, and those of prompts that may come back."""


@dataclass(frozen=True)
class Sizes:
    """What is to be served: rows, the longest request, KV blocks (as many as fit without) and the share of the card.

    `block_tokens`, where it is set, is what an operator takes a table's blocks to have.
    """

    rows: int
    max_tokens: int
    blocks: int | None = None
    kv_bytes: int | None = None
    share: float = 0.9
    block_tokens: int | None = None


@dataclass(frozen=True)
class Opened:
    """A backend that has run once; `step_ms` of its tables, all rows there, in the tables' order."""

    backend: GpuBackend
    served: tuple[Served, ...]
    card: Card
    step_ms: tuple[float, ...]

    def facts(self) -> dict[str, Any]:
        """For an operator: card, blocks, scratch, and of every bucket its table and times of a step in nanoseconds."""
        return {
            "name": self.card.name,
            "driver": self.card.driver,
            "kv_blocks": self.backend.pages[0],
            "block_size": self.backend.page_tokens,
            "prefill_scratch_bytes": self.backend.model.scratch_bytes,
            "buckets": [
                each.step.bucket.model_dump()
                | {"table_digest": each.step.table.digest, "predicted_ns": each.predicted_ns}
                | {"measured_ns": round(1e6 * step_ms)}
                for each, step_ms in zip(self.served, self.step_ms, strict=True)
            ],
        }


def check_card(chip: HardwareSpec) -> Card:
    """The present card; ConfigError when there is none, or none that can run this chip's tables."""
    why = absence(present())
    if why is not None:
        raise ConfigError(f"no card can be used: {why}")
    card = read_card()
    found = reasons(
        card, num_sms=chip.num_sms, architecture=chip.architecture, shared_bytes=chip.shared_memory_per_block_bytes
    )
    if found:
        raise ConfigError(f"{card.name} can't run the kernel:\n" + "\n".join(f"  {reason}" for reason in found))
    return card


def open_card(
    model: ModelSpec, pieces: Callable[[Rounding], Iterable[Piece]] | None, sizes: Sizes, plan: Plan | None = None
) -> Opened:
    """A backend for a model whose packed `pieces` are read once, or drawn without; ConfigError: what doesn't fit."""
    chip = plan.hardware if plan else load_hardware(asset(CHIP))
    card = check_card(chip)
    rows, longest = sizes.rows, sizes.max_tokens
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise ConfigError("there is no C compiler, which Triton calls for the prefill: install gcc, or name one in CC")
    served = planned(plan, rows, longest) if plan else fitting(model, rows, longest, chip)
    page_tokens = served[0].step.choices.rounding.page_tokens
    if sizes.block_tokens not in (None, page_tokens):
        raise ConfigError(f"`block_size` is {sizes.block_tokens}; blocks of these tables have {page_tokens} tokens")
    _compile(served, chip)
    count = _pages(card, model, served, sizes)
    try:
        backend, step_ms = _loaded(model, pieces, served, chip, rows=rows, count=count)
    except torch.OutOfMemoryError:
        raise ConfigError(
            f"{card.name} had room when the start began and has none now: another process took it, which nvidia-smi "
            f"shows: stop that one, or lower `gpu_memory_utilization` from {sizes.share:g}"
        ) from None
    return Opened(backend, served, card, step_ms)


def _loaded(
    model: ModelSpec,
    pieces: Callable[[Rounding], Iterable[Piece]] | None,
    served: Sequence[Served],
    chip: HardwareSpec,
    *,
    rows: int,
    count: int,
) -> tuple[GpuBackend, tuple[float, ...]]:
    """Put weights, `count` pages and tables on the card, and run everything once: a step's milliseconds by table."""
    # the longest bucket has the longest tables of angles, which all share
    order = sorted(range(len(served)), key=lambda idx: -served[idx].step.bucket.max_context_tokens)
    weights = pieces(served[0].step.choices.rounding) if pieces else None
    first = Decoder(served[order[0]].step, chip, weights, pages=count)
    others = {idx: Decoder(served[idx].step, chip, model=first) for idx in order[1:]}
    decoders = [others.get(idx, first) for idx in range(len(served))]
    os.environ.setdefault("TRITON_CACHE_DIR", str(default_cache().with_name("triton")))
    from runtime.gpu.card_model import CardModel  # noqa: PLC0415 - Triton

    prefill = CardModel(model, first.weights(), [first.pool(layer) for layer in range(model.num_layers)])
    backend = GpuBackend(prefill, decoders, rows=rows)
    _warm(backend)
    return backend, tuple(decoder.time_ms() for decoder in decoders)


def _compile(served: Sequence[Served], chip: HardwareSpec) -> None:
    """Fill the cache of kernels, all at once."""
    compile_ahead([specialize(each.step, chip, KernelOptions()) for each in served], chip.architecture)


def _pages(card: Card, model: ModelSpec, served: Sequence[Served], sizes: Sizes) -> int:
    free, total = torch.cuda.mem_get_info()
    steps = [each.step for each in served]
    needed = need(model, steps, min(PREFILL_TOKENS[1], sizes.rows * sizes.max_tokens))
    asked = sizes.blocks
    if asked is None and sizes.kv_bytes is not None:
        asked = sizes.kv_bytes // needed.page
    most = KEPT * max(step.bucket.rows * pages_per_row(step.bucket, step.choices) for step in steps)
    memory = Memory(card.name, total, free)
    return pages(memory, needed, share=sizes.share, longest=sizes.max_tokens, asked=asked, most=most)


def _warm(backend: GpuBackend) -> None:
    """Prefill a prompt of no meaning, in parts and then whole: kernels are compiled and memory is taken meanwhile."""
    tokens = min(PREFILL_TOKENS[1], backend.max_context_tokens, backend.pages[0] * backend.page_tokens)
    blocks = -(-tokens // backend.page_tokens)
    tables = tuple(np.arange(blocks, dtype=np.int32) for _ in backend.windows)
    text = [idx % backend.vocab_size for idx in range(tokens)]
    for begin, end in ((0, tokens // 2), (tokens // 2, tokens), (0, tokens)):
        span = Span(0, text[begin:end], begin, GREEDY, Want.NOTHING, tables, tables_changed=True)
        backend.prefill(Chunk((span,), (0, backend.prefill_layers)))
