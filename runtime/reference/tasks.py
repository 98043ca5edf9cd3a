"""One reference function per task kind: what its load brings and what its run does, from the packed record alone.

A load returns what the copies would have put into shared memory (device-built unit lists, old KV); weights never
change, so runs read them in place. A run of a kind with an early part is called twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megakernel import live
from megakernel.abi import CONSTANTS
from megakernel.kinds import TaskKind
from megakernel.model import RoutedMlp
from megakernel.tiling import PAIRED_COLUMNS, UNIT_ROWS
from megakernel.workload import ROW_TILE
from runtime.reference import ops
from runtime.reference.memory import Memory
from runtime.sampling import sample
from runtime.weights import LayerWeights, Weights

NONE = CONSTANTS["kNone"]


@dataclass(frozen=True)
class Operands:
    """One record, decoded."""

    kind: TaskKind
    layer: int
    begin: int
    end: int
    share: int
    shares: int
    router: tuple[int, int]
    tiles: range
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class AttendUnit:
    """One (row, KV head, chunk): its index among the row's chunks, its tokens, and old K and V [2, tokens, dim]."""

    row: int
    head: int
    chunk: int
    position: int
    appends: bool
    old: Tensor


@dataclass(frozen=True)
class Routed:
    """Experts and scores of every row, ascending (none for inactive rows), and all distinct experts, ascending."""

    rows: tuple[tuple[list[int], list[float]], ...]
    distinct: tuple[int, ...]


Loaded = list[AttendUnit] | Routed | None


def load(operands: Operands, memory: Memory) -> Loaded:
    """What the copies and the producer's arithmetic leave in shared memory."""
    match operands.kind:
        case TaskKind.ATTEND:
            return _attend_units(operands, memory)
        case TaskKind.UP | TaskKind.DOWN:
            return _routed(operands, memory)
        case _:
            return None


def run(operands: Operands, memory: Memory, weights: Weights, loaded: Loaded, *, early: bool) -> None:
    """The run of a task, or only its early part."""
    if early:
        _project_router(operands, memory, weights)
    else:
        _RUNS[operands.kind](operands, memory, weights, loaded)


def _stream(memory: Memory, residual: int, mlp_out: int, tile: int) -> Tensor:
    """The residual stream [8, hidden]: what the output projection left, plus the MLP's output where that is apart."""
    x = memory.tile(residual, tile)
    return x if mlp_out == NONE else x + memory.tile(mlp_out, tile)


def _store(buffer: Tensor, tile: int, columns: slice, values: Tensor) -> None:
    rows = buffer[..., tile * ROW_TILE : (tile + 1) * ROW_TILE, columns]
    rows.copy_(values[: rows.shape[-2]])


def _layer(operands: Operands, weights: Weights) -> LayerWeights:
    return weights.layers[operands.layer]


def _mlp_input(operands: Operands, memory: Memory, weights: Weights, tile: int) -> Tensor:
    model = memory.step.model
    norm = _layer(operands, weights).mlp_norm
    return ops.rms_norm(_stream(memory, operands.inputs[0], operands.inputs[1], tile), norm, model.norm_eps)


def _embed(operands: Operands, memory: Memory, weights: Weights, _: Loaded) -> None:
    out = memory.buffers[operands.outputs[0]]
    for tile in operands.tiles:
        for row in range(tile * ROW_TILE, min((tile + 1) * ROW_TILE, memory.step.bucket.rows)):
            out[row] = weights.embedding[memory.tokens[row]]


def _project_router(operands: Operands, memory: Memory, weights: Weights) -> None:
    layer, model = _layer(operands, weights), memory.step.model
    assert layer.router is not None
    # beside Q, K, V the router reads what they read; alone (a sequential block) it reads the MLP's input
    norm = layer.input_norm if operands.end > operands.begin else layer.mlp_norm
    begin, end = operands.router
    wide = ops.accumulator(memory.dtype)
    for tile in operands.tiles:
        x = ops.rms_norm(_stream(memory, operands.inputs[0], operands.inputs[1], tile), norm, model.norm_eps)
        logits = (x.to(wide)[:, None, :] * layer.router[begin:end].to(wide)[None, :, :]).sum(-1)
        _store(memory.buffers[operands.outputs[0]], tile, slice(begin, end), logits)


def _project(operands: Operands, memory: Memory, weights: Weights, _: Loaded) -> None:
    if operands.begin == operands.end:
        return
    layer, model = _layer(operands, weights), memory.step.model
    out = memory.buffers[operands.outputs[1]]
    splits = out.shape[0]
    per_split = layer.qkv.shape[0] // splits
    columns = model.hidden_size // splits
    for tile in operands.tiles:
        stream = _stream(memory, operands.inputs[0], operands.inputs[1], tile)
        x = ops.rms_norm(stream, layer.input_norm, model.norm_eps)
        for unit in range(operands.begin, operands.end):
            split, row = divmod(unit, per_split)
            product = ops.tile_product(layer.qkv[unit], x[:, split * columns : (split + 1) * columns])
            _store(out[split], tile, _unit_columns(row), product)


def _unit_columns(unit: int) -> slice:
    return slice(unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)


