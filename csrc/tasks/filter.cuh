// A draw among the tokens of one row that min_p, top_k and top_p keep, by all consumers of a block.
//
// Logits are looked at pass by pass, as distances below the best. Tokens are ranked by a key: the distance's bits,
// which order as the distance does, then the id. The draw over all tokens, which the head has made, stands if its token
// is kept, which one pass tells. Otherwise the last key that is kept is searched, an interval of keys cut into bins a
// pass, and the row draws again. Masses in bins are integers, 2^40 for the best token, so that no sum depends on the
// order of its terms.
#pragma once
#include "core/live.cuh"
#include "tasks/noise.cuh"
#include "tasks/tools.cuh"

namespace mk::tasks {

struct Draw {
  float value = -ptx::kInfinity;
  uint32_t token = ~0u;
};

class Filter {
 public:
  __device__ Filter(const core::Context& context, Tools& tools, uint64_t logits, const abi::RowState* row,
                    uint32_t index, float peak)
      : context_(context),
        tools_(tools),
        logits_(core::at<const uint4>(logits) + index * kVectors4),
        peak_(peak),
        inverse_(inverse_temperature(ptx::load_relaxed_gpu(&row->temperature))),
        slope_(-inverse_ * kLog2E),
        top_p_(ptx::load_relaxed_gpu(&row->top_p)),
        min_p_(ptx::load_relaxed_gpu(&row->min_p)),
        top_k_(ptx::load_relaxed_gpu(&row->top_k)) {
    if (top_k_ == 0) top_k_ = spec::kVocab;
  }

  // The token, of which `drawn` is the draw over all; false when the kernel is to be left.
  __device__ __forceinline__ bool draw(uint32_t& token, uint32_t drawn, uint64_t noise) {
    if (!tools_.consumers.meet()) return false;  // nobody uses the workspace any more
    const bool by_mass = top_p_ < 1.0f;
    uint64_t last = ~0ull;  // key that is kept
    if (by_mass && top_k_ < spec::kVocab && !search<false>(top_k_, last)) return false;

    const float distance = distance_of(ptx::load_relaxed_gpu(reinterpret_cast<const uint32_t*>(logits_) + drawn));
    const uint64_t key = key_of(distance, drawn);
    Survey survey;
    if (!look(survey, distance, drawn, last)) return false;
    const float wanted = top_p_ * survey.mass;
    token = drawn;
    if (key <= last && is_kept(distance) && (by_mass ? survey.better_mass < wanted : survey.better < top_k_))
      return true;
    // Then all tokens that are kept are better.
    last = min(last, key - 1);
    if (by_mass && !search<true>(max(static_cast<uint64_t>(wanted * kOne), uint64_t{1}), last)) return false;
    if (!by_mass && top_k_ < spec::kVocab && !search<false>(top_k_, last)) return false;
    return draw_again(token, noise, last);
  }

 private:
  static constexpr uint32_t kVectors4 = spec::kVocab / 4;
  static constexpr uint32_t kInfinityBits = 0x7f800000;
  static constexpr uint32_t kNothing = 0xff800000;  // minus infinity
  static constexpr float kLog2E = 1.4426950408889634f;
  static constexpr float kOne = 1ull << 40;  // mass of the best token, in the bins

  // Sums over all tokens that min_p and a last key leave; those of a thread, then of all, in a fixed order.
  struct Survey {
    float mass = 0.0f;
    float better_mass = 0.0f;  // of those better than the draw
    uint32_t better = 0;       // and their number
  };

  __device__ __forceinline__ float distance_of(uint32_t logit) const { return peak_ - __uint_as_float(logit); }

  // Of the best token's mass.
  __device__ __forceinline__ float share_of(float distance) const { return exp2f(distance * slope_); }

  __device__ __forceinline__ bool is_kept(float distance) const {
    return share_of(distance) >= min_p_ && distance < ptx::kInfinity;
  }

  __device__ static __forceinline__ uint64_t key_of(float distance, uint32_t token) {
    return static_cast<uint64_t>(__float_as_uint(distance)) << 32 | token;
  }

