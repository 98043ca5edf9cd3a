"""From a table, a model and kernel options to the constants that one compilation of csrc is for.

Owns every number that device code knows at compile time; csrc itself holds none of a model. Pure: text in, text out, no
compiler and no card. Called by `compile` and by whoever launches, which must agree on the sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from megakernel.build import BuiltStep
from megakernel.config import Frozen
from megakernel.hardware import HardwareSpec
from megakernel.limits import RESERVED_SHARED_BYTES, workspace_bytes
from megakernel.model import ModelSpec, RoutedMlp
from megakernel.table import TaskTable
from megakernel.tiling import Choices
from megakernel.workload import Bucket

UNLIKELY = 0x9E3779B9
"""Random data never fold to this in practice, so that what looks used costs no store."""

Arrival = Literal["release", "fence", "read_back", "relaxed"]
"""How an arrival is ordered after what the run wrote.

`release` and `fence` are sound by the memory model, and wait for all copies in flight to the SM. `read_back` stores
a word, loads it again and adds relaxed: the price of results that their writer reads back. `relaxed` is sound only as
long as runs write nothing.
"""


class KernelOptions(Frozen):
    """What may be compiled either way without changing a result; each default won where it was measured.

    `slots`: records between planner and consumers. `pollers`: warps of a block that poll the run waits and let the
    others go on, `poll_stagger_cycles` apart. `poll_pause_ns`: sleep between polls. `counter_stride`: words between
    counters. `arrival`: see Arrival. `evict_first`: L2 policy of the ring's copies. `proxy_fence`: the issuer fences
    the asynchronous proxy before a record's first copy. `trace`: timestamps and checksums of every task.
    """

    consumer_warps: int = Field(default=8, ge=1, le=16)
    slots: int = Field(default=6, ge=2)
    pollers: int = Field(default=1, ge=1)
    poll_stagger_cycles: int = Field(default=400, ge=0)
    poll_pause_ns: int = Field(default=0, ge=0)
    counter_stride: int = Field(default=32, ge=1)
    arrival: Arrival = "release"
    evict_first: bool = True
    proxy_fence: bool = True
    trace: bool = False


@dataclass(frozen=True)
class Specialization:
    """Constants by name, in the order in which they are printed."""

    constants: tuple[tuple[str, int | bool], ...]

    def __getitem__(self, name: str) -> int:
        """A constant by name."""
        return int(dict(self.constants)[name])

    @property
    def block_threads(self) -> int:
        """Threads of a block: the consumers, the planner's warp and the issuer's."""
        return 32 * (self["kConsumerWarps"] + 2)

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
            else:
                lines.append(f"inline constexpr uint32_t {name} = {value}u;")
        return "\n".join([*lines, "}  // namespace mk::spec", ""])


def specialize(step: BuiltStep, chip: HardwareSpec, options: KernelOptions) -> Specialization:
    """Constants for the table of a model."""
    model, bucket, choices = step.model, step.bucket, step.choices
    sizes = {
        **_table(step.table, chip, options, workspace_bytes(model, bucket)),
        **_model(model),
        **_bucket(bucket, choices),
        "kLinearWalk": False,
    }
    return Specialization(tuple(sizes.items()))


def specialize_linear(table: TaskTable, chip: HardwareSpec, options: KernelOptions) -> Specialization:
    """Constants for a table without a model, whose records are copies of one arena."""
    without_model = dict.fromkeys(
        (
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
        ),
        1,
    )
    sizes = {**_table(table, chip, options, 0), **without_model, "kLinearWalk": True}
    return Specialization(tuple(sizes.items()))


def _table(table: TaskTable, chip: HardwareSpec, options: KernelOptions, workspace: int) -> dict[str, int | bool]:
    header = table.header[0]
    copy_bytes, stages = int(header["copy_bytes"]), int(header["ring_stages"])
    ring = copy_bytes * stages
    shared = ring + workspace + RESERVED_SHARED_BYTES
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
        "kWorkspaceBytes": workspace,
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
        "kUnlikely": UNLIKELY,
    }


def _model(model: ModelSpec) -> dict[str, int | bool]:
    routed = [layer.mlp for layer in model.layers if isinstance(layer.mlp, RoutedMlp)]
    return {
        "kHidden": model.hidden_size,
        "kQSize": model.q_size,
        "kKvHeads": model.num_kv_heads,
        "kHeadDim": model.head_dim,
        "kMaxTopK": max((mlp.top_k for mlp in routed), default=1),
        "kMaxExperts": max((mlp.num_experts for mlp in routed), default=1),
    }


def _bucket(bucket: Bucket, choices: Choices) -> dict[str, int | bool]:
    rounding = choices.rounding
    return {
        "kRows": bucket.rows,
        "kChunkTokens": rounding.chunk_tokens,
        "kPageTokens": rounding.page_tokens,
        "kPagesPerRow": pages_per_row(bucket, choices),
        "kProjectKSplits": rounding.project_k_splits,
    }


def pages_per_row(bucket: Bucket, choices: Choices) -> int:
    """Entries of a row's page table: whole chunks, so that a load never asks where a row ends."""
    rounding = choices.rounding
    chunks = -(-bucket.max_context_tokens // rounding.chunk_tokens)
    return chunks * rounding.chunk_tokens // rounding.page_tokens
