// Next token of a tile of rows, and the new positions; nothing goes through the ring.
#pragma once
#include "core/live.cuh"
#include "tasks/stream.cuh"

namespace mk::tasks {

struct Sample {
  template <class Visit>
  __device__ static __forceinline__ bool walk(const core::Context&, const core::Slot&, core::Live&, Visit&) {
    return true;
  }

  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, core::Reader& reader) {
    return stream(context, slot, reader, 0);
  }
};

}  // namespace mk::tasks