  // Shows `visit` distance and id of this thread's tokens, some of them asked for together.
  template <uint32_t kAhead, class Visit>
  __device__ __forceinline__ void walk(Visit&& visit) const {
    const uint32_t thread = context_.warp * spec::kWarpThreads + context_.lane;
#pragma unroll 1
    for (uint32_t begin = thread; begin < kVectors4; begin += kAhead * spec::kConsumerThreads) {
      uint4 asked[kAhead];
#pragma unroll
      for (uint32_t ahead = 0; ahead < kAhead; ++ahead) {
        const uint32_t vector = begin + ahead * spec::kConsumerThreads;
        asked[ahead] = {kNothing, kNothing, kNothing, kNothing};
        if (vector < kVectors4) asked[ahead] = ptx::load_relaxed_gpu(logits_ + vector);
      }
#pragma unroll
      for (uint32_t ahead = 0; ahead < kAhead; ++ahead) {
        const uint32_t token = (begin + ahead * spec::kConsumerThreads) * 4;
        visit(distance_of(asked[ahead].x), token);
        visit(distance_of(asked[ahead].y), token + 1);
        visit(distance_of(asked[ahead].z), token + 2);
        visit(distance_of(asked[ahead].w), token + 3);
      }
    }
  }

  // All tokens against a draw, without branches: most rows need no more than this.
  __device__ __forceinline__ bool look(Survey& all, float distance, uint32_t drawn, uint64_t last) {
    const float last_distance = fminf(__uint_as_float(static_cast<uint32_t>(last >> 32) & 0x7fffffffu), ptx::kInfinity);
    const uint32_t last_token = static_cast<uint32_t>(last);
    Survey own;
    walk<8>([&](float other, uint32_t token) {
      const float share = share_of(other);
      const bool counts = share >= min_p_ && (other < last_distance || (other == last_distance && token <= last_token));
      const bool is_better = counts && (other < distance || (other == distance && token < drawn));
      const float mass = counts ? share : 0.0f;
      own.mass += mass;
      own.better_mass += is_better ? mass : 0.0f;
      own.better += is_better ? 1 : 0;
    });
#pragma unroll 1
    for (uint32_t step = 16; step > 0; step /= 2) {
      own.mass += __shfl_xor_sync(core::kAllLanes, own.mass, step);
      own.better_mass += __shfl_xor_sync(core::kAllLanes, own.better_mass, step);
      own.better += __shfl_xor_sync(core::kAllLanes, own.better, step);
    }
    core::Workspace& work = context_.shared.work;
    if (context_.lane == 0) {
      work.surveys[context_.warp] = {own.mass, own.better_mass, __uint_as_float(own.better)};
    }
    if (!tools_.consumers.meet()) return false;
    for (uint32_t warp = 0; warp < spec::kConsumerWarps; ++warp) {
      const float3 other = work.surveys[warp];
      all.mass += other.x;
      all.better_mass += other.y;
      all.better += __float_as_uint(other.z);
    }
    return true;
  }

