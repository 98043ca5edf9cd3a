"""From a table, a model and kernel options to the constants that one compilation of csrc is for.

Owns every number that device code knows at compile time; csrc itself holds none of a model. Pure: text in, text out, no
compiler and no card. Called by `compile` and by whoever launches, which must agree on the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field, field_validator

from megakernel.arrival import DEFAULT_ARRIVAL, Arrival
from megakernel.build import BuiltStep
from megakernel.config import ConfigError, Frozen
from megakernel.hardware import HardwareSpec
from megakernel.limits import RESERVED_SHARED_BYTES
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.table import TaskTable
from megakernel.tiling import Choices, Rounding, slice_of
from megakernel.workload import ROW_TILE, Bucket
from megakernel.workspace import CONSUMER_WARPS, RECORD_SLOTS, Workspace, down_columns, workspace
from runtime.gpu.tags import can_look

UNLIKELY = 0x9E3779B9
"""Random data never fold to this in practice, so that what looks used costs no store."""

LEAST_PACE = 0.01
"""Slower, an issuer would not hear in time that it has to stop, and its cycles would not fit their word."""


class KernelOptions(Frozen):
    """What may be compiled either way without changing a result; each default won where it was measured.

    `slots`: records between planner and consumers. `pollers`: warps of a block that poll the run waits and let the
    others go on, `poll_stagger_cycles` apart. `poll_pause_ns`: sleep between polls. `counter_stride`: words between
    counters. `arrival`: see Arrival. `evict_first`: L2 policy of the ring's copies. `proxy_fence`: the issuer fences
    the asynchronous proxy before a record's first copy. `trace`: timestamps of every task. `streaming`: runs read their
    bytes and compute nothing; a trace then has checksums. `fuzz`: random delays before loads and runs.
    `logits_ahead`: planners go to a router's logits, which carry tags (see `tags`), when all that leave them have
    arrived but for one in so many, and these read nothing back; 0: when all have, which did. `pace`: the issuing thread
    has its warp to itself, and issues at most so many times as fast as its SM's share of the chip's streaming rate; 0:
    as fast as it gets to. Of both, None: as `resolved` says.
    """

    consumer_warps: int = Field(default=CONSUMER_WARPS, ge=1, le=16)
    slots: int = Field(default=RECORD_SLOTS, ge=2)
    pollers: int = Field(default=1, ge=1)
    poll_stagger_cycles: int = Field(default=400, ge=0)
    poll_pause_ns: int = Field(default=0, ge=0)
    counter_stride: int = Field(default=32, ge=1)
    arrival: Arrival = DEFAULT_ARRIVAL
    evict_first: bool = True
    proxy_fence: bool = True
    trace: bool = False
    streaming: bool = False
    fuzz: bool = False
    logits_ahead: int | None = Field(default=None, ge=0)
    pace: float | None = Field(default=None, ge=0, le=100)

    @field_validator("pace")
    @classmethod
    def _a_pace_moves(cls, pace: float | None) -> float | None:
        if pace is not None and 0 < pace < LEAST_PACE:
            raise ValueError(f"pace is {pace:g}, needed at least {LEAST_PACE}, or 0 for none")
        return pace


LOGITS_AHEAD = 8
"""Of four numbers tried, what a step of one row was shortest with."""

PACE = 4 / 3
"""Slower, rows wait for their bytes; faster, what fills a ring after a stall stands before everybody's small loads."""


def resolved(step: BuiltStep, options: KernelOptions) -> KernelOptions:
    """The options with what they leave to the step, by what a card was quickest with.

    `logits_ahead` is for one row whose table lets planners look, `pace` for more rows; the streaming mode has neither.
    """
    computes, is_one = not options.streaming, step.bucket.rows == 1
    logits_ahead, pace = options.logits_ahead, options.pace
    if logits_ahead is None:
        can = computes and options.arrival == "read_back" and is_one and can_look(step)
        logits_ahead = LOGITS_AHEAD if can else 0
    if pace is None:
        pace = PACE if computes and not is_one else 0.0
    return options.model_copy(update={"logits_ahead": logits_ahead, "pace": pace})


@dataclass(frozen=True)
class Specialization:
    """Constants by name, in the order in which they are printed."""

    constants: tuple[tuple[str, int | bool | float], ...]

    def __getitem__(self, name: str) -> int:
        """A constant by name."""
        return int(dict(self.constants)[name])

    @property
    def block_threads(self) -> int:
        """Threads of a block: the consumers, and four warps with planner and issuer."""
        return 32 * (self["kConsumerWarps"] + 4)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self["kSharedBytes"]

    def render(self) -> str:
        """Text of `rendered.cuh`."""
        lines = ["#pragma once", "#include <cstdint>", "namespace mk::spec {"]
        for name, value in self.constants:
            if isinstance(value, bool):
                lines.append(f"inline constexpr bool {name} = {'true' if value else 'false'};")
            elif isinstance(value, float):
                lines.append(f"inline constexpr float {name} = {value!r}f;")
            else:
                lines.append(f"inline constexpr uint32_t {name} = {value}u;")
        return "\n".join([*lines, "}  // namespace mk::spec", ""])


