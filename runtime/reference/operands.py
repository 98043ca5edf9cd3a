"""One record, decoded, and what every kind does with it: read the residual stream, store a block of columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megakernel.counters import NONE
from megakernel.kinds import TaskKind
from megakernel.tiling import UNIT_ROWS
from megakernel.workload import ROW_TILE
from runtime.reference.memory import Memory


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

    @staticmethod
    def decode(record: np.void) -> Operands:
        """Read a packed record."""
        first_tile = int(record["row_tile_begin"])
        return Operands(
            kind=TaskKind(int(record["kind"])),
            layer=int(record["layer"]),
            begin=int(record["begin"]),
            end=int(record["end"]),
            share=int(record["share"]),
            shares=int(record["shares"]),
            router=(int(record["router_begin"]), int(record["router_end"])),
            tiles=range(first_tile, first_tile + int(record["row_tile_count"])),
            inputs=tuple(int(buffer) for buffer in record["inputs"]),
            outputs=tuple(int(buffer) for buffer in record["outputs"]),
        )


def read_stream(memory: Memory, residual: int, mlp_out: int, tile: int) -> Tensor:
    """The residual stream [8, hidden]: what the output projection left, plus the MLP's output where that is apart."""
    x = memory.tile(residual, tile)
    return x if mlp_out == NONE else x + memory.tile(mlp_out, tile)


def store_columns(buffer: Tensor, tile: int, columns: slice, values: Tensor) -> None:
    """Write [8, columns] of a tile into `buffer` [..., rows, all columns]; rows that the bucket lacks are dropped."""
    rows = buffer[..., tile * ROW_TILE : (tile + 1) * ROW_TILE, columns]
    rows.copy_(values[: rows.shape[-2]])


def unit_columns(unit: int) -> slice:
    """Columns that a unit of weight rows writes."""
    return slice(unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS)


def tile_rows(memory: Memory, tile: int) -> range:
    """Rows of a tile that the bucket has."""
    return range(tile * ROW_TILE, min((tile + 1) * ROW_TILE, memory.step.bucket.rows))
