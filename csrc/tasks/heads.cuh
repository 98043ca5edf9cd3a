// Query, key and value heads of the current token, as a warp holds them: from the projection's sums to what attention
// takes.
//
// A lane holds, of every 8 dims, elements 2t and 2t+1 (t is lane % 4): for queries of head lane / 4, for keys and
// values of the one KV head, the same in all groups of four lanes.
#pragma once
#include "core/counters.cuh"
#include "ptx/bfloat16.cuh"

namespace mk::tasks {

inline constexpr uint32_t kDimTiles = spec::kHeadDim / 8;

// Pairs of bfloat16, one for each 8 dims.
using HeadPairs = uint32_t[kDimTiles];

// Columns [column, column + head_dim) of a row of the projection, K splits added in ascending order, rounded.
__device__ __forceinline__ void load_head(HeadPairs& head, uint64_t qkv, uint32_t row, uint32_t column, uint32_t lane) {
  constexpr uint32_t kColumns = spec::kQSize + 2 * spec::kKvHeads * spec::kHeadDim;
  const auto* from = core::at<const uint32_t>(qkv) + row * kColumns + column + lane % 4 * 2;
  uint2 sums[spec::kProjectKSplits][kDimTiles];
#pragma unroll
  for (uint32_t split = 0; split < spec::kProjectKSplits; ++split) {
#pragma unroll
    for (uint32_t tile = 0; tile < kDimTiles; ++tile) {
      const uint32_t* word = from + split * spec::kRows * kColumns + tile * 8;
      sums[split][tile] = ptx::load_relaxed_gpu(reinterpret_cast<const uint2*>(word));
    }
  }
#pragma unroll
  for (uint32_t tile = 0; tile < kDimTiles; ++tile) {
    float first = 0.0f;
    float second = 0.0f;
#pragma unroll
    for (uint32_t split = 0; split < spec::kProjectKSplits; ++split) {
      first += __uint_as_float(sums[split][tile].x);
      second += __uint_as_float(sums[split][tile].y);
    }
    head[tile] = ptx::pack(first, second);
  }
}

// RMS norm over the head, rounded before the weight and after it.
__device__ __forceinline__ void norm_head(HeadPairs& head, uint64_t norm, uint32_t lane) {
  float sum = 0.0f;
#pragma unroll
  for (uint32_t tile = 0; tile < kDimTiles; ++tile) {
    sum += ptx::low(head[tile]) * ptx::low(head[tile]) + ptx::high(head[tile]) * ptx::high(head[tile]);
  }
  sum += __shfl_xor_sync(core::kAllLanes, sum, 1);
  sum += __shfl_xor_sync(core::kAllLanes, sum, 2);
  const float scale = rsqrtf(sum / spec::kHeadDim + spec::kNormEps);
#pragma unroll
  for (uint32_t tile = 0; tile < kDimTiles; ++tile) {
    const uint32_t weight = ptx::load_constant(core::at<const uint32_t>(norm) + tile * 4 + lane % 4);
    const uint32_t normed = ptx::pack(ptx::low(head[tile]) * scale, ptx::high(head[tile]) * scale);
    head[tile] = ptx::pack(ptx::low(normed) * ptx::low(weight), ptx::high(normed) * ptx::high(weight));
  }
}

// Cosines and sines of one position, as a lane needs them.
struct Angles {
  static constexpr uint32_t kCount = spec::kRopeHalf ? kDimTiles / 2 : kDimTiles;
  uint2 of[kCount];
  bool turns;

  // From the table, asked for before the heads are; 0: no RoPE.
  __device__ __forceinline__ void load(uint64_t rotary, uint32_t position, uint32_t lane) {
    turns = rotary != 0;
    if (!turns) return;
    const auto* from = core::at<const uint32_t>(rotary) + static_cast<uint64_t>(position) * (spec::kHeadDim / 2);
#pragma unroll
    for (uint32_t tile = 0; tile < kCount; ++tile) {
      if constexpr (spec::kRopeHalf) {
        of[tile].x = ptx::load_constant(from + tile * 8 + lane % 4 * 2);
        of[tile].y = ptx::load_constant(from + tile * 8 + lane % 4 * 2 + 1);
      } else {
        of[tile].x = ptx::load_constant(from + tile * 4 + lane % 4);
      }
    }
  }

  // RoPE of a head.
  __device__ __forceinline__ void turn(HeadPairs& head) const {
    if (!turns) return;
#pragma unroll
    for (uint32_t tile = 0; tile < kCount; ++tile) {
      const uint2 angle = of[tile];
      if constexpr (spec::kRopeHalf) {
        const uint32_t first = head[tile];
        const uint32_t second = head[tile + kDimTiles / 2];
        head[tile] = ptx::pack(ptx::low(first) * ptx::low(angle.x) - ptx::low(second) * ptx::high(angle.x),
                               ptx::high(first) * ptx::low(angle.y) - ptx::high(second) * ptx::high(angle.y));
        head[tile + kDimTiles / 2] =
            ptx::pack(ptx::low(second) * ptx::low(angle.x) + ptx::low(first) * ptx::high(angle.x),
                      ptx::high(second) * ptx::low(angle.y) + ptx::high(first) * ptx::high(angle.y));
      } else {
        const float first = ptx::low(head[tile]);
        const float second = ptx::high(head[tile]);
        head[tile] = ptx::pack(first * ptx::low(angle.x) - second * ptx::high(angle.x),
                               second * ptx::low(angle.x) + first * ptx::high(angle.x));
      }
    }
  }
};

}  // namespace mk::tasks
