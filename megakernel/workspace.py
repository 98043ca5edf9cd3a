"""Shared memory that runs keep beside the ring: what is staged, and what warps of a block hand to each other.

Owns the numbers of slots and their bytes; csrc asserts that its structures fit into them. A pure function of model,
bucket and choices, asked by `limits` for what fits and by the runtime for what to render.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from megakernel.model import ModelSpec, RoutedMlp
from megakernel.tiling import TILE_COLUMNS, UNIT_ROWS, Choices, Rounding, slice_of
from megakernel.workload import ROW_TILE, Bucket

CONSUMER_WARPS = 8
"""Warps of a block that run."""

RECORD_SLOTS = 6
"""Records between a block's planner and the warps that run them."""

FILTER_BYTES = 256 * 12
"""Bins of a row that filters its tokens, where its activations lie."""

ATTENTION_BLOCK_TOKENS = 32
"""Keys that are attended together; fewer where a page is no multiple."""

_FLOAT = 4
_PART_BYTES = (UNIT_ROWS + 4) * _FLOAT
"""Sums of one token row over the rows of a unit, padded so that lanes meet all banks."""


@dataclass(frozen=True)
class Workspace:
    """Slots that runs take in turn, and all of their bytes."""

    slice_slots: int
    sum_slots: int
    block_tokens: int
    bytes: int


def block_tokens(rounding: Rounding) -> int:
    """Keys that attention takes together."""
    return gcd(ATTENTION_BLOCK_TOKENS, rounding.page_tokens)


def down_columns(model: ModelSpec) -> int:
    """Columns of which every layer's down product is a multiple: slices are alike in all of them."""
    return gcd(*(layer.mlp.width for layer in model.layers))


def products(model: ModelSpec, rounding: Rounding) -> dict[str, int]:
    """Columns of K that every product is cut into slices by."""
    return {
        "project": model.hidden_size // rounding.project_k_splits,
        "output": model.q_size,
        "up": model.hidden_size,
        "down": down_columns(model),
    }


def slice_bytes(columns: int, rounding: Rounding) -> int:
    """Bytes of one slice of a unit: copies are whole slices."""
    return slice_of(columns, rounding) * UNIT_ROWS * 2


def least_copy_bytes(model: ModelSpec, rounding: Rounding) -> int:
    """Smallest copy that holds a slice of any product, a router row and a block of keys."""
    slices = [slice_bytes(columns, rounding) for columns in products(model, rounding).values()]
    router = [model.hidden_size * 2 for layer in model.layers if isinstance(layer.mlp, RoutedMlp)]
    return max([*slices, *router, block_tokens(rounding) * model.head_dim * 2])


def stage_bytes(model: ModelSpec, bucket: Bucket, rounding: Rounding, copy_bytes: int) -> int:
    """Bytes that one more stage takes, in the ring and in slots for what its copy brings."""
    rows = min(bucket.rows, ROW_TILE)
    return copy_bytes + (_slices_of_copy(model, rounding, copy_bytes) + 1) * (rows * _PART_BYTES + _FLOAT)


def workspace(model: ModelSpec, bucket: Bucket, choices: Choices) -> Workspace:
    """Slots and bytes of one block."""
    rounding, ring = choices.rounding, choices.ring
    rows = min(bucket.rows, ROW_TILE)
    widest = {**products(model, rounding), "down": max(layer.mlp.width for layer in model.layers)}
    unit_slices = max(
        widest[name] // slice_of(columns, rounding) for name, columns in products(model, rounding).items()
    )
    # when a copy has landed, all copies a whole ring before it are summed
    slice_slots = ring.stages * _slices_of_copy(model, rounding, ring.copy_bytes) + unit_slices
    down_units = -(-(model.hidden_size // UNIT_ROWS) // choices.cut.down)
    sum_slots = ring.stages + down_units + 1
    routed = [layer.mlp for layer in model.layers if isinstance(layer.mlp, RoutedMlp)]
    experts = max((mlp.num_experts for mlp in routed), default=1)
    top_k = max((mlp.top_k for mlp in routed), default=1)
    head_bytes = (model.head_dim + 4) * _FLOAT
    group, blocks = model.queries_per_kv, rounding.chunk_tokens // block_tokens(rounding)
    used = (
        max(rows * (model.hidden_size + TILE_COLUMNS) * 2, FILTER_BYTES),
        (slice_slots + sum_slots) * (rows * _PART_BYTES + _FLOAT),
        chunk_teams(model, rounding, ring.copy_bytes) * ((2 * blocks + 1) * group * _FLOAT + head_bytes),
        2 * (_FLOAT + 2 * experts + rows * (_FLOAT * top_k + experts) + 16),
        CONSUMER_WARPS * (head_bytes + rows * (_FLOAT + 12) + 16) + rows * (16 + _FLOAT),
        _SLACK_BYTES,
    )
    return Workspace(slice_slots, sum_slots, block_tokens(rounding), -(-sum(used) // 128) * 128)


_SLACK_BYTES = 256
"""Words of which there is one, and alignment."""


def chunk_pieces(model: ModelSpec, rounding: Rounding, copy_bytes: int) -> int:
    """Pieces that an attention chunk's K is copied in, each the work of one warp: csrc finds the same number."""
    tokens = rounding.page_tokens
    while tokens * model.head_dim * 2 > copy_bytes and tokens // 2 % block_tokens(rounding) == 0:
        tokens //= 2
    return max(rounding.chunk_tokens // tokens, 1)


def chunk_teams(model: ModelSpec, rounding: Rounding, copy_bytes: int) -> int:
    """Teams of warps, each of which attends a chunk of its own."""
    return max(CONSUMER_WARPS // chunk_pieces(model, rounding, copy_bytes), 1)


def _slices_of_copy(model: ModelSpec, rounding: Rounding, copy_bytes: int) -> int:
    least = min(slice_bytes(columns, rounding) for columns in products(model, rounding).values())
    return max(copy_bytes // least, 1)
