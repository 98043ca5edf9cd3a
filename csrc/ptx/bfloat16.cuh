// bfloat16 as bits: the upper half of a float, rounded to nearest, ties to even; and powers of two.
#pragma once
#include <cstdint>

namespace mk::ptx {

inline constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000u);

__device__ __forceinline__ float widen(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }

// Lower and upper element of a pair.
__device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two floats as a pair, `low_value` in the lower half.
__device__ __forceinline__ uint32_t pack(float low_value, float high_value) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high_value), "f"(low_value));
  return pair;
}

// 2^x, to about two units in the last place; 0 where that is no normal number.
__device__ __forceinline__ float power_of_two(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

__device__ __forceinline__ uint16_t narrow(float value) { return static_cast<uint16_t>(pack(value, 0.0f)); }

__device__ __forceinline__ float rounded(float value) { return low(pack(value, 0.0f)); }

}  // namespace mk::ptx
