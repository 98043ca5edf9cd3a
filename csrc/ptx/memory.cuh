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

// The same for 8 and 16 bytes; each word is whole, the words together need not be.
__device__ __forceinline__ uint2 load_relaxed_gpu(const uint2* words) {
  uint2 value;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(words) : "memory");
  return value;
}

__device__ __forceinline__ uint4 load_relaxed_gpu(const uint4* words) {
  uint4 value;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(words)
               : "memory");
  return value;
}

__device__ __forceinline__ uint16_t load_relaxed_gpu(const uint16_t* half) {
  uint16_t value;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(value) : "l"(half) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_gpu(uint2* words, uint2 value) {
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(words), "r"(value.x), "r"(value.y) : "memory");
}

__device__ __forceinline__ void store_relaxed_gpu(uint4* words, uint4 value) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(words), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
}

__device__ __forceinline__ void store_relaxed_gpu(uint16_t* half, uint16_t value) {
  asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(half), "h"(value) : "memory");
}

// Load of what no step ever writes, such as norms: may stay in the SM's own cache.
__device__ __forceinline__ uint4 load_constant(const uint4* words) {
  uint4 value;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(words));
  return value;
}

__device__ __forceinline__ uint32_t load_constant(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(value) : "l"(word));
  return value;
}

// Load, acquire, system scope: of a word that the host writes after what it announces.
__device__ __forceinline__ uint32_t load_acquire_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Load, relaxed, system scope: of what the host wrote, and no order.
__device__ __forceinline__ uint32_t load_relaxed_system(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Load and store of 8 bytes as one, relaxed, gpu scope.
__device__ __forceinline__ uint64_t load_relaxed_gpu(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_relaxed_gpu(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

__device__ __forceinline__ float load_relaxed_gpu(const float* word) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(word) : "memory");
  return value;
}

// Store, relaxed, system scope: one whole word for the host to read, and no order.
__device__ __forceinline__ void store_relaxed_system(uint64_t* word, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
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

__device__ __forceinline__ void store_shared(uint32_t words, uint2 values) {
  asm volatile("st.shared::cta.v2.u32 [%0], {%1, %2};" ::"r"(words), "r"(values.x), "r"(values.y) : "memory");
}

// Adds to a word of shared memory, relaxed, block scope.
__device__ __forceinline__ void add_relaxed_shared(uint32_t& word, uint32_t value) {
  asm volatile("red.relaxed.cta.shared::cta.add.u32 [%0], %1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}

__device__ __forceinline__ void add_relaxed_shared(uint64_t& word, uint64_t value) {
  asm volatile("red.relaxed.cta.shared::cta.add.u64 [%0], %1;" ::"r"(shared_address(&word)), "l"(value) : "memory");
}

// Exclusive or into a word of shared memory, relaxed, block scope.
__device__ __forceinline__ void xor_shared(uint32_t& word, uint32_t value) {
  asm volatile("red.relaxed.cta.shared::cta.xor.b32 [%0], %1;" ::"r"(shared_address(&word)), "r"(value) : "memory");
}

// Adds to a word of shared memory; returns what it was. Acquire and release, block scope: the last to add knows what
// all the others did before they added.
__device__ __forceinline__ uint32_t add_shared(uint32_t& word, uint32_t value) {
  uint32_t old;
  asm volatile("atom.acq_rel.cta.shared::cta.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "r"(shared_address(&word)), "r"(value)
               : "memory");
  return old;
}

}  // namespace mk::ptx
