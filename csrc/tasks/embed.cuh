// Gathers the embedding rows of the step's tokens; nothing goes through the ring.
#pragma once
#include "core/live.cuh"
#include "tasks/stage.cuh"

namespace mk::tasks {

struct Embed {
  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, Tools& tools) {
    constexpr uint32_t kTileVectors = abi::kTileColumns / kVector;  // of a row of a stored tile
    const auto* tokens = core::at<const uint32_t>(slot.inputs[0]);
    const uint64_t out = slot.outputs[0];
    const uint32_t thread = context.warp * spec::kWarpThreads + context.lane;
    for (uint32_t row = 0; row < spec::kRows; ++row) {
      const uint32_t token = ptx::load_relaxed_gpu(tokens + row);
      const uint64_t unit = context.launch().embedding + static_cast<uint64_t>(token / abi::kUnitRows) *
                                                             abi::kUnitRows * spec::kHidden * spec::kElementBytes;
      for (uint32_t vector = thread; vector < kVectors; vector += spec::kConsumerThreads) {
        const uint32_t tile = vector / kTileVectors;
        const uint32_t at = (tile * abi::kUnitRows + token % abi::kUnitRows) * kTileVectors + vector % kTileVectors;
        const uint4 x = ptx::load_constant(core::at<const uint4>(unit) + at);
        tools.written.put(core::at<uint4>(out) + row * kVectors + vector, x);
      }
    }
    return true;
  }
};

}  // namespace mk::tasks
