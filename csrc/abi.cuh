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
inline constexpr uint32_t kRowTile = 8u;
inline constexpr uint32_t kUnitRows = 16u;
inline constexpr uint32_t kPairedColumns = 8u;

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
