"""The single statement of what a chip can run: reasons why a model, a bucket and choices don't go together.

Everything that proposes choices asks here first, the search's space is drawn from these numbers, and a refusal says
what was found, what was needed and which choice to change. Order and hazards are `verify`'s business.
"""

from __future__ import annotations

from collections.abc import Iterator

from megakernel.abi import MAX_LOAD_WAITS, MAX_RUN_WAITS
from megakernel.graph import TaskGraph
from megakernel.hardware import HardwareSpec
from megakernel.kinds import KINDS
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.tiling import PAIRED_COLUMNS, TILE_COLUMNS, UNIT_ROWS, Choices, Rounding, Segment
from megakernel.workload import Bucket
from megakernel.workspace import (
    CONSUMER_WARPS,
    chunk_pieces,
    least_copy_bytes,
    products,
    slice_bytes,
    stage_bytes,
    workspace,
)

RESERVED_SHARED_BYTES = 6144
"""Barriers of the ring, the launch record, and a window of records."""

MAX_SHARE_UNITS = 65535
"""Length of a share's device-built unit list."""

COPY_GRANULE_BYTES = 1024
"""A copy is whole sub-tiles of 16 rows x 32 columns, so that a stage never splits one."""

ORDERED: dict[str, tuple[tuple[str, str], ...]] = {
    "parallel": (
        ("project", "attend"), ("attend", "merge"), ("merge", "output"), ("up", "down"),
    ),
    "sequential": (
        ("project", "attend"), ("attend", "merge"), ("merge", "output"), ("output", "route"), ("route", "up"),
        ("output", "up"), ("up", "down"),
    ),
}  # fmt: skip
"""Operators of a layer of which the first must stand before the second in every list."""


def layer_ops(model: ModelSpec, choices: Choices) -> tuple[str, ...]:
    """Operators that an order must place."""
    ops = ("project", "attend", "merge", "output", "up", "down")
    separate = model.block == "sequential" or not choices.interleave.router_with_project
    return (*ops, "route") if separate and _routed(model) else ops


def order_pairs(model: ModelSpec, choices: Choices) -> tuple[tuple[str, str], ...]:
    """Pairs of operators, of those that the order must place, of which the first comes first."""
    pairs = ORDERED[model.block]
    if model.block == "parallel" and _routed(model):
        router = "project" if choices.interleave.router_with_project else "route"
        pairs = (*pairs, (router, "up"))
    placed = layer_ops(model, choices)
    return tuple(pair for pair in pairs if set(pair) <= set(placed))


def shared_bytes(model: ModelSpec, bucket: Bucket, choices: Choices) -> int:
    """Shared memory of one block."""
    return choices.ring.bytes + workspace(model, bucket, choices).bytes + RESERVED_SHARED_BYTES