def specialize(step: BuiltStep, chip: HardwareSpec, options: KernelOptions) -> Specialization:
    """Constants for the table of a model; ConfigError names what the kernel does not compute."""
    model, bucket, choices = step.model, step.bucket, step.choices
    options = resolved(step, options)
    if not options.streaming:
        found = uncomputed(model, bucket, options) + _not_ahead(bucket, options)
        if found:
            raise ConfigError("the kernel can't compute this step:\n" + "\n".join(f"  {reason}" for reason in found))
    sizes = {
        **_table(step.table, chip, options, workspace(model, bucket, choices)),
        **_model(model, choices.rounding),
        **_bucket(step),
        "kLinearWalk": False,
    }
    return Specialization(tuple(sizes.items()))


def uncomputed(model: ModelSpec, bucket: Bucket, options: KernelOptions) -> list[str]:
    """What of a step the kernel has no mathematics for; an empty list when it can compute all of it."""
    found: list[str] = []
    if bucket.rows > ROW_TILE:
        found.append(f"rows is {bucket.rows}, needed at most {ROW_TILE}: a product takes one tile of rows")
    if options.consumer_warps != CONSUMER_WARPS:
        found.append(
            f"consumer_warps is {options.consumer_warps}, needed {CONSUMER_WARPS}: the order of sums depends on it"
        )
    if options.arrival == "relaxed":
        found.append("arrival is relaxed, which orders no results: take read_back, release or fence")
    if model.queries_per_kv > ROW_TILE:
        found.append(f"{model.queries_per_kv} query heads share a KV head, needed at most {ROW_TILE}")
    if model.head_dim > MAX_HEAD_DIM:
        found.append(f"head_dim is {model.head_dim}, needed at most {MAX_HEAD_DIM}")
    for name, values in (
        ("router scores", {(mlp.score, mlp.renormalise) for mlp in _routed(model)}),
        ("RoPE pairings", {layer.rope.pairing for layer in model.layers if layer.rope}),
    ):
        if len(values) > 1:
            found.append(f"layers differ in their {name}: {', '.join(sorted(map(str, values)))}")
    if any(mlp.top_k > 32 for mlp in _routed(model)):
        found.append("a router picks more than 32 experts of a row")
    return found


def _not_ahead(bucket: Bucket, options: KernelOptions) -> list[str]:
    """Why planners can't go ahead to the router's logits; an empty list when they can, or need not."""
    if not options.logits_ahead:
        return []
    found: list[str] = []
    if options.logits_ahead == 1:
        found.append("logits_ahead is 1, needed 0 or more than 1: a step's first arrival says that its rows are known")
    if options.arrival != "read_back":
        found.append(f"logits_ahead looks at values past every cache, arrival is {options.arrival}: take read_back")
    if bucket.rows > 1:
        found.append(f"logits_ahead is for one row, rows is {bucket.rows}: leave it out")
    return found


def pace_cycles(copy_bytes: int, chip: HardwareSpec, pace: float) -> int:
    """Cycles of an SM from copy to copy, at so many times its share of the chip's streaming rate; 0 for no pace."""
    share = chip.streaming_bytes_per_ns / chip.num_sms
    return round(copy_bytes / (share * pace) * chip.sm_clock_mhz * 1e-3) if pace > 0 else 0


MAX_HEAD_DIM = 128
"""A lane holds four dims of a head."""


def specialize_linear(table: TaskTable, chip: HardwareSpec, options: KernelOptions) -> Specialization:
    """Constants for a table without a model, whose records are copies of one arena."""
    without_model = dict.fromkeys(
        (
            "kLayers",
            "kHidden",
            "kQSize",
            "kKvHeads",
            "kHeadDim",
            "kMaxTopK",
            "kMaxExperts",
            "kRows",
            "kChunkTokens",
            "kPageTokens",
            "kPagesPerRow",
            "kProjectKSplits",
            "kGroup",
            "kMaxWidth",
            "kVocab",
            "kHeadTasks",
            "kMostChunks",
        ),
        1,
    )
    without_model |= {"kHeadDim": 16, "kHidden": 32, "kChunkTokens": 16, "kPageTokens": 16}
    without_model |= dict.fromkeys(("kProjectSlice", "kHiddenSlice", "kQSlice", "kMlpSlice"), 32)
    flags = dict.fromkeys(("kQkNorm", "kRopeHalf", "kSigmoid", "kRenormalise"), False)
    floats = dict.fromkeys(("kNormEps", "kScale", "kLogitScale"), 1.0)
    none = Workspace(slice_slots=1, sum_slots=1, block_tokens=16, bytes=LINEAR_WORKSPACE_BYTES)
    streaming = options.model_copy(update={"streaming": True})
    sizes = {**_table(table, chip, streaming, none), **without_model, **flags, **floats, "kLinearWalk": True}
    return Specialization(tuple(sizes.items()))


