// Shared memory of a block: the ring, its barriers, and a window of the records between producer and consumers.
#pragma once
#include "ptx/mbarrier.cuh"
#include "specialization.cuh"

namespace mk::core {

// One record on its way from the planner to the consumers.
struct Slot {
  abi::Record record;
  uint32_t run_targets[abi::kMaxRunWaits];
  uint32_t copies;       // of its load
  uint32_t step;         // it belongs to
  uint32_t index;        // in the list
  uint32_t early_warps;  // consumer warps that have ended its early part
  uint32_t run_warps;    // consumer warps that have ended its run
  uint32_t go;           // not 0 once the run waits are met
  uint32_t reserved[2];
  abi::Trace trace;  // written to memory after the arrival, so that no arrival waits for it
};
static_assert(sizeof(Slot) % 16 == 0);

// A run of copies: `bytes` in pieces of `piece`, the last one possibly shorter; their addresses step by `even` after the
// first, third, ... piece and by `odd` after the others. No bytes: the end of the launch.
struct alignas(16) Pieces {
  uint64_t from;
  uint32_t bytes;
  uint32_t piece = spec::kCopyBytes;
  int32_t even = spec::kCopyBytes;
  int32_t odd = spec::kCopyBytes;
  uint32_t slot = 0;
  uint32_t is_first = 0;  // of its record

  __device__ __forceinline__ uint32_t copies() const { return (bytes + piece - 1) / piece; }
};
static_assert(sizeof(Pieces) == 32);

struct Shared {
  alignas(128) uint8_t ring[spec::kStages][spec::kCopyBytes];
  alignas(16) abi::Launch launch;
  Slot slots[spec::kSlots];
  Pieces queue[spec::kQueue];      // from planner to issuer
  abi::Layer layer;                // of the planner's record
  uint64_t landed[spec::kStages];  // a copy has landed in the stage
  uint64_t freed[spec::kStages];   // the consumers are done with the stage
  uint64_t ready[spec::kSlots];    // the slot holds a record whose load waits are met
  uint64_t done[spec::kSlots];     // the consumers are done with the slot
  uint64_t begin_cycles;           // the trace's zero
  uint32_t load_targets[abi::kMaxLoadWaits];  // of the planner's record
  uint32_t queued;                 // pieces that the planner has queued
  uint32_t taken;                  // pieces that the issuer has taken
  uint32_t arrived;                // records that ran to their end
  uint32_t num_experts;            // in the list below
  uint32_t stage_bytes[spec::kStages];
  abi::RowState rows[spec::kRows];
  uint16_t experts[spec::kMaxExperts];
};
static_assert(sizeof(Shared) <= spec::kRingBytes + spec::kReservedBytes, "the host reserves too little beside the ring");
static_assert(sizeof(Shared) + spec::kWorkspaceBytes <= spec::kSharedBytes);

}  // namespace mk::core
