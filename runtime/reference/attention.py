"""Projections, attention over pages, merge and output projection: see `lowering.attention` for who does what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakernel import live
from runtime.reference import ops
from runtime.reference.memory import Memory
from runtime.reference.operands import Operands, read_stream, store_columns, unit_columns
from runtime.weights import Weights


@dataclass(frozen=True)
class AttendUnit:
    """One (row, KV head, chunk): its index among the row's chunks, its tokens, and old K and V [2, tokens, dim]."""

    row: int
    head: int
    chunk: int
    position: int
    appends: bool
    old: Tensor


def run_router(operands: Operands, memory: Memory, weights: Weights) -> None:
    """Early part of a projection: its rows of router logits, from the normed stream."""
    layer, model = weights.layers[operands.layer], memory.step.model
    assert layer.router is not None
    # beside Q, K, V the router reads what they read; alone (a sequential block) it reads the MLP's input
    norm = layer.input_norm if operands.end > operands.begin else layer.mlp_norm
    begin, end = operands.router
    wide = ops.accumulator(memory.dtype)
    for tile in operands.tiles:
        x = ops.rms_norm(read_stream(memory, operands.inputs[0], operands.inputs[1], tile), norm, model.norm_eps)
        logits = (x.to(wide)[:, None, :] * layer.router[begin:end].to(wide)[None, :, :]).sum(-1)
        store_columns(memory.buffers[operands.outputs[0]], tile, slice(begin, end), logits)


def run_project(operands: Operands, memory: Memory, weights: Weights, _loaded: object) -> None:
    """Q, K and V columns of this task's units, one partial sum per K split."""
    if operands.begin == operands.end:
        return
    layer, model = weights.layers[operands.layer], memory.step.model
    out = memory.buffers[operands.outputs[1]]
    splits = out.shape[0]
    per_split = layer.qkv.shape[0] // splits
    columns = model.hidden_size // splits
    for tile in operands.tiles:
        stream = read_stream(memory, operands.inputs[0], operands.inputs[1], tile)
        x = ops.rms_norm(stream, layer.input_norm, model.norm_eps)
        for unit in range(operands.begin, operands.end):
            split, row = divmod(unit, per_split)
            product = ops.tile_product(layer.qkv[unit], x[:, split * columns : (split + 1) * columns])
            store_columns(out[split], tile, unit_columns(row), product)


def find_units(operands: Operands, memory: Memory) -> list[AttendUnit]:
    """The share's (row, KV head, chunk) units, with the old KV that its copies bring."""
    step = memory.step
    model, chunk = step.model, step.choices.rounding.chunk_tokens
    window = model.layers[operands.layer].window_tokens or 0
    counts = [
        live.attend_units(int(memory.active[row]), memory.positions[row], window, chunk, model.num_kv_heads)
        for row in range(step.bucket.rows)
    ]
    starts = np.concatenate([[0], np.cumsum(counts)])
    total = int(starts[-1])
    units: list[AttendUnit] = []
    first = live.share_begin(total, operands.share, operands.shares)
    last = live.share_begin(total, operands.share + 1, operands.shares)
    for unit in range(first, last):
        row = int(np.searchsorted(starts, unit, side="right")) - 1
        position = memory.positions[row]
        begin_chunk = live.chunk_begin(position, window, chunk)
        end_chunk = live.chunk_end(position, chunk)
        head, idx = divmod(unit - int(starts[row]), end_chunk - begin_chunk)
        begin = (begin_chunk + idx) * chunk
        if window:
            begin = max(begin, position + 1 - window)
        appends = begin_chunk + idx == end_chunk - 1
        end = position if appends else (begin_chunk + idx + 1) * chunk
        old = memory.read_kv(operands.layer, row, head, begin, end)
        units.append(AttendUnit(row, head, idx, position, appends, old))
    return units


def run_attend(operands: Operands, memory: Memory, weights: Weights, loaded: object) -> None:
    """Partial softmax of every unit; the unit that holds the current position appends its K and V to the page."""
    assert isinstance(loaded, list)
    model, layer = memory.step.model, weights.layers[operands.layer]
    rope, dim, group = model.layers[operands.layer].rope, model.head_dim, model.queries_per_kv
    partial = memory.buffers[operands.outputs[0]]

    def heads(row: int, begin: int, count: int, norm: Tensor | None, *, turn: bool) -> Tensor:
        values = torch.zeros_like(memory.buffers[operands.inputs[0]][0, row, begin : begin + count * dim])
        for split in memory.buffers[operands.inputs[0]]:
            values = values + split[row, begin : begin + count * dim]
        x = values.to(memory.dtype).reshape(count, dim)
        if norm is not None:
            x = ops.rms_norm(x, norm, model.norm_eps)
        return ops.rotate(x, memory.positions[row], rope) if turn and rope is not None else x

    for unit in loaded:
        q = heads(unit.row, unit.head * group * dim, group, layer.q_norm, turn=True)
        k, v = unit.old[0], unit.old[1]
        if unit.appends:
            at = model.q_size + unit.head * dim
            new_k = heads(unit.row, at, 1, layer.k_norm, turn=True)
            new_v = heads(unit.row, at + model.kv_size, 1, None, turn=False)
            memory.write_kv(operands.layer, unit.row, unit.head, unit.position, torch.stack([new_k, new_v]))
            k, v = torch.cat([k, new_k]), torch.cat([v, new_v])
        result = ops.attend_chunk(q, k, v, dim**-0.5)
        partial[unit.row, unit.head * group : (unit.head + 1) * group, unit.chunk] = result


def run_merge(operands: Operands, memory: Memory, _weights: Weights, _loaded: object) -> None:
    """Attention output of whole query heads; zero for inactive rows."""
    step = memory.step
    model, chunk = step.model, step.choices.rounding.chunk_tokens
    window = model.layers[operands.layer].window_tokens or 0
    partial, out = memory.buffers[operands.inputs[0]], memory.buffers[operands.outputs[0]]
    for unit in range(operands.begin, operands.end):
        row, head = divmod(unit, model.num_heads)
        position = memory.positions[row]
        columns = slice(head * model.head_dim, (head + 1) * model.head_dim)
        if memory.active[row]:
            chunks = live.chunk_end(position, chunk) - live.chunk_begin(position, window, chunk)
            out[row, columns] = ops.merge_chunks(partial[row, head, :chunks]).to(memory.dtype)
        else:
            out[row, columns] = 0.0


def run_output(operands: Operands, memory: Memory, weights: Weights, _loaded: object) -> None:
    """Columns of the next residual: the stream plus the output projection."""
    layer = weights.layers[operands.layer]
    for tile in operands.tiles:
        attention = memory.tile(operands.inputs[0], tile)
        stream = read_stream(memory, operands.inputs[1], operands.inputs[2], tile)
        for unit in range(operands.begin, operands.end):
            product = ops.tile_product(layer.output[unit], attention).to(memory.dtype)
            columns = unit_columns(unit)
            store_columns(memory.buffers[operands.outputs[0]], tile, columns, stream[:, columns] + product)