LINEAR_WORKSPACE_BYTES = 2048
"""What the runs' structures take where nothing runs."""


def _routed(model: ModelSpec) -> list[RoutedMlp]:
    return [layer.mlp for layer in model.layers if isinstance(layer.mlp, RoutedMlp)]


def _table(
    table: TaskTable, chip: HardwareSpec, options: KernelOptions, slots: Workspace
) -> dict[str, int | bool | float]:
    header = table.header[0]
    copy_bytes, stages = int(header["copy_bytes"]), int(header["ring_stages"])
    ring = copy_bytes * stages
    shared = ring + slots.bytes + RESERVED_SHARED_BYTES
    assert shared <= chip.shared_memory_per_block_bytes, "limits let a table through that does not fit"
    return {
        "kNumSms": table.num_sms,
        "kNumCounters": table.num_counters,
        "kBuiltKinds": sum(1 << int(kind) for kind in {*table.records["kind"].tolist()}),
        "kCopyBytes": copy_bytes,
        "kStages": stages,
        "kInFlightCapBytes": int(header["in_flight_cap_bytes"]),
        "kRingBytes": ring,
        "kReservedBytes": RESERVED_SHARED_BYTES,
        "kWorkspaceBytes": slots.bytes,
        "kSliceSlots": slots.slice_slots,
        "kSumSlots": slots.sum_slots,
        "kBlockTokens": slots.block_tokens,
        "kSharedBytes": shared,
        "kConsumerWarps": options.consumer_warps,
        "kSlots": options.slots,
        "kPollers": options.pollers,
        "kPollStaggerCycles": options.poll_stagger_cycles,
        "kPollPauseNs": options.poll_pause_ns,
        "kCounterStride": options.counter_stride,
        "kArriveWithFence": options.arrival == "fence",
        "kArriveReadBack": options.arrival == "read_back",
        "kArriveRelaxed": options.arrival == "relaxed",
        "kEvictFirst": options.evict_first,
        "kProxyFence": options.proxy_fence,
        "kTrace": options.trace,
        "kStreaming": options.streaming,
        "kFuzz": options.fuzz,
        "kLogitsAhead": 0 if options.streaming else options.logits_ahead or 0,
        "kPaceCycles": pace_cycles(copy_bytes, chip, options.pace or 0.0),
        "kUnlikely": UNLIKELY,
    }


def _model(model: ModelSpec, rounding: Rounding) -> dict[str, int | bool | float]:
    routed, ropes = _routed(model), [layer.rope for layer in model.layers if layer.rope]
    return {
        "kLayers": model.num_layers,
        "kHidden": model.hidden_size,
        "kQSize": model.q_size,
        "kKvHeads": model.num_kv_heads,
        "kHeadDim": model.head_dim,
        "kGroup": model.queries_per_kv,
        "kMaxTopK": max((mlp.top_k for mlp in routed), default=1),
        "kMaxExperts": max((mlp.num_experts for mlp in routed), default=1),
        "kMaxWidth": max(layer.mlp.width for layer in model.layers),
        "kVocab": model.vocab_size,
        "kProjectSlice": slice_of(model.hidden_size // rounding.project_k_splits, rounding),
        "kHiddenSlice": slice_of(model.hidden_size, rounding),
        "kQSlice": slice_of(model.q_size, rounding),
        "kMlpSlice": slice_of(down_columns(model), rounding),
        "kQkNorm": model.qk_norm,
        "kRopeHalf": any(rope.pairing == "half" for rope in ropes),
        "kSigmoid": any(mlp.score == "sigmoid" for mlp in routed),
        "kRenormalise": any(mlp.renormalise for mlp in routed),
        "kNormEps": float(model.norm_eps),
        "kScale": float(model.head_dim**-0.5),
        "kLogitScale": float(model.logit_scale),
    }


def _bucket(step: BuiltStep) -> dict[str, int | bool | float]:
    bucket, rounding = step.bucket, step.choices.rounding
    shapes = {buffer.name: buffer.shape for buffer in step.graph.buffers}
    return {
        "kRows": bucket.rows,
        "kChunkTokens": rounding.chunk_tokens,
        "kPageTokens": rounding.page_tokens,
        "kPagesPerRow": pages_per_row(bucket, step.choices),
        "kProjectKSplits": rounding.project_k_splits,
        "kMostChunks": shapes["partial"][2],
        "kHeadTasks": shapes["best"][1],
    }


def pages_per_row(bucket: Bucket, choices: Choices) -> int:
    """Entries of a row's page table: whole chunks, so that a load never asks where a row ends."""
    rounding = choices.rounding
    chunks = -(-bucket.max_context_tokens // rounding.chunk_tokens)
    return chunks * rounding.chunk_tokens // rounding.page_tokens