  // Lowers `last` to the key at which the tokens, or their mass, from the best on, reach `wanted`.
  template <bool kByMass>
  __device__ __forceinline__ bool search(uint64_t wanted, uint64_t& last) {
    core::Bins& bins = context_.shared.work.bins;
    const uint32_t thread = context_.warp * spec::kWarpThreads + context_.lane;
    // The first cut is by distance, a power of two for a bin: an eighth to a sixteenth of the temperature.
    const uint32_t exponent = __float_as_uint(8.0f * fmaxf(inverse_, 1.0f / (1 << 20))) & kInfinityBits;
    const float scale = __uint_as_float(exponent);
    uint64_t begin = 0;
    uint64_t end = static_cast<uint64_t>(kInfinityBits + 1) << 32;
    uint32_t shift = ~0u;
#pragma unroll 1
    for (;;) {
      for (uint32_t bin = thread; bin < core::kBins; bin += spec::kConsumerThreads) {
        bins.tokens[bin] = 0;
        bins.masses[bin] = 0;
      }
      if (!tools_.consumers.meet()) return false;
      const float far = __uint_as_float(min(static_cast<uint32_t>((min(end - 1, last)) >> 32), kInfinityBits));
      walk<4>([&](float distance, uint32_t token) {
        if (distance > far) return;
        const uint64_t key = key_of(distance, token);
        if (key > last || key < begin || key >= end || !is_kept(distance)) return;
        const uint32_t bin = shift == ~0u ? min(static_cast<uint32_t>(distance * scale), core::kBins - 1)
                                          : static_cast<uint32_t>((key - begin) >> shift);
        ptx::add_relaxed_shared(bins.tokens[bin], 1);
        if constexpr (kByMass) {
          ptx::add_relaxed_shared(bins.masses[bin], static_cast<uint64_t>(share_of(distance) * kOne));
        }
      });
      if (!tools_.consumers.meet()) return false;
      // Every warp finds the bin in which what is wanted is reached; a lane has eight of them.
      constexpr uint32_t kOwn = core::kBins / spec::kWarpThreads;
      uint64_t own = 0;
      for (uint32_t bin = 0; bin < kOwn; ++bin) own += counted<kByMass>(context_.lane * kOwn + bin);
      uint64_t before = own;
#pragma unroll 1
      for (uint32_t step = 1; step < spec::kWarpThreads; step *= 2) {
        const uint64_t other = __shfl_up_sync(core::kAllLanes, before, step);
        if (context_.lane >= step) before += other;
      }
      before -= own;
      const uint32_t reached = __ballot_sync(core::kAllLanes, before < wanted && wanted <= before + own);
      if (reached == 0) return tools_.consumers.meet();  // there is not that much: all of it is kept
      const uint32_t lane = __ffs(reached) - 1;
      before = __shfl_sync(core::kAllLanes, before, lane);
      uint32_t bin = lane * kOwn;
      for (; before + counted<kByMass>(bin) < wanted; ++bin) before += counted<kByMass>(bin);
      wanted -= before;
      const bool is_one = bins.tokens[bin] == 1;
      if (shift == ~0u) {
        begin = static_cast<uint64_t>(__float_as_uint(bin / scale)) << 32;
        if (bin + 1 < core::kBins) end = static_cast<uint64_t>(__float_as_uint((bin + 1) / scale)) << 32;
      } else {
        begin += static_cast<uint64_t>(bin) << shift;
        end = min(end, begin + (1ull << shift));
      }
      if (!tools_.consumers.meet()) return false;  // all have read the bins
      if (is_one) {
        last = min(last, end - 1);
        return true;
      }
      const uint32_t bits = 64 - __clzll(end - begin - 1);
      shift = bits > 8 ? bits - 8 : 0;
    }
  }

  template <bool kByMass>
  __device__ __forceinline__ uint64_t counted(uint32_t bin) const {
    const core::Bins& bins = context_.shared.work.bins;
    return kByMass ? bins.masses[bin] : bins.tokens[bin];
  }

  __device__ __forceinline__ bool draw_again(uint32_t& token, uint64_t noise, uint64_t last) {
    Draw best;
    const float far = __uint_as_float(min(static_cast<uint32_t>(last >> 32), kInfinityBits));
    walk<4>([&](float distance, uint32_t other) {
      if (distance > far || key_of(distance, other) > last || !is_kept(distance)) return;
      keep_better(best.value, best.token, -distance * inverse_ + gumbel(noise, other), other);
    });
#pragma unroll 1
    for (uint32_t step = 16; step > 0; step /= 2) {
      const float value = __shfl_xor_sync(core::kAllLanes, best.value, step);
      keep_better(best.value, best.token, value, __shfl_xor_sync(core::kAllLanes, best.token, step));
    }
    core::Workspace& work = context_.shared.work;
    if (context_.lane == 0) work.best[0][context_.warp].draw = {best.value, __uint_as_float(best.token)};
    if (!tools_.consumers.meet()) return false;
    best = {};
    for (uint32_t warp = 0; warp < spec::kConsumerWarps; ++warp) {
      const float2 other = work.best[0][warp].draw;
      keep_better(best.value, best.token, other.x, __float_as_uint(other.y));
    }
    token = best.token;
    return true;
  }

  const core::Context& context_;
  Tools& tools_;
  const uint4* logits_;
  const float peak_;     // best logit
  const float inverse_;  // of the temperature
  const float slope_;    // of the logarithm, to base 2, of a token's share
  const float top_p_;
  const float min_p_;
  uint32_t top_k_;
};

}  // namespace mk::tasks
