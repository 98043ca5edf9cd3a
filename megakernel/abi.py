"""The binary interface between host and device: records declared once.

Fields are listed here and nowhere else: numpy packs them, and `header` prints them as `csrc/abi.cuh`, which asserts
size and offset of each. A test compares the committed header with what would be printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from megakernel.counters import NONE
from megakernel.tiling import PAIRED_COLUMNS, TILE_COLUMNS, UNIT_ROWS
from megakernel.workload import ROW_TILE

ABI_VERSION = 1
TABLE_MAGIC = 0x4350544B
MAX_LOAD_WAITS = 4
MAX_RUN_WAITS = 4
MAX_INPUTS = 4
MAX_OUTPUTS = 2
MAX_KINDS = 16
MAX_STOPS = 6
SINK_WORDS = 64


class Stop(IntEnum):
    """Why the first block to give up did so."""

    NONE = 0
    LATE = 1
    UNBUILT = 2


class Place(IntEnum):
    """What a thread of the kernel waits for, or does, when it gives up."""

    NONE = 0
    LOAD_WAIT = 1
    RUN_WAIT = 2
    LOAD = 3
    RECORD = 4
    RECORD_SLOT = 5
    STAGE = 6
    IN_FLIGHT_CAP = 7
    DATA = 8
    MEETING = 9
    BOUNDARY = 10


class Order(IntEnum):
    """What the host asks of a row at a step boundary."""

    NONE = 0
    JOIN = 1
    DROP = 2
    EXTEND = 3


TOKEN_ENDED = 1 << 31
"""In a word of `tokens_out`: the row's last token."""

TOKEN_TAKEN = 1 << 30
"""The row's command was carried out after this step."""

TOKEN_MASK = TOKEN_TAKEN - 1
TOKEN_NONE = TOKEN_MASK
"""Nothing could be drawn: the largest logit is not a finite number."""

TOKEN_IDLE = TOKEN_MASK - 1
"""The row was not active."""

BEST_WORDS = 4
"""What a head task leaves of a row: the best draw and its token, the best logit and its token."""


CONSTANTS: dict[str, int] = {
    "kAbiVersion": ABI_VERSION,
    "kTableMagic": TABLE_MAGIC,
    "kNone": NONE,
    "kMaxLoadWaits": MAX_LOAD_WAITS,
    "kMaxRunWaits": MAX_RUN_WAITS,
    "kMaxInputs": MAX_INPUTS,
    "kMaxOutputs": MAX_OUTPUTS,
    "kMaxKinds": MAX_KINDS,
    "kRowTile": ROW_TILE,
    "kUnitRows": UNIT_ROWS,
    "kPairedColumns": PAIRED_COLUMNS,
    "kTileColumns": TILE_COLUMNS,
    "kMaxStops": MAX_STOPS,
    "kSinkWords": SINK_WORDS,
    "kTokenEnded": TOKEN_ENDED,
    "kTokenTaken": TOKEN_TAKEN,
    "kTokenNone": TOKEN_NONE,
    "kTokenIdle": TOKEN_IDLE,
}


@dataclass(frozen=True)
class Field:
    """One member: C type name, numpy type, array length (0: scalar) and meaning."""

    name: str
    type: str
    meaning: str
    length: int = 0


