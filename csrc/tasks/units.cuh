// Contiguous pieces of packed weights, as the static and routed loads walk them.
#pragma once
#include "core/live.cuh"

namespace mk::tasks {

// Bytes of one stored unit of 16 rows of `columns` elements.
__device__ __forceinline__ constexpr uint32_t unit_bytes(uint32_t columns) {
  return abi::kUnitRows * columns * spec::kElementBytes;
}

// Units [begin, end) of weights at `base`.
template <class Visit>
__device__ __forceinline__ bool visit_units(uint64_t base, uint32_t begin, uint32_t end, uint32_t bytes, Visit& visit) {
  return begin >= end || visit({base + static_cast<uint64_t>(begin) * bytes, (end - begin) * bytes});
}

}  // namespace mk::tasks
