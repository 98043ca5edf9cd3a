// Merges the chunks' partial results of whole query heads; nothing goes through the ring.
#pragma once
#include "core/live.cuh"
#include "tasks/stage.cuh"

namespace mk::tasks {

struct Merge {
  __device__ static __forceinline__ bool run(const core::Context& context, core::Slot& slot, Tools& tools) {
    constexpr uint32_t kHeads = spec::kKvHeads * spec::kGroup;
    for (uint32_t unit = slot.record.begin; unit < slot.record.end; ++unit) {
      if (!merge(context, slot, tools, unit / kHeads, unit % kHeads)) return false;
    }
    return true;
  }

 private:
  // Chunks of a warp, or peaks of a lane, that are asked for together: a window's in one trip, as registers allow.
  static constexpr uint32_t kAhead = spec::kRows == 1 ? 8 : 5;

  // Some chunks of a head: what each lane reads of them.
  struct Chunks {
    uint4 sums[kAhead];
    uint2 masses[kAhead];

    __device__ __forceinline__ void load(const uint4* from, const uint2* stats, uint32_t begin, uint32_t chunks,
                                         bool has_dims) {
#pragma unroll
      for (uint32_t ahead = 0; ahead < kAhead; ++ahead) {
        const uint32_t chunk = begin + ahead * spec::kConsumerWarps;
        sums[ahead] = {};
        if (chunk < chunks) {
          masses[ahead] = ptx::load_relaxed_gpu(stats + chunk);
          if (has_dims) sums[ahead] = ptx::load_relaxed_gpu(from + chunk * (spec::kHeadDim / 4));
        }
      }
    }

    __device__ __forceinline__ void add(float4& total, float& mass, float peak, uint32_t begin, uint32_t chunks) const {
#pragma unroll
      for (uint32_t ahead = 0; ahead < kAhead; ++ahead) {
        if (begin + ahead * spec::kConsumerWarps < chunks) {
          const float weight = ptx::power_of_two(__uint_as_float(masses[ahead].x) - peak);
          mass += weight * __uint_as_float(masses[ahead].y);
          total.x += weight * __uint_as_float(sums[ahead].x);
          total.y += weight * __uint_as_float(sums[ahead].y);
          total.z += weight * __uint_as_float(sums[ahead].z);
          total.w += weight * __uint_as_float(sums[ahead].w);
        }
      }
    }
  };

  // Warp w adds chunks w, w + warps, ...; then the warps' sums are added in order.
  __device__ static __forceinline__ bool merge(const core::Context& context, const core::Slot& slot, Tools& tools,
                                               uint32_t row, uint32_t head) {
    constexpr uint32_t kHeads = spec::kKvHeads * spec::kGroup;
    core::Workspace& work = context.shared.work;
    const uint64_t partial = slot.inputs[0];
    const auto* state = core::at<const uint2>(slot.inputs[1] + row * sizeof(abi::RowState));
    const uint2 at = ptx::load_relaxed_gpu(state);  // position, active
    const uint32_t chunks = at.y == 0 ? 0
                                      : abi::chunk_end(at.x, spec::kChunkTokens) -
                                            abi::chunk_begin(at.x, slot.layer.window_tokens, spec::kChunkTokens);
    const uint64_t first = (static_cast<uint64_t>(row) * kHeads + head) * spec::kMostChunks;
    const auto* sums = core::at<const uint4>(partial) + first * (spec::kHeadDim / 4) + context.lane;
    const auto* stats = core::at<const uint2>(partial + kStatsBegin) + first;
    const bool has_dims = context.lane * 4 < spec::kHeadDim;

    // The first of this warp's chunks are asked for before it is known how much they weigh.
    Chunks asked;
    asked.load(sums, stats, context.warp, chunks, has_dims);
    float peak = -ptx::kInfinity;
#pragma unroll 1
    for (uint32_t begin = context.lane; begin < chunks; begin += kAhead * spec::kWarpThreads) {
      float peaks[kAhead];
#pragma unroll
      for (uint32_t ahead = 0; ahead < kAhead; ++ahead) {
        const uint32_t chunk = begin + ahead * spec::kWarpThreads;
        peaks[ahead] = -ptx::kInfinity;
        if (chunk < chunks) peaks[ahead] = __uint_as_float(ptx::load_relaxed_gpu(stats + chunk).x);
      }
#pragma unroll
      for (uint32_t ahead = 0; ahead < kAhead; ++ahead) peak = fmaxf(peak, peaks[ahead]);
    }
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) peak = fmaxf(peak, __shfl_xor_sync(core::kAllLanes, peak, step));

    float4 total = {};
    float mass = 0.0f;
#pragma unroll 1
    for (uint32_t begin = context.warp; begin < chunks; begin += kAhead * spec::kConsumerWarps) {
      if (begin != context.warp) asked.load(sums, stats, begin, chunks, has_dims);
      asked.add(total, mass, peak, begin, chunks);
    }
    if (!tools.consumers.meet()) return false;  // the last head's sums are read
    float* own = work.merged[context.warp];
    if (has_dims) *reinterpret_cast<float4*>(own + context.lane * 4) = total;
    if (context.lane == 0) own[spec::kHeadDim] = mass;
    if (!tools.consumers.meet()) return false;
    const uint32_t thread = context.warp * spec::kWarpThreads + context.lane;
    for (uint32_t pair = thread; pair < spec::kHeadDim / 2; pair += spec::kConsumerThreads) {
      float low = 0.0f;
      float high = 0.0f;
      float all = 0.0f;
#pragma unroll 2
      for (uint32_t warp = 0; warp < spec::kConsumerWarps; ++warp) {
        low += work.merged[warp][pair * 2];
        high += work.merged[warp][pair * 2 + 1];
        all += work.merged[warp][spec::kHeadDim];
      }
      const uint32_t merged = at.y == 0 ? 0 : ptx::pack(low / all, high / all);
      auto* to = core::at<uint32_t>(slot.outputs[0]) + (row * kHeads + head) * (spec::kHeadDim / 2);
      tools.written.put(to + pair, merged);
    }
    return true;
  }
};

}  // namespace mk::tasks
