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
      const uint32_t own = token % abi::kUnitRows;
      for (uint32_t vector = thread; vector < kVectors; vector += spec::kConsumerThreads) {
        // A tile is 2 x 8 x 4 vectors of half of 8 columns, of two rows 8 apart in turn.
        const auto* tile = core::at<const uint32_t>(unit) + vector / kTileVectors * (core::kTileBytes / 4);
        const auto* near = tile + (own % 8 * kTileVectors + vector % kTileVectors) * 4 + own / 8;
        const auto* far = near + core::kTileBytes / 8;
        const uint4 x = {ptx::load_constant(near), ptx::load_constant(near + 2), ptx::load_constant(far),
                         ptx::load_constant(far + 2)};
        tools.written.put(core::at<uint4>(out) + row * kVectors + vector, x);
      }
    }
    return true;
  }
};

}  // namespace mk::tasks
