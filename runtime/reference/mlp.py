"""Gate, up and down products of routed experts or a dense layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megakernel import live
from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.model import RoutedMlp
from megakernel.tiling import PAIRED_COLUMNS, UNIT_ROWS
from megakernel.workload import ROW_TILE
from runtime.reference import ops
from runtime.reference.memory import Memory
from runtime.reference.operands import Operands, read_stream, store_columns, tile_rows, unit_columns
from runtime.weights import Weights


@dataclass(frozen=True)
class Routed:
    """Experts and scores of every row, ascending (none for inactive rows), and all distinct experts, ascending."""

    rows: tuple[tuple[list[int], list[float]], ...]
    distinct: tuple[int, ...]


def find_routed(operands: Operands, memory: Memory) -> Routed | None:
    """Experts of all rows, from the router's logits; None for a dense layer."""
    mlp = memory.step.model.layers[operands.layer].mlp
    if not isinstance(mlp, RoutedMlp):
        return None
    router = operands.inputs[2] if operands.kind is TaskKind.UP else operands.inputs[1]
    logits = memory.buffers[router]
    rows = tuple(
        ops.route(logits[row, : mlp.num_experts], mlp) if memory.active[row] else ([], [])
        for row in range(memory.step.bucket.rows)
    )
    return Routed(rows, tuple(sorted({expert for experts, _ in rows for expert in experts})))


def run_up(operands: Operands, memory: Memory, weights: Weights, loaded: object) -> None:
    """Activated products of this share's (expert, tile) units, or of its static units in a dense layer."""
    layer, model = weights.layers[operands.layer], memory.step.model
    tiles = model.layers[operands.layer].mlp.width // PAIRED_COLUMNS
    out = memory.buffers[operands.outputs[0]]
    units = range(operands.begin, operands.end)
    if isinstance(loaded, Routed):
        total = len(loaded.distinct) * tiles
        first = live.share_begin(total, operands.share, operands.shares)
        units = range(first, live.share_begin(total, operands.share + 1, operands.shares))
    for tile in operands.tiles:
        stream = read_stream(memory, operands.inputs[0], operands.inputs[1], tile)
        x = ops.rms_norm(stream, layer.mlp_norm, model.norm_eps)
        for unit in units:
            column = live.expert_tile(unit, tiles) * PAIRED_COLUMNS
            columns = slice(column, column + PAIRED_COLUMNS)
            if isinstance(loaded, Routed):
                expert = loaded.distinct[live.expert_rank(unit, tiles)]
                product = ops.tile_product(layer.up[expert * tiles + live.expert_tile(unit, tiles)], x)
            else:
                expert = -1
                product = ops.tile_product(layer.up[unit], x)
            hidden = ops.gated(product[:, :PAIRED_COLUMNS], product[:, PAIRED_COLUMNS:], memory.dtype)
            for row in tile_rows(memory, tile):
                if not isinstance(loaded, Routed):
                    out[row, 0, columns] = hidden[row % ROW_TILE]
                elif expert in loaded.rows[row][0]:
                    out[row, loaded.rows[row][0].index(expert), columns] = hidden[row % ROW_TILE]


def run_down(operands: Operands, memory: Memory, weights: Weights, loaded: object) -> None:
    """Output columns, summed over a row's own experts in ascending order."""
    layer, model = weights.layers[operands.layer], memory.step.model
    width = model.layers[operands.layer].mlp.width
    units = model.hidden_size // UNIT_ROWS
    hidden = memory.buffers[operands.inputs[0]]
    out = memory.buffers[operands.outputs[0]]
    wide = ops.accumulator(memory.dtype)
    for tile in operands.tiles:
        rows = tile_rows(memory, tile)
        for unit in range(operands.begin, operands.end):
            total = torch.zeros(ROW_TILE, UNIT_ROWS, dtype=wide)
            if isinstance(loaded, Routed):
                for expert in loaded.distinct:
                    x = torch.zeros(ROW_TILE, width, dtype=memory.dtype)
                    score = torch.zeros(ROW_TILE, 1, dtype=wide)
                    for row in rows:
                        experts, scores = loaded.rows[row]
                        if expert in experts:
                            slot = experts.index(expert)
                            x[row % ROW_TILE] = hidden[row, slot, :width]
                            score[row % ROW_TILE] = scores[slot]
                    product = ops.tile_product(layer.down[expert * units + unit], x)
                    # rows that did not pick the expert are selected away, never multiplied by zero
                    total = torch.where(score > 0, total + score * product, total)
            else:
                x = torch.zeros(ROW_TILE, width, dtype=memory.dtype)
                for row in rows:
                    x[row % ROW_TILE] = hidden[row, 0, :width]
                total = ops.tile_product(layer.down[unit], x)
            columns = unit_columns(unit)
            result = total.to(memory.dtype)
            if operands.inputs[3] != NONE:
                result = memory.tile(operands.inputs[3], tile)[:, columns] + result
            store_columns(out, tile, columns, result)