@dataclass(frozen=True)
class Struct:
    """A record, its members in order."""

    name: str
    fields: tuple[Field, ...]

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Numpy layout, with the alignment rules of C."""
        members = [
            (field.name, _numpy_type(field.type), (field.length,)) if field.length else
            (field.name, _numpy_type(field.type))
            for field in self.fields
        ]  # fmt: skip
        return np.dtype(members, align=True)


WAIT = Struct(
    "Wait",
    (
        Field("counter", "uint16_t", "index of the counter"),
        Field("lag", "uint16_t", "0: arrivals of this step; 1: of the previous step (met in the first)"),
        Field("need", "uint32_t", "arrivals needed in that step"),
    ),
)

RECORD = Struct(
    "Record",
    (
        Field("kind", "uint16_t", "TaskKind"),
        Field("layer", "uint16_t", "layer, kNone outside the layers"),
        Field("task", "uint32_t", "number of the task in reference order"),
        Field("begin", "uint32_t", "first static unit"),
        Field("end", "uint32_t", "one past the last static unit"),
        Field("share", "uint32_t", "this task's share of device-found units"),
        Field("shares", "uint32_t", "number of shares; 0: the units are static"),
        Field("router_begin", "uint16_t", "first router row"),
        Field("router_end", "uint16_t", "one past the last router row"),
        Field("row_tile_begin", "uint16_t", "first tile of eight rows"),
        Field("row_tile_count", "uint16_t", "tiles of eight rows"),
        Field("inputs", "uint16_t", "buffers read, kNone: absent", MAX_INPUTS),
        Field("outputs", "uint16_t", "buffers written, kNone: absent", MAX_OUTPUTS),
        Field("arrive", "uint16_t", "counter raised by one when the run has ended"),
        Field("early", "uint16_t", "counter raised by one when the early part has ended"),
        Field("num_load_waits", "uint16_t", "waits before the first copy is issued"),
        Field("num_run_waits", "uint16_t", "waits before the run"),
        Field("hold_copies", "uint16_t", "ring stages that the run keeps before it frees the first"),
        Field("reserved", "uint16_t", "zero; makes the record 128 bytes, a whole number of 16-byte loads", 5),
        Field("load_waits", "Wait", "see num_load_waits", MAX_LOAD_WAITS),
        Field("run_waits", "Wait", "see num_run_waits", MAX_RUN_WAITS),
    ),
)

HEADER = Struct(
    "TableHeader",
    (
        Field("magic", "uint32_t", "kTableMagic"),
        Field("abi_version", "uint32_t", "kAbiVersion"),
        Field("num_sms", "uint32_t", "lists of records"),
        Field("num_records", "uint32_t", "records of all lists"),
        Field("num_counters", "uint32_t", "counters"),
        Field("num_buffers", "uint32_t", "buffers that records name"),
        Field("rows", "uint32_t", "row slots"),
        Field("max_context_tokens", "uint32_t", "longest row, current token included"),
        Field("copy_bytes", "uint32_t", "bytes of one ring stage"),
        Field("ring_stages", "uint32_t", "stages of the ring"),
        Field("in_flight_cap_bytes", "uint32_t", "bytes requested and not landed; 0: as many as the ring holds"),
        Field("chunk_tokens", "uint32_t", "tokens of one attention chunk"),
        Field("page_tokens", "uint32_t", "tokens of one KV page"),
        Field("project_k_splits", "uint32_t", "K splits of the projection"),
    ),
)

LAYER = Struct(
    "Layer",
    (
        Field("project", "uint64_t", "address of the packed Q, K, V weights"),
        Field("router", "uint64_t", "address of the router's rows; 0: none"),
        Field("kv", "uint64_t", "address of the pool of KV pages: [page, KV head, K or V, token, head_dim]"),
        Field("output", "uint64_t", "address of the output projection"),
        Field("up", "uint64_t", "address of gate and up weights, expert after expert"),
        Field("down", "uint64_t", "address of down weights, expert after expert"),
        Field("input_norm", "uint64_t", "address of the norm before attention, and before a parallel block's MLP"),
        Field("mlp_norm", "uint64_t", "address of the norm before the MLP and its router"),
        Field("q_norm", "uint64_t", "address of the norm of query heads; 0: none"),
        Field("k_norm", "uint64_t", "address of the norm of key heads; 0: none"),
        Field("rotary", "uint64_t", "address of cosine and sine, bfloat16 pairs [position, head_dim / 2]; 0: no RoPE"),
        Field("pages", "uint64_t", "uint32_t[rows, pages a row]: page ids of every row for this layer's group"),
        Field("window_tokens", "uint32_t", "attention window; 0: all of the context"),
        Field("num_experts", "uint32_t", "routed experts; 0: a dense MLP"),
        Field("top_k", "uint32_t", "experts of a row"),
        Field("mlp_width", "uint32_t", "width of the MLP, or of one expert"),
    ),
)

LAUNCH = Struct(
    "Launch",
    (
        Field("offsets", "uint64_t", "uint32_t[num_sms + 1]: first record of every list"),
        Field("totals", "uint64_t", "uint32_t[num_counters]: arrivals a step"),
        Field("records", "uint64_t", "Record[num_records]"),
        Field("counters", "uint64_t", "the counters, kCounterStride words apart"),
        Field("buffers", "uint64_t", "uint64_t[num_buffers]: addresses of the buffers that records name"),
        Field("layers", "uint64_t", "Layer[num_layers]"),
        Field("head", "uint64_t", "address of the head's rows"),
        Field("embedding", "uint64_t", "address of the embedding's rows"),
        Field("final_norm", "uint64_t", "address of the norm before the head"),
        Field("rows", "uint64_t", "RowState[rows]"),
        Field("routed", "uint64_t", "uint32_t[layers, rows, most top_k]: experts of every row, streaming mode only"),
        Field("arena", "uint64_t", "address of the linear walk's bytes"),
        Field("present", "uint64_t", "uint32_t: blocks that have started"),
        Field("abort", "uint64_t", "uint32_t: not 0 once a block has given up"),
        Field("report", "uint64_t", "Report in the host's memory, written by the first block to give up"),
        Field("progress", "uint64_t", "Progress[num_sms], written as a block leaves"),
        Field("trace", "uint64_t", "Trace[num_records] of step trace_step"),
        Field("clocks", "uint64_t", "Clocks[num_sms], written when a trace is taken"),
        Field("sink", "uint64_t", "uint32_t[1 + num_sms, 64]: takes what must look used"),
        Field(
            "tokens_out",
            "uint64_t",
            "uint64_t[tokens_out_steps, rows] in the host's memory: step + 1 in the upper half, token in the lower",
        ),
        Field("mailbox", "uint64_t", "Mailbox in the host's memory; 0: the launch runs its steps whatever happens"),
        Field("pages", "uint64_t", "uint32_t[page_groups, rows, pages a row]: the page tables of all groups"),
        Field("pages_in", "uint64_t", "the same in the host's memory: where a command's pages come from"),
        Field("boundary", "uint64_t", "uint64_t: steps open to planning, bit 32: and no more will be"),
        Field("deadline_cycles", "uint64_t", "longest wait before a block gives up"),
        Field("first_step", "uint32_t", "number of the first step; counters stand at first_step * total"),
        Field("num_steps", "uint32_t", "steps of this launch"),
        Field("trace_step", "uint32_t", "step that is traced"),
        Field("tokens_out_steps", "uint32_t", "a power of two: step s leaves its tokens at s modulo this"),
        Field("mailbox_sm", "uint32_t", "list whose block reads the mailbox: the one that samples"),
        Field("page_groups", "uint32_t", "groups of layers with page tables of their own"),
        Field("fuzz_seed", "uint32_t", "fuzzing: of the delays"),
        Field("fuzz_cycles", "uint32_t", "fuzzing: one more than the longest delay before a load or a run"),
        Field(
            "load_cycles", "uint32_t", "streaming mode, by kind: spent by the producer after the load waits", MAX_KINDS
        ),
        Field("early_cycles", "uint32_t", "streaming mode, by kind: spent before the early signal", MAX_KINDS),
        Field("run_cycles", "uint32_t", "streaming mode, by kind: spent before the first copy is used", MAX_KINDS),
    ),
)

ROW_STATE = Struct(
    "RowState",
    (
        Field("position", "uint32_t", "of the token being decoded, 0-based"),
        Field("active", "uint32_t", "0: the row is empty, or has ended"),
        Field("end_position", "uint32_t", "the row ends when its next position would be this"),
        Field("num_stops", "uint32_t", "stop ids"),
        Field("temperature", "float", "0: greedy"),
        Field("top_p", "float", "1: all tokens"),
        Field("min_p", "float", "0: all tokens"),
        Field("top_k", "uint32_t", "0: all tokens"),
        Field("seed", "uint64_t", "of the row's noise"),
        Field("stops", "uint32_t", "token ids that end the row", MAX_STOPS),
    ),
)

COMMAND = Struct(
    "Command",
    (
        Field("order", "uint32_t", "Order"),
        Field("token", "uint32_t", "join: the row's first token"),
        Field("pages_begin", "uint32_t", "first entry of the row's page tables that is new, in every group"),
        Field("pages_end", "uint32_t", "one past the last"),
        Field("state", "RowState", "join: the row's; extend: its end_position"),
    ),
)

MAILBOX = Struct(
    "Mailbox",
    (
        Field("halt", "uint32_t", "not 0: the chain ends"),
        Field("read", "uint32_t", "steps of this launch whose tokens the host has read"),
        Field("posted", "uint32_t", "commands for each row, since the launch", ROW_TILE),
        Field("reserved", "uint32_t", "makes what is polled half a line", 6),
        Field("commands", "Command", "of each row, whole before it is posted", ROW_TILE),
    ),
)

REPORT = Struct(
    "Report",
    (
        Field("stop", "uint32_t", "Stop"),
        Field("place", "uint32_t", "Place"),
        Field("sm", "uint32_t", "list whose block gave up first"),
        Field("step", "uint32_t", "step it was in"),
        Field("record", "uint32_t", "record of its list"),
        Field("task", "uint32_t", "that record's task"),
        Field("counter", "uint32_t", "counter waited for; kNone: none"),
        Field("wanted", "uint32_t", "its awaited value, or the copy awaited"),
        Field("seen", "uint32_t", "its value when last polled"),
        Field("present", "uint32_t", "blocks that had started"),
        Field("waited_cycles", "uint64_t", "how long"),
    ),
)

PROGRESS = Struct(
    "Progress",
    (
        Field("loaded", "uint32_t", "records of this launch, all its steps, whose copies were all issued"),
        Field("arrived", "uint32_t", "records of this launch that ran to their end and arrived"),
    ),
)

TRACE = Struct(
    "Trace",
    (
        Field("load_start", "uint32_t", "load waits met; cycles since Clocks.begin_cycles, like all times here"),
        Field("landed", "uint32_t", "last copy seen by the consumers"),
        Field("run_wait", "uint32_t", "consumers hold the record"),
        Field("run_start", "uint32_t", "run waits met"),
        Field("end", "uint32_t", "run over, arrival sent"),
        Field("copies", "uint32_t", "copies of the load"),
        Field("bytes", "uint32_t", "bytes of the load"),
        Field("checksum", "uint32_t", "streaming mode: exclusive or of all 32-bit words that the run consumed"),
        Field("staged", "uint32_t", "cycles before the first warp's first copy: activations, queries"),
        Field("waited", "uint32_t", "cycles that the first warp waited for data"),
        Field("worked", "uint32_t", "cycles that it worked on data"),
        Field("early", "uint32_t", "early signal sent"),
        Field("first_issue", "uint32_t", "first copy issued"),
        Field("last_issue", "uint32_t", "last copy issued"),
    ),
)

CLOCKS = Struct(
    "Clocks",
    (
        Field("begin_cycles", "uint64_t", "this SM's clock at a tick of the card's timer"),
        Field("begin_ns", "uint64_t", "the card's timer at that tick"),
        Field("end_cycles", "uint64_t", "the same at the end"),
        Field("end_ns", "uint64_t", "the same at the end"),
    ),
)

ENUMS: tuple[type[IntEnum], ...] = (Stop, Place, Order)

STRUCTS = (WAIT, RECORD, HEADER, LAYER, LAUNCH, ROW_STATE, COMMAND, MAILBOX, REPORT, PROGRESS, TRACE, CLOCKS)

_NUMPY_TYPES = {"uint16_t": "<u2", "uint32_t": "<u4", "uint64_t": "<u8", "float": "<f4"}


def _numpy_type(name: str) -> np.dtype[np.void] | str:
    nested = next((struct for struct in STRUCTS if struct.name == name), None)
    return nested.dtype if nested else _NUMPY_TYPES[name]
