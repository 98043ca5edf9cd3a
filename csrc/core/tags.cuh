// Values that carry the step and layer they are of, 64 bits that are written whole. Who left one need not see it back
// before it arrives, and who needs some may look at them before all have arrived: what is not there yet has another
// tag.
//
// A word is written anew only once every reader has its value, because the tasks that do so follow on what its readers
// leave. The host clears the words before a launch; no tag is 0.
#pragma once
#include <cstdint>

namespace mk::core {

__device__ __forceinline__ uint32_t tag(uint32_t step, uint32_t layer) { return 0x80000000u | step << 8 | layer; }

__device__ __forceinline__ uint64_t tagged(uint32_t value, uint32_t tag) {
  return static_cast<uint64_t>(tag) << 32 | value;
}

__device__ __forceinline__ bool has_tag(uint64_t word, uint32_t tag) {
  return static_cast<uint32_t>(word >> 32) == tag;
}

}  // namespace mk::core
