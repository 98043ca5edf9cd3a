// Shared memory of a block: the ring, its barriers, a window of the records between producer and consumers, and what
// runs keep between their warps.
#pragma once
#include "core/product.cuh"
#include "ptx/mbarrier.cuh"
#include "specialization.cuh"

namespace mk::core {

// In place of a record's index: nothing follows.
inline constexpr uint32_t kNoRecord = ~0u;

// One unit of attention: a row, a KV head and a chunk of its keys.
struct Place {
  uint32_t row;
  uint32_t head;
  uint32_t chunk;
  uint32_t first_chunk;  // of the row
  uint32_t end_chunk;
  uint32_t position;
};

// One record on its way from the planner to the consumers.
struct alignas(16) Slot {
  abi::Record record;
  abi::Layer layer;                  // of the record
  Product product;                   // of a record that multiplies
  Place place;                       // of a record that attends: its first unit
  uint64_t inputs[abi::kMaxInputs];  // addresses of the record's buffers; 0: absent
  uint64_t outputs[abi::kMaxOutputs];
  uint32_t run_targets[abi::kMaxRunWaits];
  uint32_t first_unit;   // of the units that the record's share finds
  uint32_t end_unit;     // one past the last
  uint32_t copies;       // of its load
  uint32_t step;         // it belongs to
  uint32_t index;        // in the list
  uint32_t early_warps;  // consumer warps that have ended its early part
  uint32_t run_warps;    // consumer warps that have ended its run
  uint32_t go;           // not 0 once the run waits are known to be met
  abi::Trace trace;      // written to memory after the arrival, so that no arrival waits for it
};

// A run of copies: `bytes` in pieces of `piece`, the last one possibly shorter; their addresses step by `even` after
// the first, third, ... piece and by `odd` after the others. No bytes: the end of the launch.
struct alignas(16) Pieces {
  uint64_t from;
  uint32_t bytes;
  uint32_t piece = spec::kCopyBytes;
  int32_t even = spec::kCopyBytes;
  int32_t odd = spec::kCopyBytes;
  uint16_t slot = 0;
  uint16_t is_first = 0;  // of its record
  // For the consumers of products: what its bytes are.
  uint16_t slice_bytes = 16;
  uint16_t unit_slices = 0xffff;
  uint16_t unit = 0;          // its first one, in the record
  uint16_t rank = 0;          // of its expert
  uint16_t piece_slices = 0;  // of a full piece; the planner divides, who has time

