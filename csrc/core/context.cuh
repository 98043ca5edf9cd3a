// What every role of a block carries along: its list, its shared memory, where it stands.
#pragma once
#include "core/shared.cuh"
#include "ptx/address.cuh"
#include "ptx/timer.cuh"

namespace mk::core {

struct Context {
  Shared& shared;
  uint32_t sm;  // list of records
  uint32_t lane;
  uint32_t warp;  // among the consumers
  uint32_t role;  // see kRoles

  // First record of the list, and how many it has.
  __device__ __forceinline__ uint32_t begin() const { return shared.list_begin; }
  __device__ __forceinline__ uint32_t records() const { return shared.list_records; }
  __device__ __forceinline__ const abi::Launch& launch() const { return shared.launch; }
};

// Whether all lanes of a warp do alike, where one row gives only some of them work.
//
// Lanes that part at a branch may stay apart long after it, if the compiler likes, and whatever a warp does together
// then takes the slow way: two builds of one text have differed by a third. One row leaves most lanes of a product
// without work, so there no load is some lanes' alone, and warps come together where they part all the same. With more
// rows the loads that are left out are worth more.
inline constexpr bool kAlike = !spec::kStreaming && spec::kRows == 1;

__device__ __forceinline__ void come_together() {
  if constexpr (kAlike) __syncwarp();
}

// The lane; not kept, where a kernel has more conditions of lanes than predicates to keep them in.
__device__ __forceinline__ uint32_t own_lane(uint32_t lane) { return kAlike ? ptx::kept(lane) : lane; }

// The words, or records, behind an address of the launch record.
template <class T>
__device__ __forceinline__ T* at(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// Lets `cycles` pass: work of the streaming mode.
__device__ __forceinline__ void spend(uint32_t cycles) {
  if (cycles == 0) return;
  const uint64_t since = ptx::clock();
  while (ptx::clock() - since < cycles) {
  }
}

// Fuzzing: lets a random time pass before a load, or a warp's part of a run, so that orders are met that no schedule
// has in mind.
__device__ __forceinline__ void fuzz(const Context& context, uint32_t step, uint32_t task, uint32_t who) {
  if constexpr (spec::kFuzz) {
    const abi::Launch& launch = context.launch();
    uint32_t hash = ((launch.fuzz_seed * 747796405u + step) * 2891336453u + task) * 277803737u + who;
    hash = (hash ^ hash >> 15) * 2246822519u;
    hash = (hash ^ hash >> 13) * 3266489917u;
    hash ^= hash >> 16;
    if (hash % 4 == 0) spend((hash >> 2) % max(launch.fuzz_cycles, 1));  // most go on at once
    __syncwarp();
  }
}

}  // namespace mk::core
