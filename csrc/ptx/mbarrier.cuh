// Barriers in shared memory that threads and bulk copies arrive on. Scope: the block. Barriers are named by their
// address in shared memory (`shared_address`), so that a loop keeps it in a register.
#pragma once
#include <cstdint>

#include "ptx/address.cuh"

namespace mk::ptx {

// Makes a barrier wait for `arrivals` a phase. Follow with `fence_mbarrier_init` and a block barrier.
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrives once. Release at block scope: what this thread did before is seen by who waits.
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives once and makes the phase wait for `bytes` more from bulk copies. Release at block scope.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity is over; the hardware may hold the thread for a while before it says no. Acquire at
// block scope. Wait only for the current phase or the one before it: a parity says no more.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return over != 0;
}

}  // namespace mk::ptx
