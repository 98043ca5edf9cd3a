"""How much of a card a model takes, and how many KV pages fit beside it; says what would fit where it does not.

Pure: numbers in, numbers or a refusal out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megakernel.build import BuiltStep
from megakernel.config import ConfigError
from megakernel.model import BF16_BYTES, ModelSpec, RoutedMlp

GIB = 2**30

WORKING_BYTES = 2 * GIB
"""Of CUDA, its libraries, Triton, and what an allocator can't give back."""


@dataclass(frozen=True)
class Memory:
    """A card's, in bytes: all of it, and what nobody has taken."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class Need:
    """Bytes that a model takes whoever is served: weights, scratch of all steps and of the prefill; and of a page."""

    weights: int
    scratch: int
    page: int
    page_tokens: int

    @property
    def fixed(self) -> int:
        """All but pages."""
        return self.weights + self.scratch + WORKING_BYTES


def need(model: ModelSpec, steps: Sequence[BuiltStep], prefill_tokens: int) -> Need:
    """What these steps and chunks of so many tokens take."""
    weights = sum(buffer.bytes for buffer in steps[0].graph.buffers if buffer.read_only)
    scratch = sum(
        buffer.bytes
        for step in steps
        for buffer in step.graph.buffers
        if not buffer.read_only and not buffer.name.endswith(".kv")
    )
    page_tokens = steps[0].choices.rounding.page_tokens
    page = page_tokens * model.kv_bytes_per_token_per_layer * model.num_layers
    return Need(weights, scratch + prefill_bytes(model, prefill_tokens), page, page_tokens)


def prefill_bytes(model: ModelSpec, tokens: int) -> int:
    """Scratch of a chunk, from above: its widest layer's products, and the part of the head that is unpacked."""
    hidden, heads = model.hidden_size, model.q_size + 2 * model.kv_size
    meets = [layer.mlp.top_k if isinstance(layer.mlp, RoutedMlp) else 1 for layer in model.layers]
    widest = max(
        count * (4 * layer.mlp.width + 2 * hidden) * BF16_BYTES + 2 * count * hidden * 4
        for count, layer in zip(meets, model.layers, strict=True)
    )
    return tokens * (widest + 8 * hidden * BF16_BYTES + 12 * heads * BF16_BYTES) + 2 * 65536 * hidden * BF16_BYTES


def pages(memory: Memory, needed: Need, *, share: float, longest: int, asked: int | None, most: int) -> int:
    """KV pages of a pool: those `asked` for, or as many as fit into `share` of the card, at most `most`.

    `longest` is the most tokens of one request, for which there must be pages. ConfigError says what would fit.
    """
    taken = memory.total - memory.free
    room = int(memory.total * share) - taken
    least = -(-longest // needed.page_tokens)
    others = f"; {_gb(taken)} are taken by others: stop them, or wait" if taken > memory.total // 50 else ""
    there = f"{memory.name} has {_gb(memory.total)}, of which `gpu_memory_utilization` lets {share:.0%} be used"
    if room < needed.fixed + needed.page:
        whole = (taken + needed.fixed + least * needed.page) / memory.total
        raise ConfigError(
            f"{there}{others}. Needed: {_gb(needed.weights)} of weights and {_gb(needed.fixed - needed.weights)} of "
            f"scratch, and {_gb(least * needed.page)} of KV for one request of {longest} tokens; "
            + (f"raise `gpu_memory_utilization` to {math.ceil(100 * whole) / 100:g}, " if whole <= 1 else "")
            + "serve a smaller model, or on a larger card"
        )
    fit = (room - needed.fixed) // needed.page
    if asked is not None and asked > fit:
        raise ConfigError(
            f"{there}{others}. {asked} KV blocks take {_gb(asked * needed.page)}; beside the weights {fit} fit: lower "
            "`num_gpu_blocks` or `kv_cache_memory_bytes`"
        )
    found = asked if asked is not None else min(fit, most)
    if found < least:
        raise ConfigError(
            f"{there}{others}. One request of {longest} tokens takes {least} KV blocks of {needed.page_tokens} tokens, "
            f"there are {found}: "
            + (f"lower `max_model_len` to {found * needed.page_tokens}" if found else "none is room for a request")
            + (", or raise `num_gpu_blocks` or `kv_cache_memory_bytes`" if asked is not None else "")
        )
    return found


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
