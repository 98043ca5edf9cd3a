"""What every task of a table streams and reads in one live state; bytes only, a chip's times are the simulator's.

The same arithmetic on live state that tasks do on the device (`live`) says how many units each share finds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megakernel import live
from megakernel.abi import BEST_WORDS
from megakernel.build import BuiltStep
from megakernel.graph import Op, When
from megakernel.kinds import TaskKind
from megakernel.lowering.context import BF16, FP32
from megakernel.lowering.mlp import up_tiles
from megakernel.model import RoutedMlp
from megakernel.tiling import UNIT_ROWS

Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LiveState:
    """Positions (0-based, of the token being decoded) of active rows, and distinct experts touched, per layer."""

    positions: tuple[int, ...]
    distinct_experts: tuple[int, ...]


@dataclass(frozen=True)
class TaskCost:
    """Per task, in reference order: bytes through the ring, activation bytes the run reads, multiply-adds."""

    load_bytes: Bytes
    read_bytes: Bytes
    macs: Bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes of the whole step through all rings."""
        return int(self.load_bytes.sum())


def price_bytes(step: BuiltStep, state: LiveState) -> TaskCost:
    """Bytes and multiply-adds of every task of `step` in `state`."""
    columns = [_op_cost(step, op, state) for op in step.graph.ops]
    load, read, macs = (np.concatenate(part) for part in zip(*columns, strict=True))
    return TaskCost(load, read, macs)


def _shares(units: int, shares: int) -> Bytes:
    begin = np.arange(shares + 1, dtype=np.int64) * units // shares
    return np.diff(begin)


def _op_cost(step: BuiltStep, op: Op, state: LiveState) -> tuple[Bytes, Bytes, Bytes]:
    model, rounding = step.model, step.choices.rounding
    rows = len(state.positions)
    units = np.array([task.end - task.begin for task in op.tasks], dtype=np.int64)
    router = np.array([task.router_end - task.router_begin for task in op.tasks], dtype=np.int64)
    zero = np.zeros(len(op.tasks), dtype=np.int64)
    hidden = model.hidden_size
    match op.kind:
        case TaskKind.PROJECT:
            unit = UNIT_ROWS * hidden // rounding.project_k_splits
            elements = units * unit + router * hidden
            return elements * BF16, zero + rows * hidden * BF16, elements * rows
        case TaskKind.ATTEND:
            window = model.layers[op.layer].window_tokens or 0
            chunk = rounding.chunk_tokens
            found = [live.attend_units(1, p, window, chunk, model.num_kv_heads) for p in state.positions]
            mine = _shares(sum(found), len(op.tasks))
            bytes_per_unit = chunk * 2 * model.head_dim * BF16
            macs = mine * chunk * 2 * model.head_dim * model.queries_per_kv
            return mine * bytes_per_unit, mine * model.queries_per_kv * model.head_dim * FP32, macs
        case TaskKind.MERGE:
            window = model.layers[op.layer].window_tokens or 0
            chunks = [
                live.chunk_end(p, rounding.chunk_tokens) - live.chunk_begin(p, window, rounding.chunk_tokens)
                for p in state.positions
            ]
            per_unit = np.repeat(np.array(chunks + [0] * (step.bucket.rows - rows)), model.num_heads)
            total = np.concatenate([[0], np.cumsum(per_unit)])
            mine = np.array([total[task.end] - total[task.begin] for task in op.tasks], dtype=np.int64)
            return zero, mine * (model.head_dim + 2) * FP32, mine * model.head_dim
        case TaskKind.OUTPUT:
            elements = units * UNIT_ROWS * model.q_size
            return elements * BF16, zero + rows * model.q_size * BF16, elements * rows
        case TaskKind.UP:
            mlp = model.layers[op.layer].mlp
            mine = units
            if isinstance(mlp, RoutedMlp):
                mine = _shares(state.distinct_experts[op.layer] * up_tiles(mlp), len(op.tasks))
            elements = mine * UNIT_ROWS * hidden
            return elements * BF16, zero + rows * hidden * BF16, elements * rows
        case TaskKind.DOWN:
            mlp = model.layers[op.layer].mlp
            experts = state.distinct_experts[op.layer] if isinstance(mlp, RoutedMlp) else 1
            picked = mlp.top_k if isinstance(mlp, RoutedMlp) else 1
            elements = units * UNIT_ROWS * mlp.width * experts
            return elements * BF16, zero + rows * picked * mlp.width * BF16, elements * rows
        case TaskKind.HEAD:
            elements = units * UNIT_ROWS * hidden
            return elements * BF16, zero + rows * hidden * BF16, elements * rows
        case TaskKind.EMBED:
            return zero, zero + rows * hidden * BF16, zero
        case TaskKind.SAMPLE:
            best = next(access for access in op.tasks[0].accesses if access.slot == 1 and access.when is When.RUN)
            return zero, zero + rows * best.box[1][1] * BEST_WORDS * FP32, zero