  __device__ __forceinline__ uint32_t copies() const { return (bytes + piece - 1) / piece; }
};
static_assert(sizeof(Pieces) == 48);

// What lies in a stage: its bytes, and where its first slice belongs: slice of a unit of the record, rank of its
// expert.
struct alignas(8) Landed {
  uint16_t bytes_by_16;
  uint16_t unit;
  uint16_t slice;
  uint16_t rank;
};

struct RowAt {
  uint32_t position;
  uint32_t active;
};

// Experts that the rows of a step chose in one layer.
struct Routing {
  uint32_t num_experts;                           // distinct
  uint16_t experts[spec::kMaxExperts];            // ascending
  float scores[spec::kRows][spec::kMaxTopK];      // of a row's experts, ascending by expert
  uint8_t slots[spec::kRows][spec::kMaxExperts];  // place of an expert among a row's; kNoSlot: not chosen
};
inline constexpr uint8_t kNoSlot = 0xff;

// The streaming mode computes nothing: of what runs keep, it has one each.
inline constexpr uint32_t kWorkRows = spec::kStreaming ? 1 : spec::kRows;
inline constexpr uint32_t kPartColumns = 20;  // of 16 sums and padding, so that lanes meet all banks
inline constexpr uint32_t kRowBytes =
    spec::kStreaming ? 16 : (spec::kHidden + 32) * spec::kElementBytes;  // of activations; 64 apart modulo 128
inline constexpr uint32_t kChunkBlocks = spec::kStreaming ? 1 : spec::kChunkTokens / spec::kBlockTokens;
inline constexpr uint32_t kHeadFloats = spec::kStreaming ? 4 : spec::kHeadDim + 4;

// Tokens of a row, and their mass, by distance from the best.
inline constexpr uint32_t kBins = spec::kStreaming ? spec::kWarpThreads : 256;
struct Bins {
  uint64_t masses[kBins];
  uint32_t tokens[kBins];
};

// What a row draws its next token with.
struct alignas(16) Drawing {
  uint64_t noise;  // hash of its seed and position
  float inverse;   // of its temperature; 0: greedy
};

// What a warp found among its logits of a row.
struct Best {
  float2 draw;  // value and, as bits, token
  float logit;
};

// What runs keep between their warps.
struct Workspace {
  union {
    alignas(16) uint8_t x[kWorkRows][kRowBytes];  // normed activations
    Bins bins;                                    // while a row filters its tokens
  };
  alignas(16) float parts[spec::kSliceSlots][kWorkRows][kPartColumns];  // slices of units under way
  float sums[spec::kSumSlots][kWorkRows][kPartColumns];                 // units summed over experts
  alignas(16) float2 stats[spec::kTeams][kChunkBlocks][spec::kGroup];   // peaks and masses of a chunk's blocks of keys
  float current_scores[spec::kTeams][spec::kGroup];                     // of the current token
  alignas(16) uint32_t current_k[spec::kTeams][kHeadFloats / 2];        // its key and value, as pairs
  alignas(16) uint32_t current_v[spec::kTeams][kHeadFloats / 2];
  Routing routing[2];                                           // by parity of the layer
  alignas(16) float merged[spec::kConsumerWarps][kHeadFloats];  // the warps' sums of a query head, then their mass
  float squares[kWorkRows][spec::kConsumerWarps];
  Best best[kWorkRows][spec::kConsumerWarps];
  Drawing drawing[kWorkRows];
  float3 surveys[spec::kConsumerWarps];    // a warp's tokens of a row: mass, mass and number of the better ones
  uint32_t taken[kWorkRows];               // commands of the row that were carried out
  uint32_t has_ended;                      // not 0: the next step is the chain's last
  uint32_t units_done[spec::kSliceSlots];  // slices of a unit that are in, at its first slice
  uint32_t turns[spec::kSumSlots];         // experts that are in the sum
};

// Of the mailbox, what is polled.
inline constexpr uint32_t kMailWords = offsetof(abi::Mailbox, commands) / sizeof(uint32_t);

// Where a role of the block is, and what it last waited for in vain.
struct alignas(16) Note {
  uint32_t step;
  uint32_t index;
  uint32_t task;
  uint32_t state;
  uint2 what;  // place in the upper half, counter in the lower; what is wanted
};
inline constexpr uint32_t kRuns = 0;
inline constexpr uint32_t kLeft = 1;
inline constexpr uint32_t kUnbuilt = 2;

// Consumer warps, then planner and issuer.
inline constexpr uint32_t kRoles = spec::kConsumerWarps + 2;

struct Shared {
  alignas(128) uint8_t ring[spec::kStages][spec::kCopyBytes];
  alignas(16) abi::Launch launch;
  Slot slots[spec::kSlots];
  Pieces queue[spec::kQueue];                 // from planner to issuer
  uint64_t landed[spec::kStages];             // a copy has landed in the stage
  uint64_t freed[spec::kStages];              // the consumers are done with the stage
  uint64_t ready[spec::kSlots];               // the slot holds a record whose load waits are met
  uint64_t done[spec::kSlots];                // the consumers are done with the slot
  uint64_t consumers;                         // where all consumers meet
  uint64_t teams[spec::kTeams];               // where a team's members meet
  uint64_t begin_cycles;                      // the trace's zero
  uint32_t load_targets[abi::kMaxLoadWaits];  // of the planner's record
  uint32_t list_begin;                        // first record of the block's list
  uint32_t list_records;                      // in the list
  uint32_t queued;                            // pieces that the planner has queued
  uint32_t taken;                             // pieces that the issuer has taken
  uint32_t issued;                            // copies that the issuer has issued
  uint32_t arrived;                           // records that ran to their end
  uint32_t rows_step;                         // of the rows below
  Landed stages[spec::kStages];
  RowAt rows[spec::kRows];
  Note notes[kRoles];
  uint32_t mail[kMailWords];  // what the watch last read of the mailbox
  uint32_t stop;              // not 0: leave
  uint32_t left;              // roles that have left
  Workspace work;
};
static_assert(sizeof(Shared) - sizeof(Workspace) <= spec::kRingBytes + spec::kReservedBytes,
              "the host reserves too little");
static_assert(sizeof(Workspace) <= spec::kWorkspaceBytes, "the host reserves too little for the runs");
static_assert(spec::kRingBytes + spec::kReservedBytes + spec::kWorkspaceBytes <= spec::kSharedBytes);

}  // namespace mk::core
