// One lane out of a converged warp.
#pragma once
#include <cstdint>

namespace mk::ptx {

// True in exactly one lane, always the same one. All 32 lanes must call.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n.reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(elected)::"memory");
  return elected != 0;
}

}  // namespace mk::ptx
