"""Puts a checkpoint folder on an engine: weights, KV pages, thread. Takes as long as reading the weights does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from megakernel.config import ConfigError
from megakernel.model import ModelSpec
from megakernel.tiling import Rounding
from runtime.engine import AsyncEngine, EngineCore, EngineSettings
from runtime.engine.backend import Backend
from runtime.kv_pages import TILE, layer_groups, page_bytes
from runtime.server.config import ServeConfig
from runtime.server.plan import prove
from runtime.server.service import Service, TextSide

_ELEMENT_BYTES = 4  # the CPU's model runs in float32

CARD_TOKENS = 16384
"""Longest prompt and answer together on a card: page tables and partial results are sized for it."""

WINDOW_TAILS = 3
"""Windows a row that a windowed group holds: the row's own, and those of conversations that may come back."""


def load_engine(folder: Path, service: Service, *, on_card: bool = False) -> AsyncEngine:
    """Return a running engine, on the CPU or on the present card, for a service that has none yet.

    ConfigError when folder, plan, sizes or card don't fit.
    """
    config, text, metrics = service.config, service.text, service.metrics
    if service.plan is not None:
        prove(service.plan, str(config.plan))
    backend = _card_backend(folder, config, text) if on_card else _cpu_backend(folder, config, text)
    template = text.template.source if text.template else ""
    settings = EngineSettings(
        model=text.names[0],
        tokenizer=text.tokenizer.digest + template,
        max_waiting=config.max_waiting,
        prefix_cache=config.enable_prefix_caching,
    )
    engine = AsyncEngine(EngineCore(backend, settings, metrics))
    metrics.watch(engine.stats, block_size=backend.page_tokens, num_blocks=sum(backend.pages))
    return engine


def has_card() -> bool:
    """Whether torch sees a card, and what launches kernels on it is installed."""
    import torch  # noqa: PLC0415 - heavy, and only a loaded model needs it

    return torch.cuda.is_available() and importlib.util.find_spec("cuda") is not None


def _cpu_backend(folder: Path, config: ServeConfig, text: TextSide) -> Backend:
    import torch  # noqa: PLC0415 - heavy, and only a loaded model needs it

    from runtime.engine.checkpoint import load_checkpoint  # noqa: PLC0415
    from runtime.engine.cpu_backend import CpuBackend  # noqa: PLC0415

    if config.block_size % TILE:
        raise ConfigError(f"`block_size` is {config.block_size}; needed: a multiple of {TILE}")
    model, weights = load_checkpoint(folder, Rounding(), torch.float32)
    pages = page_counts(model, config, text.max_model_len)
    return CpuBackend(model, weights, rows=config.max_num_seqs, page_tokens=config.block_size, pages=pages)


def _card_backend(folder: Path, config: ServeConfig, text: TextSide) -> Backend:
    from runtime.gpu.opening import open_backend  # noqa: PLC0415 - the compiler, and a card

    return open_backend(folder, rows=config.max_num_seqs, max_tokens=min(text.max_model_len, CARD_TOKENS))


def page_counts(model: ModelSpec, config: ServeConfig, max_model_len: int) -> tuple[int, ...]:
    """Return how many pages each group of layers gets: enough for every row, as far as the memory for KV goes.

    Windowed groups get a few times what their windows can touch, so that tails of ended requests stay cached beside
    busy rows, and the rest goes to the group that sees all of the context. One row of full length must fit, else
    ConfigError.
    """
    windows, group_of = layer_groups(model)
    rows, block = config.max_num_seqs, config.block_size
    layers = [sum(group == each for each in group_of) for group in range(len(windows))]
    row_blocks = [-(-min(window + block, max_model_len) // block) + 1 if window else -(-max_model_len // block)
                  for window in windows]  # fmt: skip
    if config.num_gpu_blocks is not None:
        return tuple(config.num_gpu_blocks if window is None else WINDOW_TAILS * rows * each
                     for window, each in zip(windows, row_blocks, strict=True))  # fmt: skip
    cost = [count * page_bytes(model, block, _ELEMENT_BYTES) for count in layers]
    left = config.kv_cache_memory_bytes
    counts = [0] * len(windows)
    for group in sorted(range(len(windows)), key=lambda each: windows[each] is None):  # windows first
        tails = WINDOW_TAILS if windows[group] is not None else 1
        # what one request needs in the groups still to come is not given away
        waiting = [each for each in range(len(windows)) if each != group and not counts[each]]
        others = sum(row_blocks[each] * cost[each] for each in waiting)
        counts[group] = max(min(tails * rows * row_blocks[group], (left - others) // cost[group]), 0)
        left -= counts[group] * cost[group]
        if counts[group] < row_blocks[group]:
            raise ConfigError(
                f"`kv_cache_memory_bytes` is {config.kv_cache_memory_bytes}, too little for one request of "
                f"{max_model_len} tokens; raise it, or lower `max_model_len`"
            )
    return tuple(counts)
