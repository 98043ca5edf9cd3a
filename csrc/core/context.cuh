// What every role of a block carries along: its list, its shared memory, where it stands.
#pragma once
#include "core/shared.cuh"
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

}  // namespace mk::core
