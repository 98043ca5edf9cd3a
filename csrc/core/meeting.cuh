// A place where warps of a block meet. Unlike the hardware's barriers it can be left: who is told to stop does not wait
// for warps that already did.
#pragma once
#include "core/patience.cuh"
#include "ptx/mbarrier.cuh"

namespace mk::core {

class Meeting {
 public:
  // `barrier` counts one arrival for each warp that meets there.
  __device__ Meeting(const Context& context, uint64_t& barrier)
      : context_(context), barrier_(ptx::shared_address(&barrier)) {}

  // Waits until all are there; what they did before is seen. False when the kernel is to be left.
  __device__ __forceinline__ bool meet() {
    __syncwarp();
    if (context_.lane == 0) ptx::mbarrier_arrive(barrier_);
    const bool met = await(
        context_, [&] { return ptx::mbarrier_try_wait(barrier_, parity_); },
        [] { return Waiting{abi::Place::kMeeting, 0}; });
    parity_ ^= 1;
    return met;
  }

 private:
  const Context& context_;
  const uint32_t barrier_;
  uint32_t parity_ = 0;
};

}  // namespace mk::core