def most_stages(model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> int:
    """Ring stages of these copies that fit beside the workspace."""
    ring, each = choices.ring, stage_bytes(model, bucket, choices.rounding, choices.ring.copy_bytes)
    free = chip.shared_memory_per_block_bytes - shared_bytes(model, bucket, choices)
    return max(ring.stages + free // each, 0)


def fitting_ring(model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> Choices:
    """The same choices with as many ring stages as fit, if they have more: rows take a ring's room."""
    ring, fits = choices.ring, max(most_stages(model, bucket, choices, chip), 2)
    if fits >= ring.stages:
        return choices
    cap = ring.in_flight_cap_bytes
    fewer = {"stages": fits, "in_flight_cap_bytes": cap if cap is None else min(cap, fits * ring.copy_bytes)}
    return choices.model_copy(update={"ring": ring.model_copy(update=fewer)})


def least_stages(model: ModelSpec, rounding: Rounding, copy_bytes: int) -> int:
    """Ring stages that every kind can run with: those that a run holds, and one for the next copy to land in.

    All copies of an attention chunk, K and V, lie in the ring together: values wait until all keys are scored.
    """
    held = max(info.hold_copies for info in KINDS.values()) + 1
    return max(held, 2 * chunk_pieces(model, rounding, copy_bytes))


MOST_SOURCES = {"ahead": 2, "after_wait": 3}
"""Operators that one phase of a record waits for at most, by when its loads start."""


def most_words(choices: Choices) -> int:
    """Words that an operator's arrivals may be dealt to, so that a record still holds its waits."""
    return min(MAX_LOAD_WAITS, MAX_RUN_WAITS) // MOST_SOURCES[choices.interleave.loads]


def memory_bytes(graph: TaskGraph) -> tuple[int, int]:
    """Device memory of weights, and of everything else (KV cache of the whole bucket and scratch)."""
    weights = sum(buffer.bytes for buffer in graph.buffers if buffer.read_only)
    return weights, sum(buffer.bytes for buffer in graph.buffers) - weights


def check_memory(graph: TaskGraph, chip: HardwareSpec) -> list[str]:
    """Reasons why a lowered step does not fit into the chip's memory."""
    weights, rest = memory_bytes(graph)
    if weights + rest <= chip.memory_bytes:
        return []
    reason = (
        f"the step needs {weights / 1e9:.1f} GB of weights and {rest / 1e9:.1f} GB of KV cache and scratch, "
        f"{chip.name} has {chip.memory_bytes / 1e9:.1f} GB: take a smaller model, fewer rows or a shorter "
        "max_context_tokens"
    )
    return [reason]


def reasons(model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> list[str]:
    """Why these choices are not legal; an empty list when they are."""
    return [
        *_geometry(model, choices),
        *_bucket(model, bucket),
        *_ring(model, bucket, choices, chip),
        *_order(model, choices),
        *_placement(model, bucket, choices, chip),
        *_counters(choices),
    ]


def _routed(model: ModelSpec) -> bool:
    return any(isinstance(layer.mlp, RoutedMlp) for layer in model.layers)


def _geometry(model: ModelSpec, choices: Choices) -> Iterator[str]:
    splits = choices.rounding.project_k_splits
    multiples = (
        ("hidden_size", model.hidden_size, TILE_COLUMNS),
        ("head_dim", model.head_dim, UNIT_ROWS),
        ("heads * head_dim", model.q_size, TILE_COLUMNS),
        ("vocab_size", model.vocab_size, UNIT_ROWS),
        ("hidden_size / project_k_splits", model.hidden_size / splits, TILE_COLUMNS),
        *((f"layer {i} MLP width", layer.mlp.width, TILE_COLUMNS) for i, layer in enumerate(model.layers)),
    )
    for name, value, of in multiples:
        if value % of:
            yield f"{name} is {value:g}, needed a multiple of {of}"
    assert UNIT_ROWS % PAIRED_COLUMNS == 0


def _bucket(model: ModelSpec, bucket: Bucket) -> Iterator[str]:
    if bucket.max_context_tokens > model.max_context_tokens:
        yield (
            f"bucket max_context_tokens is {bucket.max_context_tokens}, the model ends at {model.max_context_tokens}"
        )


def _ring(model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> Iterator[str]:
    ring, rounding = choices.ring, choices.rounding
    if ring.copy_bytes % COPY_GRANULE_BYTES:
        yield f"ring.copy_bytes is {ring.copy_bytes}, needed a multiple of {COPY_GRANULE_BYTES}"
    copy = least_copy_bytes(model, rounding)
    if ring.copy_bytes < copy:
        yield (
            f"ring.copy_bytes is {ring.copy_bytes}, needed at least {copy}: a copy holds a slice of any product, "
            "a row of the router and a block of keys (rounding.slice_columns makes slices shorter)"
        )
    slices = {name: slice_bytes(columns, rounding) for name, columns in products(model, rounding).items()}
    for name, size in slices.items():
        if ring.copy_bytes >= copy and ring.copy_bytes % size:
            yield f"ring.copy_bytes is {ring.copy_bytes}, needed whole slices of {name}, {size} bytes each"
    pieces = chunk_pieces(model, rounding, ring.copy_bytes)
    if CONSUMER_WARPS % pieces:
        yield (
            f"rounding.chunk_tokens is {rounding.chunk_tokens}: {pieces} pieces of {ring.copy_bytes} bytes, needed 1, "
            "2, 4 or 8, one a warp"
        )
    held = least_stages(model, rounding, ring.copy_bytes)
    if ring.stages < held:
        yield (
            f"ring.stages is {ring.stages}, needed at least {held}: so many copies are held at once (all of an "
            "attention chunk's, where it has most: rounding.chunk_tokens)"
        )
    cap = ring.in_flight_cap_bytes
    if cap is not None and not ring.copy_bytes <= cap <= ring.bytes:
        yield (
            f"ring.in_flight_cap_bytes is {cap}, needed from {ring.copy_bytes} (one copy) to {ring.bytes} (the ring), "
            "or none"
        )
    if rounding.chunk_tokens % rounding.page_tokens:
        yield f"rounding.chunk_tokens is {rounding.chunk_tokens}, needed whole pages of {rounding.page_tokens} tokens"
    needed, limit = shared_bytes(model, bucket, choices), chip.shared_memory_per_block_bytes
    if needed > limit:
        fits = most_stages(model, bucket, choices, chip)
        yield (
            f"ring.stages is {ring.stages} x {ring.copy_bytes} bytes: with {needed - ring.bytes} bytes of activations "
            f"and barriers that is {needed} of {limit} bytes of shared memory; at most {fits} stages fit"
        )


def _order(model: ModelSpec, choices: Choices) -> Iterator[str]:
    segments = choices.interleave.segments
    needed = layer_ops(model, choices)
    for op in sorted({segment.op for segment in segments} - set(needed)):
        yield f"interleave.order places {op!r}, this block has {', '.join(needed)}"
    for op in needed:
        found = [segment for segment in segments if segment.op == op]
        parts = found[0].parts if found else 1
        whole = [Segment(op=op, part=part, parts=parts) for part in range(1, parts + 1)]
        if sorted(found, key=lambda s: s.part) != whole:
            parts_found = ", ".join(f"{segment.part}/{segment.parts}" for segment in found) or "nothing"
            yield f"interleave.order places {parts_found} of {op}, needed every part once"
    at = {op: [idx for idx, segment in enumerate(segments) if segment.op == op] for op in needed}
    for first, second in order_pairs(model, choices):
        if at[first] and at[second] and max(at[first]) > min(at[second]):
            yield f"interleave.order has {second} before {first} is complete, which it waits for: SMs would deadlock"


def _placement(model: ModelSpec, bucket: Bucket, choices: Choices, chip: HardwareSpec) -> Iterator[str]:
    interleave = choices.interleave
    grouped = interleave.attention_sms is not None or interleave.takeover_percent > 0
    if interleave.policy == "round_robin" and grouped:
        yield "interleave.policy is round_robin, which knows no SM groups: leave out attention_sms and takeover_percent"
    if interleave.attention_sms is not None and interleave.attention_sms >= chip.num_sms:
        yield f"interleave.attention_sms is {interleave.attention_sms}, needed fewer than the chip's {chip.num_sms} SMs"
    if model.block == "sequential" and interleave.router_with_project and _routed(model):
        yield "interleave.router_with_project is true, but a sequential block's router reads what attention leaves"
    for layer in model.layers:
        if isinstance(layer.mlp, RoutedMlp):
            experts = min(layer.mlp.num_experts, layer.mlp.top_k * bucket.rows)
            units = -(-experts * (layer.mlp.width // PAIRED_COLUMNS) // choices.cut.up)
            if units > MAX_SHARE_UNITS:
                yield f"cut.up is {choices.cut.up}: a share could get {units} units, a list holds {MAX_SHARE_UNITS}"
                break


def _counters(choices: Choices) -> Iterator[str]:
    words, most = choices.counters.words, most_words(choices)
    if words > most:
        loads = choices.interleave.loads
        yield (
            f"counters.words is {words}, needed at most {most} where loads start {loads}: records wait for up to "
            f"{MOST_SOURCES[loads]} operators and hold {min(MAX_LOAD_WAITS, MAX_RUN_WAITS)} waits"
        )
