// Loads, stores and reductions with a stated order and scope. Ordinary accesses are plain C++.
#pragma once
#include <cstdint>

#include "ptx/address.cuh"

namespace mk::ptx {

// Load, acquire, gpu scope: what the value's writer released is seen from here on.
__device__ __forceinline__ uint32_t load_acquire_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Load, relaxed, gpu scope: the current value, and no order.
__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Store, relaxed, gpu scope: no order.
__device__ __forceinline__ void store_relaxed_gpu(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Adds, release, gpu scope: who acquires the sum sees what this thread did and what it knew.
__device__ __forceinline__ void add_release_gpu(uint32_t* word, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Adds, relaxed, gpu scope: no order.
__device__ __forceinline__ void add_relaxed_gpu(uint32_t* word, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Maximum, relaxed, gpu scope.
__device__ __forceinline__ void max_relaxed_gpu(uint32_t* word, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Swaps in `value` if the word is `expected`; returns what it was. Acquire and release, gpu scope.
__device__ __forceinline__ uint32_t compare_swap_gpu(uint32_t* word, uint32_t expected, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.cas.b32 %0, [%1], %2, %3;"
               : "=r"(old)
               : "l"(word), "r"(expected), "r"(value)
               : "memory");
  return old;
}

// Load from a word of shared memory, acquire, block scope.
__device__ __forceinline__ uint32_t load_acquire_shared(uint32_t word) {
  uint32_t value;
  asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(value) : "r"(word) : "memory");
  return value;
}

// Store to a word of shared memory, release, block scope.
__device__ __forceinline__ void store_release_shared(uint32_t word, uint32_t value) {
  asm volatile("st.release.cta.shared::cta.u32 [%0], %1;" ::"r"(word), "r"(value) : "memory");
}

// Store to a word of shared memory, no order.
__device__ __forceinline__ void store_shared(uint32_t word, uint32_t value) {
  asm volatile("st.shared::cta.u32 [%0], %1;" ::"r"(word), "r"(value) : "memory");
}

// Exclusive or into a word of shared memory, relaxed, block scope.
__device__ __forceinline__ void xor_shared(uint32_t& word, uint32_t value) {
  asm volatile("red.relaxed.cta.shared::cta.xor.b32 [%0], %1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}

// Adds to a word of shared memory; returns what it was. Acquire and release, block scope: the last to add knows what all
// the others did before they added.
__device__ __forceinline__ uint32_t add_shared(uint32_t& word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(shared_address(&word)), "r"(value)
               : "memory");
  return old;
}

}  // namespace mk::ptx
