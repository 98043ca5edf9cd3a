// Addresses as instructions take them.
#pragma once
#include <cstdint>

namespace mk::ptx {

// Address of an object inside the block's shared memory.
__device__ __forceinline__ uint32_t shared_address(const void* object) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(object));
}

// The same value, which the compiler now keeps instead of computing it anew at every use.
__device__ __forceinline__ uint32_t kept(uint32_t value) {
  uint32_t same;
  asm volatile("mov.u32 %0, %1;" : "=r"(same) : "r"(value));
  return same;
}

// Exclusive or, at this place of the program: not moved, so that who needs `two` waits for it here.
__device__ __forceinline__ uint32_t exclusive_or(uint32_t one, uint32_t two) {
  uint32_t both;
  asm volatile("xor.b32 %0, %1, %2;" : "=r"(both) : "r"(one), "r"(two));
  return both;
}

}  // namespace mk::ptx
