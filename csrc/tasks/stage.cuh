// Normed activations of all rows, staged in shared memory by all consumers of a block.
#pragma once
#include "tasks/tools.cuh"

namespace mk::tasks {

inline constexpr uint32_t kVector = sizeof(uint4) / spec::kElementBytes;  // columns that a lane takes at once
inline constexpr uint32_t kVectors = spec::kHidden / kVector;
inline constexpr uint32_t kTurns = (kVectors + spec::kConsumerThreads - 1) / spec::kConsumerThreads;

// Sum of two bfloat16 pairs, rounded; one pair where there is no other.
__device__ __forceinline__ uint32_t add_pairs(uint32_t one, uint32_t other) {
  return ptx::pack(ptx::low(one) + ptx::low(other), ptx::high(one) + ptx::high(other));
}

// The residual stream, one vector: what the output projection left, plus the MLP's output where that is apart.
__device__ __forceinline__ uint4 load_stream(uint64_t residual, uint64_t mlp, uint64_t offset) {
  uint4 sum = ptx::load_relaxed_gpu(core::at<const uint4>(residual + offset));
  if (mlp != 0) {
    const uint4 other = ptx::load_relaxed_gpu(core::at<const uint4>(mlp + offset));
    sum = {add_pairs(sum.x, other.x), add_pairs(sum.y, other.y), add_pairs(sum.z, other.z), add_pairs(sum.w, other.w)};
  }
  return sum;
}

__device__ __forceinline__ float square(uint32_t pair) {
  return ptx::low(pair) * ptx::low(pair) + ptx::high(pair) * ptx::high(pair);
}

// Rounded before the weight and after it, as transformers does.
__device__ __forceinline__ uint32_t norm_pair(uint32_t pair, float scale, uint32_t weight) {
  const uint32_t normed = ptx::pack(ptx::low(pair) * scale, ptx::high(pair) * scale);
  return ptx::pack(ptx::low(normed) * ptx::low(weight), ptx::high(normed) * ptx::high(weight));
}

// Element `column` of a row of the stream.
__device__ __forceinline__ float stream_at(const Product& product, uint32_t row, uint32_t column) {
  const uint32_t at = row * spec::kHidden + column;
  const uint16_t x = ptx::load_relaxed_gpu(core::at<const uint16_t>(product.residual) + at);
  if (product.mlp == 0) return ptx::widen(x);
  const uint16_t y = ptx::load_relaxed_gpu(core::at<const uint16_t>(product.mlp) + at);
  return ptx::rounded(ptx::widen(x) + ptx::widen(y));
}

// Asks for the stream that the record's first unit is added to, before the products.
__device__ __forceinline__ void ask_stream(const core::Context& context, const core::Slot& slot, Tools& tools,
                                           const Product& product) {
  const uint32_t column = slot.record.begin * abi::kUnitRows + Unit::weight_row(context.lane);
#pragma unroll
  for (uint32_t output = 0; output < kOutputs; ++output) {
    const uint32_t token = Unit::token_row(context.lane, output);
    if (token < spec::kRows) tools.stream[output] = stream_at(product, token, column);
  }
}

// Puts the RMS norm of the stream into the workspace. Every row is summed by all consumers in one order, so that no
// row's sum depends on how many there are.
__device__ __forceinline__ bool stage_normed(const core::Context& context, Tools& tools, const Product& product) {
  core::Workspace& work = context.shared.work;
  if (!tools.consumers.meet()) return false;  // nobody reads the old activations any more
  const uint32_t thread = context.warp * spec::kWarpThreads + context.lane;
  uint4 x[kTurns][spec::kRows];
  uint4 weight[kTurns];
#pragma unroll
  for (uint32_t turn = 0; turn < kTurns; ++turn) {
    const uint32_t vector = thread + turn * spec::kConsumerThreads;
    if (vector < kVectors) {
#pragma unroll
      for (uint32_t row = 0; row < spec::kRows; ++row) {
        x[turn][row] = load_stream(product.residual, product.mlp, (row * kVectors + vector) * sizeof(uint4));
      }
      weight[turn] = ptx::load_constant(core::at<const uint4>(product.norm) + vector);
    } else {
      for (uint32_t row = 0; row < spec::kRows; ++row) x[turn][row] = {};
      weight[turn] = {};
    }
  }
#pragma unroll
  for (uint32_t row = 0; row < spec::kRows; ++row) {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint4& v = x[turn][row];
      sum += (square(v.x) + square(v.y)) + (square(v.z) + square(v.w));
    }
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(core::kAllLanes, sum, step);
    if (context.lane == 0) work.squares[row][context.warp] = sum;
  }
  if (!tools.consumers.meet()) return false;
#pragma unroll
  for (uint32_t row = 0; row < spec::kRows; ++row) {
    float sum = 0.0f;
#pragma unroll
    for (uint32_t warp = 0; warp < spec::kConsumerWarps; ++warp) sum += work.squares[row][warp];
    const float scale = rsqrtf(sum / spec::kHidden + spec::kNormEps);
#pragma unroll
    for (uint32_t turn = 0; turn < kTurns; ++turn) {
      const uint32_t vector = thread + turn * spec::kConsumerThreads;
      if (vector < kVectors) {
        const uint4& v = x[turn][row];
        const uint4& w = weight[turn];
        *reinterpret_cast<uint4*>(work.x[row] + vector * sizeof(uint4)) = {
            norm_pair(v.x, scale, w.x), norm_pair(v.y, scale, w.y), norm_pair(v.z, scale, w.z),
            norm_pair(v.w, scale, w.w)};
      }
    }
  }
  return tools.consumers.meet();
}

}  // namespace mk::tasks
