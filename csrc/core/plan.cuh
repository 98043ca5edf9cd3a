// What the planner does with a record's load: first it counts the copies, for the consumers, then it queues them.
#pragma once
#include "core/patience.cuh"

namespace mk::core {

// A load that is only counted.
struct Count {
  static constexpr bool kNeedsAddress = false;

  __device__ __forceinline__ bool operator()(const Pieces& pieces) {
    copies += pieces.copies();
    bytes += pieces.bytes;
    return true;
  }

  uint32_t copies = 0;
  uint32_t bytes = 0;
};

// The queue from planner to issuer. All lanes of the planner's warp call.
class Queue {
 public:
  static constexpr bool kNeedsAddress = true;

  __device__ explicit Queue(const Context& context) : context_(context) {}

  // Names the record that the next pieces are for.
  __device__ __forceinline__ void begin(uint32_t slot) {
    slot_ = slot;
    is_first_ = 1;
  }

  // Queues a run of copies; false when the kernel is to be left.
  __device__ __forceinline__ bool operator()(Pieces pieces) {
    Shared& shared = context_.shared;
    const uint32_t taken = ptx::shared_address(&shared.taken);
    if (!await(
            context_, [&] { return queued_ - ptx::load_acquire_shared(taken) < spec::kQueue; },
            [&] {
              const Slot& slot = shared.slots[slot_];
              return Waiting{abi::Place::kLoad, slot.step, slot.index, slot.record.task, abi::kNone, queued_};
            })) {
      return false;
    }
    ++queued_;
    if (context_.lane == 0) {
      pieces.slot = slot_;
      pieces.is_first = is_first_;
      shared.queue[entry_] = pieces;
      ptx::store_release_shared(ptx::shared_address(&shared.queued), queued_);
    }
    is_first_ = 0;
    entry_ = entry_ + 1 < spec::kQueue ? entry_ + 1 : 0;
    return true;
  }

  // Tells the issuer that nothing follows.
  __device__ __forceinline__ bool end() { return (*this)(Pieces{0, 0}); }

 private:
  const Context& context_;
  uint32_t queued_ = 0;
  uint32_t entry_ = 0;
  uint32_t slot_ = 0;
  uint32_t is_first_ = 0;
};

}  // namespace mk::core
