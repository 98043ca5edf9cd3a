// Next token of every active row, and the new positions; nothing goes through the ring.
#pragma once
#include "core/live.cuh"
#include "tasks/head.cuh"

namespace mk::tasks {

struct Sample {
  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, Tools& tools) {
    static_assert(spec::kRows <= spec::kConsumerWarps, "a row is one warp's");
    if (context.warp < spec::kRows) sample(context, slot, tools.written, context.warp);
    return true;
  }

 private:
  // A row ends after a stop id, or when its next position is its last.
  __device__ static __forceinline__ void sample(const core::Context& context, const core::Slot& slot,
                                                core::Written& written, uint32_t row) {
    auto* state = core::at<abi::RowState>(context.launch().rows) + row;
    const uint2 at = ptx::load_relaxed_gpu(reinterpret_cast<const uint2*>(state));  // position, active
    if (at.y == 0) return;
    const uint2 ends = ptx::load_relaxed_gpu(reinterpret_cast<const uint2*>(&state->end_position));
    const uint32_t token = greedy(context, slot, row);
    bool stops = at.x + 1 >= ends.x;
    for (uint32_t stop = 0; stop < ends.y; ++stop) stops |= ptx::load_relaxed_gpu(&state->stops[stop]) == token;
    if (context.lane != 0) return;
    auto* tokens = core::at<uint32_t>(slot.outputs[0]);
    written.put(tokens + row, token);
    written.put(reinterpret_cast<uint2*>(state), uint2{at.x + 1, stops ? 0u : 1u});
    leave_token(context, slot.step, row, token);
  }

  // For the host, which reads it while the launch goes on: the step that made it, and the token, in one word.
  __device__ static __forceinline__ void leave_token(const core::Context& context, uint32_t step, uint32_t row,
                                                     uint32_t token) {
    const abi::Launch& launch = context.launch();
    if (launch.tokens_out == 0) return;
    const uint64_t at = static_cast<uint64_t>(step & (launch.tokens_out_steps - 1)) * spec::kRows + row;
    ptx::store_relaxed_system(core::at<uint64_t>(launch.tokens_out) + at,
                              static_cast<uint64_t>(step + 1) << 32 | token);
  }

  __device__ static __forceinline__ uint32_t greedy(const core::Context& context, const core::Slot& slot,
                                                    uint32_t row) {
    const auto* best = core::at<const uint2>(slot.inputs[1]) + row * spec::kHeadTasks;
    float value = -ptx::kInfinity;
    uint32_t token = ~0u;
#pragma unroll 4
    for (uint32_t task = context.lane; task < spec::kHeadTasks; task += spec::kWarpThreads) {
      const uint2 other = ptx::load_relaxed_gpu(best + task);
      keep_better(value, token, __uint_as_float(other.x), other.y);
    }
#pragma unroll 1
    for (uint32_t step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(core::kAllLanes, value, step);
      const uint32_t other_token = __shfl_xor_sync(core::kAllLanes, token, step);
      keep_better(value, token, other, other_token);
    }
    return token;
  }
};

}  // namespace mk::tasks
