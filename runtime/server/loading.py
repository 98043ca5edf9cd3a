"""Puts a checkpoint folder on an engine: device, weights, KV pages, thread. Takes as long as reading weights does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megakernel.assets import asset
from megakernel.config import ConfigError
from megakernel.families import read_model
from megakernel.hardware import load_hardware
from megakernel.model import ModelSpec
from megakernel.tiling import Rounding
from runtime.engine import AsyncEngine, EngineCore, EngineSettings
from runtime.engine.backend import Backend
from runtime.kv_pages import TILE, layer_groups, page_bytes
from runtime.server.config import ServeConfig
from runtime.server.plan import prove
from runtime.server.service import Service, TextSide

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.weights import Piece

log = logging.getLogger(__name__)

_ELEMENT_BYTES = 4  # the CPU's model runs in float32

CARD_TOKENS = 16384
"""Longest prompt and answer together on a card where nothing else is asked for; page tables are sized for it."""

WINDOW_TAILS = 3
"""Windows a row that a windowed group holds: the row's own, and those of conversations that may come back."""


def place(config: ServeConfig, folder: Path) -> ServeConfig:
    """The config with `device` decided, and `max_model_len` as far as a card's default goes.

    ConfigError where the model is none that can be served, or a card is asked for and can't be used.
    """
    model = read_model(folder)
    if config.device != "cpu":
        why = _no_card()
        if why is None:
            longest = config.max_model_len or min(model.max_context_tokens, CARD_TOKENS)
            return config.model_copy(update={"device": "cuda", "max_model_len": longest})
        if config.device == "cuda":
            raise ConfigError(f"`device` is cuda: {why}")
        log.info("serving on the CPU", extra={"why": why})
    return config.model_copy(update={"device": "cpu"})


def load_engine(folder: Path, service: Service) -> AsyncEngine:
    """Return a running engine, on the device that `place` decided, for a service that has none yet.

    ConfigError when folder, plan, sizes or card don't fit.
    """
    config, text, metrics = service.config, service.text, service.metrics
    if service.plan is not None:
        prove(service.plan, str(config.plan))
    backend = _card_backend(folder, service) if config.device == "cuda" else _cpu_backend(folder, config, text)
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


def _no_card() -> str | None:
    """Why no card can be used."""
    from runtime.gpu.presence import absence, present  # noqa: PLC0415 - imports torch where there is a driver

    why = absence(present())
    if why is None:
        from runtime.gpu.opening import CHIP, check_card  # noqa: PLC0415 - the compiler, and a card

        try:
            check_card(load_hardware(asset(CHIP)))
        except ConfigError as error:
            return str(error)
    return why


def _cpu_backend(folder: Path, config: ServeConfig, text: TextSide) -> Backend:
    import torch  # noqa: PLC0415 - heavy, and only a loaded model needs it

    from runtime.engine.cpu_backend import CpuBackend  # noqa: PLC0415
    from runtime.weights import pack_weights  # noqa: PLC0415

    if config.block_size % TILE:
        raise ConfigError(f"`block_size` is {config.block_size}; needed: a multiple of {TILE}")
    model = read_model(folder)
    weights = pack_weights(model, _tensors(folder, config, model), Rounding(), torch.float32)
    pages = page_counts(model, config, text.max_model_len)
    return CpuBackend(model, weights, rows=config.max_num_seqs, page_tokens=config.block_size, pages=pages)


def _card_backend(folder: Path, service: Service) -> Backend:
    import torch  # noqa: PLC0415 - heavy, and only a loaded model needs it

    from runtime.engine.checkpoint import Checkpoint  # noqa: PLC0415
    from runtime.gpu.opening import Sizes, open_card  # noqa: PLC0415 - the compiler, and a card
    from runtime.weights import pack_pieces  # noqa: PLC0415

    config, model = service.config, read_model(folder)
    is_set = config.model_fields_set
    sizes = Sizes(
        rows=config.max_num_seqs,
        max_tokens=service.text.max_model_len,
        blocks=config.num_gpu_blocks,
        kv_bytes=config.kv_cache_memory_bytes if "kv_cache_memory_bytes" in is_set else None,
        share=config.gpu_memory_utilization,
        block_tokens=config.block_size if "block_size" in is_set else None,
    )

    def pieces(rounding: Rounding) -> Iterator[Piece]:
        return pack_pieces(model, Checkpoint(folder), rounding, torch.bfloat16)

    opened = open_card(model, pieces if config.load_format == "auto" else None, sizes, service.plan)
    service.card = opened.facts()
    return opened.backend


def _tensors(folder: Path, config: ServeConfig, model: ModelSpec) -> Mapping[str, Tensor]:
    from runtime.engine.checkpoint import Checkpoint  # noqa: PLC0415 - torch
    from runtime.engine.drawn import DrawnTensors  # noqa: PLC0415

    return Checkpoint(folder) if config.load_format == "auto" else DrawnTensors(model, std=0.02)


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
        least = max((each for each, window in zip(row_blocks, windows, strict=True) if window is None), default=0)
        if config.num_gpu_blocks < least:
            raise ConfigError(
                f"`num_gpu_blocks` is {config.num_gpu_blocks}; one request of {max_model_len} tokens takes {least} "
                f"blocks of {block}: raise it, or lower `max_model_len` to {config.num_gpu_blocks * block}"
            )
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
