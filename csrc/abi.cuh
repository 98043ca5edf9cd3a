// Generated from megakernel/abi.py by `runtime abi --write`; do not edit.
#pragma once
#include <cstddef>
#include <cstdint>

#ifdef __CUDACC__
#define MK_HOST_DEVICE __host__ __device__
#else
#define MK_HOST_DEVICE
#endif

namespace mk::abi {

inline constexpr uint32_t kAbiVersion = 1u;
inline constexpr uint32_t kTableMagic = 1129337931u;
inline constexpr uint32_t kNone = 65535u;
inline constexpr uint32_t kMaxLoadWaits = 4u;
inline constexpr uint32_t kMaxRunWaits = 4u;
inline constexpr uint32_t kMaxInputs = 4u;
inline constexpr uint32_t kMaxOutputs = 2u;
inline constexpr uint32_t kMaxKinds = 16u;
inline constexpr uint32_t kRowTile = 8u;
inline constexpr uint32_t kUnitRows = 16u;
inline constexpr uint32_t kPairedColumns = 8u;
inline constexpr uint32_t kTileColumns = 32u;
inline constexpr uint32_t kMaxStops = 6u;
inline constexpr uint32_t kSinkWords = 64u;
inline constexpr uint32_t kTokenEnded = 2147483648u;
inline constexpr uint32_t kTokenTaken = 1073741824u;
inline constexpr uint32_t kTokenNone = 1073741823u;
inline constexpr uint32_t kTokenIdle = 1073741822u;

enum class TaskKind : uint16_t {
  kEmbed = 1,
  kProject = 2,
  kAttend = 3,
  kMerge = 4,
  kOutput = 5,
  kUp = 6,
  kDown = 7,
  kHead = 8,
  kSample = 9,
};

enum class Stop : uint32_t {
  kNone = 0,
  kLate = 1,
  kUnbuilt = 2,
};

enum class Place : uint32_t {
  kNone = 0,
  kLoadWait = 1,
  kRunWait = 2,
  kLoad = 3,
  kRecord = 4,
  kRecordSlot = 5,
  kStage = 6,
  kInFlightCap = 7,
  kData = 8,
  kMeeting = 9,
  kBoundary = 10,
};

enum class Order : uint32_t {
  kNone = 0,
  kJoin = 1,
  kDrop = 2,
  kExtend = 3,
};

struct Wait {
  uint16_t counter;  // index of the counter
  uint16_t lag;  // 0: arrivals of this step; 1: of the previous step (met in the first)
  uint32_t need;  // arrivals needed in that step
};
static_assert(sizeof(Wait) == 8);
static_assert(offsetof(Wait, counter) == 0);
static_assert(offsetof(Wait, lag) == 2);
static_assert(offsetof(Wait, need) == 4);

struct Record {
  uint16_t kind;  // TaskKind
  uint16_t layer;  // layer, kNone outside the layers
  uint32_t task;  // number of the task in reference order
  uint32_t begin;  // first static unit
  uint32_t end;  // one past the last static unit
  uint32_t share;  // this task's share of device-found units
  uint32_t shares;  // number of shares; 0: the units are static
  uint16_t router_begin;  // first router row
  uint16_t router_end;  // one past the last router row
  uint16_t row_tile_begin;  // first tile of eight rows
  uint16_t row_tile_count;  // tiles of eight rows
  uint16_t inputs[4];  // buffers read, kNone: absent
  uint16_t outputs[2];  // buffers written, kNone: absent
  uint16_t arrive;  // counter raised by one when the run has ended
  uint16_t early;  // counter raised by one when the early part has ended
  uint16_t num_load_waits;  // waits before the first copy is issued
  uint16_t num_run_waits;  // waits before the run
  uint16_t hold_copies;  // ring stages that the run keeps before it frees the first
  uint16_t reserved[5];  // zero; makes the record 128 bytes, a whole number of 16-byte loads
  Wait load_waits[4];  // see num_load_waits
  Wait run_waits[4];  // see num_run_waits
};
static_assert(sizeof(Record) == 128);
static_assert(offsetof(Record, kind) == 0);
static_assert(offsetof(Record, layer) == 2);
static_assert(offsetof(Record, task) == 4);
static_assert(offsetof(Record, begin) == 8);
static_assert(offsetof(Record, end) == 12);
static_assert(offsetof(Record, share) == 16);
static_assert(offsetof(Record, shares) == 20);
static_assert(offsetof(Record, router_begin) == 24);
static_assert(offsetof(Record, router_end) == 26);
static_assert(offsetof(Record, row_tile_begin) == 28);
static_assert(offsetof(Record, row_tile_count) == 30);
static_assert(offsetof(Record, inputs) == 32);
static_assert(offsetof(Record, outputs) == 40);
static_assert(offsetof(Record, arrive) == 44);
static_assert(offsetof(Record, early) == 46);
static_assert(offsetof(Record, num_load_waits) == 48);
static_assert(offsetof(Record, num_run_waits) == 50);
static_assert(offsetof(Record, hold_copies) == 52);
static_assert(offsetof(Record, reserved) == 54);
static_assert(offsetof(Record, load_waits) == 64);
static_assert(offsetof(Record, run_waits) == 96);

struct TableHeader {
  uint32_t magic;  // kTableMagic
  uint32_t abi_version;  // kAbiVersion
  uint32_t num_sms;  // lists of records
  uint32_t num_records;  // records of all lists
  uint32_t num_counters;  // counters
  uint32_t num_buffers;  // buffers that records name
  uint32_t rows;  // row slots
  uint32_t max_context_tokens;  // longest row, current token included
  uint32_t copy_bytes;  // bytes of one ring stage
  uint32_t ring_stages;  // stages of the ring
  uint32_t in_flight_cap_bytes;  // bytes requested and not landed; 0: as many as the ring holds
  uint32_t chunk_tokens;  // tokens of one attention chunk
  uint32_t page_tokens;  // tokens of one KV page
  uint32_t project_k_splits;  // K splits of the projection
};
static_assert(sizeof(TableHeader) == 56);
static_assert(offsetof(TableHeader, magic) == 0);
static_assert(offsetof(TableHeader, abi_version) == 4);
static_assert(offsetof(TableHeader, num_sms) == 8);
static_assert(offsetof(TableHeader, num_records) == 12);
static_assert(offsetof(TableHeader, num_counters) == 16);
static_assert(offsetof(TableHeader, num_buffers) == 20);
static_assert(offsetof(TableHeader, rows) == 24);
static_assert(offsetof(TableHeader, max_context_tokens) == 28);
static_assert(offsetof(TableHeader, copy_bytes) == 32);
static_assert(offsetof(TableHeader, ring_stages) == 36);
static_assert(offsetof(TableHeader, in_flight_cap_bytes) == 40);
static_assert(offsetof(TableHeader, chunk_tokens) == 44);
static_assert(offsetof(TableHeader, page_tokens) == 48);
static_assert(offsetof(TableHeader, project_k_splits) == 52);

struct Layer {
  uint64_t project;  // address of the packed Q, K, V weights
  uint64_t router;  // address of the router's rows; 0: none
  uint64_t kv;  // address of the pool of KV pages: [page, KV head, K or V, token, head_dim]
  uint64_t output;  // address of the output projection
  uint64_t up;  // address of gate and up weights, expert after expert
  uint64_t down;  // address of down weights, expert after expert
  uint64_t input_norm;  // address of the norm before attention, and before a parallel block's MLP
  uint64_t mlp_norm;  // address of the norm before the MLP and its router
  uint64_t q_norm;  // address of the norm of query heads; 0: none
  uint64_t k_norm;  // address of the norm of key heads; 0: none
  uint64_t rotary;  // address of cosine and sine, bfloat16 pairs [position, head_dim / 2]; 0: no RoPE
  uint64_t pages;  // uint32_t[rows, pages a row]: page ids of every row for this layer's group
  uint32_t window_tokens;  // attention window; 0: all of the context
  uint32_t num_experts;  // routed experts; 0: a dense MLP
  uint32_t top_k;  // experts of a row
  uint32_t mlp_width;  // width of the MLP, or of one expert
};
static_assert(sizeof(Layer) == 112);
static_assert(offsetof(Layer, project) == 0);
static_assert(offsetof(Layer, router) == 8);
static_assert(offsetof(Layer, kv) == 16);
static_assert(offsetof(Layer, output) == 24);
static_assert(offsetof(Layer, up) == 32);
static_assert(offsetof(Layer, down) == 40);
static_assert(offsetof(Layer, input_norm) == 48);
static_assert(offsetof(Layer, mlp_norm) == 56);
static_assert(offsetof(Layer, q_norm) == 64);
static_assert(offsetof(Layer, k_norm) == 72);
static_assert(offsetof(Layer, rotary) == 80);
static_assert(offsetof(Layer, pages) == 88);
static_assert(offsetof(Layer, window_tokens) == 96);
static_assert(offsetof(Layer, num_experts) == 100);
static_assert(offsetof(Layer, top_k) == 104);
static_assert(offsetof(Layer, mlp_width) == 108);

struct Launch {
  uint64_t offsets;  // uint32_t[num_sms + 1]: first record of every list
  uint64_t totals;  // uint32_t[num_counters]: arrivals a step
  uint64_t records;  // Record[num_records]
  uint64_t counters;  // the counters, kCounterStride words apart
  uint64_t buffers;  // uint64_t[num_buffers]: addresses of the buffers that records name
  uint64_t layers;  // Layer[num_layers]
  uint64_t head;  // address of the head's rows
  uint64_t embedding;  // address of the embedding's rows
  uint64_t final_norm;  // address of the norm before the head
  uint64_t rows;  // RowState[rows]
  uint64_t routed;  // uint32_t[layers, rows, most top_k]: experts of every row, streaming mode only
  uint64_t arena;  // address of the linear walk's bytes
  uint64_t present;  // uint32_t: blocks that have started
  uint64_t abort;  // uint32_t: not 0 once a block has given up
  uint64_t report;  // Report in the host's memory, written by the first block to give up
  uint64_t progress;  // Progress[num_sms], written as a block leaves
  uint64_t trace;  // Trace[num_records] of step trace_step
  uint64_t clocks;  // Clocks[num_sms], written when a trace is taken
  uint64_t sink;  // uint32_t[1 + num_sms, 64]: takes what must look used
  uint64_t tokens_out;  // uint64_t[tokens_out_steps, rows] in the host's memory: step + 1 in the upper half, token in the lower
  uint64_t mailbox;  // Mailbox in the host's memory; 0: the launch runs its steps whatever happens
  uint64_t pages;  // uint32_t[page_groups, rows, pages a row]: the page tables of all groups
  uint64_t pages_in;  // the same in the host's memory: where a command's pages come from
  uint64_t boundary;  // uint64_t: steps open to planning, bit 32: and no more will be
  uint64_t deadline_cycles;  // longest wait before a block gives up
  uint32_t first_step;  // number of the first step; counters stand at first_step * total
  uint32_t num_steps;  // steps of this launch
  uint32_t trace_step;  // step that is traced
  uint32_t tokens_out_steps;  // a power of two: step s leaves its tokens at s modulo this
  uint32_t mailbox_sm;  // list whose block reads the mailbox: the one that samples
  uint32_t page_groups;  // groups of layers with page tables of their own
  uint32_t fuzz_seed;  // fuzzing: of the delays
  uint32_t fuzz_cycles;  // fuzzing: one more than the longest delay before a load or a run
  uint32_t load_cycles[16];  // streaming mode, by kind: spent by the producer after the load waits
  uint32_t early_cycles[16];  // streaming mode, by kind: spent before the early signal
  uint32_t run_cycles[16];  // streaming mode, by kind: spent before the first copy is used
};
static_assert(sizeof(Launch) == 424);
static_assert(offsetof(Launch, offsets) == 0);
static_assert(offsetof(Launch, totals) == 8);
static_assert(offsetof(Launch, records) == 16);
static_assert(offsetof(Launch, counters) == 24);
static_assert(offsetof(Launch, buffers) == 32);
static_assert(offsetof(Launch, layers) == 40);
static_assert(offsetof(Launch, head) == 48);
static_assert(offsetof(Launch, embedding) == 56);
static_assert(offsetof(Launch, final_norm) == 64);
static_assert(offsetof(Launch, rows) == 72);
static_assert(offsetof(Launch, routed) == 80);
static_assert(offsetof(Launch, arena) == 88);
static_assert(offsetof(Launch, present) == 96);
static_assert(offsetof(Launch, abort) == 104);
static_assert(offsetof(Launch, report) == 112);
static_assert(offsetof(Launch, progress) == 120);
static_assert(offsetof(Launch, trace) == 128);
static_assert(offsetof(Launch, clocks) == 136);
static_assert(offsetof(Launch, sink) == 144);
static_assert(offsetof(Launch, tokens_out) == 152);
static_assert(offsetof(Launch, mailbox) == 160);
static_assert(offsetof(Launch, pages) == 168);
static_assert(offsetof(Launch, pages_in) == 176);
static_assert(offsetof(Launch, boundary) == 184);
static_assert(offsetof(Launch, deadline_cycles) == 192);
static_assert(offsetof(Launch, first_step) == 200);
static_assert(offsetof(Launch, num_steps) == 204);
static_assert(offsetof(Launch, trace_step) == 208);
static_assert(offsetof(Launch, tokens_out_steps) == 212);
static_assert(offsetof(Launch, mailbox_sm) == 216);
static_assert(offsetof(Launch, page_groups) == 220);
static_assert(offsetof(Launch, fuzz_seed) == 224);
static_assert(offsetof(Launch, fuzz_cycles) == 228);
static_assert(offsetof(Launch, load_cycles) == 232);
static_assert(offsetof(Launch, early_cycles) == 296);
static_assert(offsetof(Launch, run_cycles) == 360);

struct RowState {
  uint32_t position;  // of the token being decoded, 0-based
  uint32_t active;  // 0: the row is empty, or has ended
  uint32_t end_position;  // the row ends when its next position would be this
  uint32_t num_stops;  // stop ids
  float temperature;  // 0: greedy
  float top_p;  // 1: all tokens
  float min_p;  // 0: all tokens
  uint32_t top_k;  // 0: all tokens
  uint64_t seed;  // of the row's noise
  uint32_t stops[6];  // token ids that end the row
};
static_assert(sizeof(RowState) == 64);
static_assert(offsetof(RowState, position) == 0);
static_assert(offsetof(RowState, active) == 4);
static_assert(offsetof(RowState, end_position) == 8);
static_assert(offsetof(RowState, num_stops) == 12);
static_assert(offsetof(RowState, temperature) == 16);
static_assert(offsetof(RowState, top_p) == 20);
static_assert(offsetof(RowState, min_p) == 24);
static_assert(offsetof(RowState, top_k) == 28);
static_assert(offsetof(RowState, seed) == 32);
static_assert(offsetof(RowState, stops) == 40);

struct Command {
  uint32_t order;  // Order
  uint32_t token;  // join: the row's first token
  uint32_t pages_begin;  // first entry of the row's page tables that is new, in every group
  uint32_t pages_end;  // one past the last
  RowState state;  // join: the row's; extend: its end_position
};
static_assert(sizeof(Command) == 80);
static_assert(offsetof(Command, order) == 0);
static_assert(offsetof(Command, token) == 4);
static_assert(offsetof(Command, pages_begin) == 8);
static_assert(offsetof(Command, pages_end) == 12);
static_assert(offsetof(Command, state) == 16);

struct Mailbox {
  uint32_t halt;  // not 0: the chain ends
  uint32_t read;  // steps of this launch whose tokens the host has read
  uint32_t posted[8];  // commands for each row, since the launch
  uint32_t reserved[6];  // makes what is polled half a line
  Command commands[8];  // of each row, whole before it is posted
};
static_assert(sizeof(Mailbox) == 704);
static_assert(offsetof(Mailbox, halt) == 0);
static_assert(offsetof(Mailbox, read) == 4);
static_assert(offsetof(Mailbox, posted) == 8);
static_assert(offsetof(Mailbox, reserved) == 40);
static_assert(offsetof(Mailbox, commands) == 64);

struct Report {
  uint32_t stop;  // Stop
  uint32_t place;  // Place
  uint32_t sm;  // list whose block gave up first
  uint32_t step;  // step it was in
  uint32_t record;  // record of its list
  uint32_t task;  // that record's task
  uint32_t counter;  // counter waited for; kNone: none
  uint32_t wanted;  // its awaited value, or the copy awaited
  uint32_t seen;  // its value when last polled
  uint32_t present;  // blocks that had started
  uint64_t waited_cycles;  // how long
};
static_assert(sizeof(Report) == 48);
static_assert(offsetof(Report, stop) == 0);
static_assert(offsetof(Report, place) == 4);
static_assert(offsetof(Report, sm) == 8);
static_assert(offsetof(Report, step) == 12);
static_assert(offsetof(Report, record) == 16);
static_assert(offsetof(Report, task) == 20);
static_assert(offsetof(Report, counter) == 24);
static_assert(offsetof(Report, wanted) == 28);
static_assert(offsetof(Report, seen) == 32);
static_assert(offsetof(Report, present) == 36);
static_assert(offsetof(Report, waited_cycles) == 40);

struct Progress {
  uint32_t loaded;  // records of this launch, all its steps, whose copies were all issued
  uint32_t arrived;  // records of this launch that ran to their end and arrived
};
static_assert(sizeof(Progress) == 8);
static_assert(offsetof(Progress, loaded) == 0);
static_assert(offsetof(Progress, arrived) == 4);

struct Trace {
  uint32_t load_start;  // load waits met; cycles since Clocks.begin_cycles, like all times here
  uint32_t landed;  // last copy seen by the consumers
  uint32_t run_wait;  // consumers hold the record
  uint32_t run_start;  // run waits met
  uint32_t end;  // run over, arrival sent
  uint32_t copies;  // copies of the load
  uint32_t bytes;  // bytes of the load
  uint32_t checksum;  // streaming mode: exclusive or of all 32-bit words that the run consumed
  uint32_t staged;  // cycles before the first warp's first copy: activations, queries
  uint32_t waited;  // cycles that the first warp waited for data
  uint32_t worked;  // cycles that it worked on data
  uint32_t early;  // early signal sent
  uint32_t first_issue;  // first copy issued
  uint32_t last_issue;  // last copy issued
};
static_assert(sizeof(Trace) == 56);
static_assert(offsetof(Trace, load_start) == 0);
static_assert(offsetof(Trace, landed) == 4);
static_assert(offsetof(Trace, run_wait) == 8);
static_assert(offsetof(Trace, run_start) == 12);
static_assert(offsetof(Trace, end) == 16);
static_assert(offsetof(Trace, copies) == 20);
static_assert(offsetof(Trace, bytes) == 24);
static_assert(offsetof(Trace, checksum) == 28);
static_assert(offsetof(Trace, staged) == 32);
static_assert(offsetof(Trace, waited) == 36);
static_assert(offsetof(Trace, worked) == 40);
static_assert(offsetof(Trace, early) == 44);
static_assert(offsetof(Trace, first_issue) == 48);
static_assert(offsetof(Trace, last_issue) == 52);

struct Clocks {
  uint64_t begin_cycles;  // this SM's clock at a tick of the card's timer
  uint64_t begin_ns;  // the card's timer at that tick
  uint64_t end_cycles;  // the same at the end
  uint64_t end_ns;  // the same at the end
};
static_assert(sizeof(Clocks) == 32);
static_assert(offsetof(Clocks, begin_cycles) == 0);
static_assert(offsetof(Clocks, begin_ns) == 8);
static_assert(offsetof(Clocks, end_cycles) == 16);
static_assert(offsetof(Clocks, end_ns) == 24);

// Arithmetic on live state, translated from megakernel/live.py.

// First of the `units` that share `share` of `shares` takes; it ends where the next share begins.
MK_HOST_DEVICE inline constexpr uint32_t share_begin(uint32_t units, uint32_t share, uint32_t shares) {
  return static_cast<uint32_t>(((int64_t{units} * int64_t{share}) / int64_t{shares}));
}

// First attention chunk that the token at `position` sees; window 0 means all of the context.
MK_HOST_DEVICE inline constexpr uint32_t chunk_begin(uint32_t position, uint32_t window_tokens, uint32_t chunk_tokens) {
  return static_cast<uint32_t>(((int64_t{window_tokens} > int64_t{0}) ? ((((int64_t{position} + int64_t{1}) - int64_t{window_tokens}) > int64_t{0} ? ((int64_t{position} + int64_t{1}) - int64_t{window_tokens}) : int64_t{0}) / int64_t{chunk_tokens}) : int64_t{0}));
}

// One past the chunk that holds `position` itself.
MK_HOST_DEVICE inline constexpr uint32_t chunk_end(uint32_t position, uint32_t chunk_tokens) {
  return static_cast<uint32_t>(((int64_t{position} / int64_t{chunk_tokens}) + int64_t{1}));
}

// Attention units of one row: (KV head, chunk) pairs, chunk fastest; an inactive row has none.
MK_HOST_DEVICE inline constexpr uint32_t attend_units(uint32_t active, uint32_t position, uint32_t window_tokens, uint32_t chunk_tokens, uint32_t kv_heads) {
  return static_cast<uint32_t>(((int64_t{active} > int64_t{0}) ? ((int64_t{chunk_end(static_cast<uint32_t>(int64_t{position}), static_cast<uint32_t>(int64_t{chunk_tokens}))} - int64_t{chunk_begin(static_cast<uint32_t>(int64_t{position}), static_cast<uint32_t>(int64_t{window_tokens}), static_cast<uint32_t>(int64_t{chunk_tokens}))}) * int64_t{kv_heads}) : int64_t{0}));
}

// Rank, among the step's distinct experts in ascending order, that routed unit `unit` belongs to.
MK_HOST_DEVICE inline constexpr uint32_t expert_rank(uint32_t unit, uint32_t tiles) {
  return static_cast<uint32_t>((int64_t{unit} / int64_t{tiles}));
}

// Tile of that expert.
MK_HOST_DEVICE inline constexpr uint32_t expert_tile(uint32_t unit, uint32_t tiles) {
  return static_cast<uint32_t>((int64_t{unit} % int64_t{tiles}));
}

}  // namespace mk::abi
