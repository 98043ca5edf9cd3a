// Clocks and pauses.
#pragma once
#include <cstdint>

namespace mk::ptx {

// Cycles of this SM; SMs count from different starts.
__device__ __forceinline__ uint64_t clock() {
  uint64_t cycles;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles)::"memory");
  return cycles;
}

// The lower half of it.
__device__ __forceinline__ uint32_t cycles() {
  uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

// Nanoseconds, the same for all SMs; ticks coarsely.
__device__ __forceinline__ uint64_t card_time() {
  uint64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

// Sleeps for at most twice `nanoseconds`.
__device__ __forceinline__ void pause(uint32_t nanoseconds) { asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds)); }

}  // namespace mk::ptx
