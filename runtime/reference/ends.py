"""Ends of a step: embedding of its tokens, logits, and the next token of every active row."""

from __future__ import annotations

import torch

from megakernel.tiling import UNIT_ROWS
from runtime.reference import ops
from runtime.reference.memory import Memory
from runtime.reference.operands import Operands, read_stream, store_columns, tile_rows, unit_columns
from runtime.rows import Drop, Extend, Join
from runtime.sampling import NO_TOKEN, sample
from runtime.weights import Weights, unit_rows


def run_embed(operands: Operands, memory: Memory, weights: Weights, _loaded: object) -> None:
    """First residual of every row of the tile."""
    out = memory.buffers[operands.outputs[0]]
    for tile in operands.tiles:
        for row in tile_rows(memory, tile):
            unit, at = divmod(memory.tokens[row], UNIT_ROWS)
            out[row] = unit_rows(weights.embedding[unit])[at]


def run_head(operands: Operands, memory: Memory, weights: Weights, _loaded: object) -> None:
    """Logits of this task's columns, and its best logit and token per row."""
    model = memory.step.model
    logits, best = memory.buffers[operands.outputs[0]], memory.buffers[operands.outputs[1]]
    begin, end = operands.begin * UNIT_ROWS, operands.end * UNIT_ROWS
    for tile in operands.tiles:
        stream = read_stream(memory, operands.inputs[0], operands.inputs[1], tile)
        x = ops.rms_norm(stream, weights.final_norm, model.norm_eps)
        for unit in range(operands.begin, operands.end):
            columns = unit_columns(unit)
            store_columns(logits, tile, columns, ops.tile_product(weights.head[unit], x) * model.logit_scale)
        for row in tile_rows(memory, tile):
            peak = int(torch.argmax(logits[row, begin:end]))
            # the kernel's first two words are the draw, noise added: here all noise is `sample`'s
            best[row, operands.share, 0::2] = logits[row, begin + peak]
            best[row, operands.share, 1::2] = begin + peak


def run_sample(operands: Operands, memory: Memory, _weights: Weights, _loaded: object) -> None:
    """Next token and position of active rows, and what the host asked of each; greedy rows look only at the best.

    A row ends after a stop id, when its next position is its last, or when nothing can be drawn. A row that grows in
    this step does so first; one that leaves or joins does so last.
    """
    logits, best = memory.buffers[operands.inputs[0]], memory.buffers[operands.inputs[1]]
    for tile in operands.tiles:
        for row in tile_rows(memory, tile):
            command = memory.mail.pop(row, None)
            if isinstance(command, Extend):
                memory.carry_out(row, command)
            if memory.active[row]:
                params, position = memory.sampling[row], memory.positions[row]
                if params.is_greedy:
                    value, token = best[row, int(torch.argmax(best[row, :, 0])), :2]
                    memory.tokens[row] = int(token) if value.isfinite() else NO_TOKEN
                else:
                    memory.tokens[row] = sample(logits[row].to(torch.float64).numpy(), params, position)
                memory.positions[row] = position + 1
                ends = memory.tokens[row] in (*memory.stops[row], NO_TOKEN)
                memory.active[row] = not ends and position + 1 < memory.end_positions[row]
            if isinstance(command, Join | Drop):
                memory.carry_out(row, command)
