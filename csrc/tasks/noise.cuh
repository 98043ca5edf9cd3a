// Noise of a row's next token: a hash of (seed, position, token), the same integers as runtime/sampling.py, so that a
// draw depends on nothing but the row. Turned to floating point in single precision: two tokens whose draws differ by
// less than that may change places.
#pragma once
#include <cstdint>

namespace mk::tasks {

// Finaliser of SplitMix64.
__device__ __forceinline__ uint64_t mix(uint64_t value) {
  value += 0x9E3779B97F4A7C15ull;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ull;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBull;
  return value ^ (value >> 31);
}

// Of a row's temperature. Below the smallest one a row draws as at it: only the best token and its equals have a
// chance.
__device__ __forceinline__ float inverse_temperature(float temperature) {
  return 1.0f / fmaxf(temperature, 1.0f / (1 << 20));
}

// What seed and position make of the hash; tokens come last.
__device__ __forceinline__ uint64_t noise_state(uint64_t seed, uint32_t position) { return mix(mix(seed) ^ position); }

// Gumbel noise -log(-log(u)) of a token. u is the middle of one of 2^53 intervals; near 1 its distance from 1 is what
// has digits.
__device__ __forceinline__ float gumbel(uint64_t state, uint32_t token) {
  const uint64_t bits = mix(state ^ token) >> 11;
  constexpr uint64_t kLast = (1ull << 53) - 1;
  constexpr float kUnit = 1.0f / (1ull << 53);
  const bool is_high = bits >> 52 != 0;
  const float near = (static_cast<float>(is_high ? kLast - bits : bits) + 0.5f) * kUnit;
  return -logf(is_high ? -log1pf(-near) : -logf(near));
}

}  // namespace mk::tasks
