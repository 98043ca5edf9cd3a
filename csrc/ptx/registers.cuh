// Registers moved between warp groups: four warps with consecutive numbers. All warps of a group call together.
#pragma once
#include <cstdint>

namespace mk::ptx {

// Takes registers from the block's free ones, and waits until there are enough.
template <uint32_t kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Gives registers back.
template <uint32_t kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace mk::ptx
