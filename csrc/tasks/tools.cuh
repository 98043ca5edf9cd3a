// What a consumer warp carries from record to record: its ends of the ring and of the workspace, which are taken in
// turn.
#pragma once
#include "core/meeting.cuh"
#include "tasks/product.cuh"

namespace mk::tasks {

struct Tools {
  __device__ explicit Tools(const core::Context& context)
      : reader(context),
        multiplier(context),
        consumers(context, context.shared.consumers),
        team(context, context.shared.teams[context.warp / (spec::kConsumerWarps / spec::kTeams)]) {}

  core::Reader reader;
  Multiplier multiplier;
  core::Meeting consumers;
  core::Meeting team;
  __device__ __forceinline__ void forget_best() {
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) {
      best[output] = -ptx::kInfinity;
      best_token[output] = ~0u;
      peak[output] = -ptx::kInfinity;
    }
  }

  core::Written written;
  bool has_news = false;          // an early signal that this warp has not announced yet
  uint32_t sums = 0;              // slot of the next sum over experts
  float stream[kOutputs];         // residual stream of a record's first unit
  float best[kOutputs];           // draw of the record so far
  uint32_t best_token[kOutputs];  // and its token
  float peak[kOutputs];           // best logit
};

// The better of two candidates: the larger value, of equals the lower token.
__device__ __forceinline__ void keep_better(float& value, uint32_t& token, float other_value, uint32_t other_token) {
  if (other_value > value || (other_value == value && other_token < token)) {
    value = other_value;
    token = other_token;
  }
}

// Where partial attention keeps maxima and masses: after the weighted sums of all rows, heads and chunks.
inline constexpr uint64_t kStatsBegin = static_cast<uint64_t>(spec::kRows) * spec::kKvHeads * spec::kGroup *
                                        spec::kMostChunks * spec::kHeadDim * sizeof(float);

}  // namespace mk::tasks
