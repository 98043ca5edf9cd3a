"""What every task of a table streams, walked on the host: (address, bytes) pieces, independent of csrc.

Knows the layouts of packed weights and KV pages, and nothing of rings, copies or lanes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from megakernel import live
from megakernel.build import BuiltStep
from megakernel.kinds import TaskKind
from megakernel.model import RoutedMlp
from megakernel.tiling import PAIRED_COLUMNS, UNIT_ROWS
from runtime.gpu.buffers import LiveInputs
from runtime.kv_pages import layer_groups

Piece = tuple[int, int]


def pieces(step: BuiltStep, record: np.void, inputs: LiveInputs, address: dict[str, int]) -> Iterator[Piece]:
    """Pieces of memory that the load of `record` reads."""
    kind = TaskKind(int(record["kind"]))
    layer = int(record["layer"])
    if kind is TaskKind.ATTEND:
        group = layer_groups(step.model)[1][layer]
        yield from _chunks(step, record, inputs, inputs.pages[group], address[f"L{layer}.kv"])
    elif kind in (TaskKind.UP, TaskKind.DOWN):
        yield from _mlp(step, record, inputs, address)
    elif kind not in (TaskKind.EMBED, TaskKind.MERGE, TaskKind.SAMPLE):
        yield from _static(step, record, address)


def _static(step: BuiltStep, record: np.void, address: dict[str, int]) -> Iterator[Piece]:
    model = step.model
    layer, begin, end = (int(record[name]) for name in ("layer", "begin", "end"))
    match TaskKind(int(record["kind"])):
        case TaskKind.PROJECT:
            row = model.hidden_size * 2
            first, last = int(record["router_begin"]), int(record["router_end"])
            if last > first:
                yield address[f"L{layer}.router"] + first * row, (last - first) * row
            if end > begin:
                unit = UNIT_ROWS * model.hidden_size * 2 // step.choices.rounding.project_k_splits
                yield address[f"L{layer}.qkv"] + begin * unit, (end - begin) * unit
        case TaskKind.OUTPUT:
            unit = UNIT_ROWS * model.q_size * 2
            yield address[f"L{layer}.output"] + begin * unit, (end - begin) * unit
        case _:
            unit = UNIT_ROWS * model.hidden_size * 2
            yield address.get("head", address["embedding"]) + begin * unit, (end - begin) * unit


def _mlp(step: BuiltStep, record: np.void, inputs: LiveInputs, address: dict[str, int]) -> Iterator[Piece]:
    layer, begin, end = (int(record[name]) for name in ("layer", "begin", "end"))
    hidden = step.model.hidden_size
    mlp = step.model.layers[layer].mlp
    experts = _experts(inputs, layer, mlp)
    if TaskKind(int(record["kind"])) is TaskKind.UP:
        unit = UNIT_ROWS * hidden * 2
        for index in _routed_units(mlp, record, experts, mlp.width // PAIRED_COLUMNS):
            yield address[f"L{layer}.up"] + index * unit, unit
        return
    unit = UNIT_ROWS * mlp.width * 2
    for expert in experts:
        first = expert * (hidden // UNIT_ROWS) + begin
        yield address[f"L{layer}.down"] + first * unit, (end - begin) * unit


def _experts(inputs: LiveInputs, layer: int, mlp: object) -> list[int]:
    if not isinstance(mlp, RoutedMlp):
        return [0]
    active = inputs.rows["active"].astype(bool)
    return sorted({int(expert) for expert in inputs.routed[layer, active, : mlp.top_k].reshape(-1)})


def _routed_units(mlp: object, record: np.void, experts: list[int], tiles: int) -> Iterator[int]:
    if not isinstance(mlp, RoutedMlp):
        yield from range(int(record["begin"]), int(record["end"]))
        return
    everything = [expert * tiles + tile for expert in experts for tile in range(tiles)]
    share, shares = int(record["share"]), int(record["shares"])
    yield from everything[
        live.share_begin(len(everything), share, shares) : live.share_begin(len(everything), share + 1, shares)
    ]


def _chunks(step: BuiltStep, record: np.void, inputs: LiveInputs, tables: np.ndarray, pool: int) -> Iterator[Piece]:
    model, rounding = step.model, step.choices.rounding
    window = model.layers[int(record["layer"])].window_tokens or 0
    everything = [
        (row, head, chunk)
        for row, state in enumerate(inputs.rows)
        if state["active"]
        for head in range(model.num_kv_heads)
        for chunk in range(
            live.chunk_begin(int(state["position"]), window, rounding.chunk_tokens),
            live.chunk_end(int(state["position"]), rounding.chunk_tokens),
        )
    ]
    share, shares = int(record["share"]), int(record["shares"])
    mine = slice(live.share_begin(len(everything), share, shares), live.share_begin(len(everything), share + 1, shares))
    per_chunk = rounding.chunk_tokens // rounding.page_tokens
    size = 2 * rounding.page_tokens * model.head_dim * 2
    for row, head, chunk in everything[mine]:
        for page in tables[row, chunk * per_chunk : (chunk + 1) * per_chunk]:
            yield pool + (int(page) * model.num_kv_heads + head) * size, size
