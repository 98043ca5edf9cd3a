// One-dimensional bulk copies from global to shared memory, done by the asynchronous proxy.
#pragma once
#include <cstdint>

namespace mk::ptx {

// Copies `bytes` from global memory to shared addresses (a multiple of 16, both ends 16-byte aligned) and completes
// them on `barrier`. The read is ordered only by what its issuer acquired; data that ordinary stores of another SM
// wrote need `fence_proxy_async` first.
__device__ __forceinline__ void bulk_copy(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// The same with an L2 policy from `evict_first_policy`.
__device__ __forceinline__ void bulk_copy_with_policy(uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier,
                                                      uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Policy of data read once a step: the first to leave L2.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace mk::ptx
