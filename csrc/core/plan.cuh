// What the planner does with a record's load.
#pragma once
#include "core/patience.cuh"

namespace mk::core {

// The queue from planner to issuer. All lanes of the planner's warp call. A load is walked twice by the same code: once
// to be counted, once to be queued.
class Queue {
 public:
  __device__ explicit Queue(const Context& context) : context_(context) {}

  bool counts = true;   // pieces are counted, and need no address
  uint32_t copies = 0;  // counted
  uint32_t bytes = 0;

  // Names the record that the next pieces are for.
  __device__ __forceinline__ void begin(uint32_t slot) {
    slot_ = slot;
    is_first_ = 1;
    copies = bytes = 0;
  }

  // Counts or queues a run of copies; false when the kernel is to be left.
  __device__ __forceinline__ bool operator()(Pieces pieces) {
    if (counts) {
      copies += pieces.copies();
      bytes += pieces.bytes;
      return true;
    }
    Shared& shared = context_.shared;
    const uint32_t taken = ptx::shared_address(&shared.taken);
    if (!await(
            context_, [&] { return queued_ - ptx::load_acquire_shared(taken) < spec::kQueue; },
            [&] { return Waiting{abi::Place::kLoad, queued_}; })) {
      return false;
    }
    ++queued_;
    if (context_.lane == 0) {
      pieces.piece_slices = static_cast<uint16_t>(pieces.piece / pieces.slice_bytes);
      pieces.slot = static_cast<uint16_t>(slot_);
      pieces.is_first = static_cast<uint16_t>(is_first_);
      shared.queue[entry_] = pieces;
      ptx::store_release_shared(ptx::shared_address(&shared.queued), queued_);
    }
    is_first_ = 0;
    entry_ = entry_ + 1 < spec::kQueue ? entry_ + 1 : 0;
    return true;
  }

  // Tells the issuer that nothing follows.
  __device__ __forceinline__ bool end() {
    counts = false;
    return (*this)(Pieces{0, 0});
  }

 private:
  const Context& context_;
  uint32_t queued_ = 0;
  uint32_t entry_ = 0;
  uint32_t slot_ = 0;
  uint32_t is_first_ = 0;
};

}  // namespace mk::core