def _attend_units(operands: Operands, memory: Memory) -> list[AttendUnit]:
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


def _attend(operands: Operands, memory: Memory, weights: Weights, loaded: Loaded) -> None:
    assert isinstance(loaded, list)
    model, layer = memory.step.model, _layer(operands, weights)
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


def _merge(operands: Operands, memory: Memory, _weights: Weights, _loaded: Loaded) -> None:
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


def _output(operands: Operands, memory: Memory, weights: Weights, _: Loaded) -> None:
    layer = _layer(operands, weights)
    for tile in operands.tiles:
        attention = memory.tile(operands.inputs[0], tile)
        stream = _stream(memory, operands.inputs[1], operands.inputs[2], tile)
        for unit in range(operands.begin, operands.end):
            product = ops.tile_product(layer.output[unit], attention).to(memory.dtype)
            columns = _unit_columns(unit)
            _store(memory.buffers[operands.outputs[0]], tile, columns, stream[:, columns] + product)


def _routed(operands: Operands, memory: Memory) -> Loaded:
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


def _up(operands: Operands, memory: Memory, weights: Weights, loaded: Loaded) -> None:
    layer, model = _layer(operands, weights), memory.step.model
    tiles = model.layers[operands.layer].mlp.width // PAIRED_COLUMNS
    out = memory.buffers[operands.outputs[0]]
    units = range(operands.begin, operands.end)
    if isinstance(loaded, Routed):
        total = len(loaded.distinct) * tiles
        first = live.share_begin(total, operands.share, operands.shares)
        units = range(first, live.share_begin(total, operands.share + 1, operands.shares))
    for tile in operands.tiles:
        x = _mlp_input(operands, memory, weights, tile)
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
            for row in range(tile * ROW_TILE, min((tile + 1) * ROW_TILE, memory.step.bucket.rows)):
                if not isinstance(loaded, Routed):
                    out[row, 0, columns] = hidden[row % ROW_TILE]
                elif expert in loaded.rows[row][0]:
                    out[row, loaded.rows[row][0].index(expert), columns] = hidden[row % ROW_TILE]


def _down(operands: Operands, memory: Memory, weights: Weights, loaded: Loaded) -> None:
    layer, model = _layer(operands, weights), memory.step.model
    width = model.layers[operands.layer].mlp.width
    units = model.hidden_size // UNIT_ROWS
    hidden = memory.buffers[operands.inputs[0]]
    out = memory.buffers[operands.outputs[0]]
    wide = ops.accumulator(memory.dtype)
    for tile in operands.tiles:
        rows = range(tile * ROW_TILE, min((tile + 1) * ROW_TILE, memory.step.bucket.rows))
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
            columns = _unit_columns(unit)
            result = total.to(memory.dtype)
            if operands.inputs[3] != NONE:
                result = memory.tile(operands.inputs[3], tile)[:, columns] + result
            _store(out, tile, columns, result)


def _head(operands: Operands, memory: Memory, weights: Weights, _: Loaded) -> None:
    model = memory.step.model
    logits, best = memory.buffers[operands.outputs[0]], memory.buffers[operands.outputs[1]]
    begin, end = operands.begin * UNIT_ROWS, operands.end * UNIT_ROWS
    for tile in operands.tiles:
        stream = _stream(memory, operands.inputs[0], operands.inputs[1], tile)
        x = ops.rms_norm(stream, weights.final_norm, model.norm_eps)
        for unit in range(operands.begin, operands.end):
            columns = _unit_columns(unit)
            _store(logits, tile, columns, ops.tile_product(weights.head[columns], x) * model.logit_scale)
        for row in range(tile * ROW_TILE, min((tile + 1) * ROW_TILE, memory.step.bucket.rows)):
            peak = int(torch.argmax(logits[row, begin:end]))
            best[row, operands.share, 0] = logits[row, begin + peak]
            best[row, operands.share, 1] = begin + peak


def _sample(operands: Operands, memory: Memory, _weights: Weights, _loaded: Loaded) -> None:
    logits, best = memory.buffers[operands.inputs[0]], memory.buffers[operands.inputs[1]]
    for tile in operands.tiles:
        for row in range(tile * ROW_TILE, min((tile + 1) * ROW_TILE, memory.step.bucket.rows)):
            if not memory.active[row]:
                continue
            params, position = memory.sampling[row], memory.positions[row]
            if params.temperature == 0.0:
                memory.tokens[row] = int(best[row, int(torch.argmax(best[row, :, 0])), 1])
            else:
                memory.tokens[row] = sample(logits[row].to(torch.float64).numpy(), params, position)
            memory.positions[row] = position + 1


_RUNS: dict[TaskKind, Callable[[Operands, Memory, Weights, Loaded], None]] = {
    TaskKind.EMBED: _embed,
    TaskKind.PROJECT: _project,
    TaskKind.ATTEND: _attend,
    TaskKind.MERGE: _merge,
    TaskKind.OUTPUT: _output,
    TaskKind.UP: _up,
    TaskKind.DOWN: _down,
    TaskKind.HEAD: _head,
    TaskKind.SAMPLE: _sample,
}
