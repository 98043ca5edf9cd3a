// A draw among the tokens of one row that min_p, top_k and top_p keep, by all consumers of a block.
//
// Logits are looked at pass by pass, as distances below the best. Masses are integers, 2^40 for the best token, so that
// no sum depends on the order of its terms. Tokens are ranked by a key: the distance's bits, which order as the
// distance does, then the id. The draw over all tokens, which the head has made, stands if its token is kept, which one
// pass tells; otherwise the last key that is kept is searched, an interval of keys cut into bins a pass, and the row
// draws again.
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
        top_p_(ptx::load_relaxed_gpu(&row->top_p)),
        min_p_(ptx::load_relaxed_gpu(&row->min_p)),
        top_k_(ptx::load_relaxed_gpu(&row->top_k)) {
    if (top_k_ == 0) top_k_ = spec::kVocab;
  }

  // The token, of which `drawn` is the draw over all; false when the kernel is to be left.
  __device__ __forceinline__ bool draw(uint32_t& token, uint32_t drawn, uint64_t noise) {
    if (!tools_.consumers.meet()) return false;  // nobody uses the workspace any more
    if (context_.warp == 0 && context_.lane == 0) context_.shared.work.x_input = abi::kNone;  // bins lie there
    const bool by_mass = top_p_ < 1.0f;
    uint64_t last = ~0ull;  // key that is kept
    if (by_mass && top_k_ < spec::kVocab && !search<false>(top_k_, last)) return false;
    uint64_t wanted = 0;
    if (!stands(token, drawn, last, by_mass, wanted)) return false;
    if (token == drawn) return true;
    if (by_mass && !search<true>(wanted, last)) return false;
    if (!by_mass && top_k_ < spec::kVocab && !search<false>(top_k_, last)) return false;
    return draw_again(token, noise, last);
  }

 private:
  static constexpr uint32_t kVectors4 = spec::kVocab / 4;
  static constexpr float kOne = 1ull << 40;  // mass of the best token

  struct Token {
    float distance;
    float share;  // of the best token's mass

    __device__ __forceinline__ uint64_t mass() const { return static_cast<uint64_t>(share * kOne); }
  };

  __device__ __forceinline__ bool is_kept(const Token& token) const {
    return token.share >= min_p_ && token.distance < ptx::kInfinity;
  }

  __device__ static __forceinline__ uint64_t key_of(float distance, uint32_t token) {
    return static_cast<uint64_t>(__float_as_uint(distance)) << 32 | token;
  }

  // Shows `visit` all tokens of this thread's that min_p keeps, some of them asked for together.
  template <uint32_t kAhead, class Visit>
  __device__ __forceinline__ void walk(Visit&& visit) const {
    const uint32_t thread = context_.warp * spec::kWarpThreads + context_.lane;
#pragma unroll 1
    for (uint32_t begin = thread; begin < kVectors4; begin += kAhead * spec::kConsumerThreads) {
      uint4 asked[kAhead];
#pragma unroll
      for (uint32_t ahead = 0; ahead < kAhead; ++ahead) {
        const uint32_t vector = begin + ahead * spec::kConsumerThreads;
        if (vector < kVectors4) asked[ahead] = ptx::load_relaxed_gpu(logits_ + vector);
      }
#pragma unroll
      for (uint32_t ahead = 0; ahead < kAhead; ++ahead) {
        const uint32_t vector = begin + ahead * spec::kConsumerThreads;
        if (vector >= kVectors4) continue;
        const uint32_t words[4] = {asked[ahead].x, asked[ahead].y, asked[ahead].z, asked[ahead].w};
#pragma unroll
        for (uint32_t word = 0; word < 4; ++word) {
          const float distance = peak_ - __uint_as_float(words[word]);
          const Token token{distance, expf(-distance * inverse_)};
          if (is_kept(token)) visit(token, key_of(distance, vector * 4 + word));
        }
      }
    }
  }

  // Whether the draw over all tokens is kept: `token` is then that; `wanted` is the mass that top_p asks for.
  __device__ __forceinline__ bool stands(uint32_t& token, uint32_t drawn, uint64_t last, bool by_mass,
                                         uint64_t& wanted) {
    const auto* words = reinterpret_cast<const uint32_t*>(logits_);
    const float distance = peak_ - __uint_as_float(ptx::load_relaxed_gpu(words + drawn));
    const Token candidate{distance, expf(-distance * inverse_)};
    const uint64_t key = key_of(distance, drawn);
    uint64_t better = 0;  // tokens, or their mass
    uint64_t all = 0;
    walk<8>([&](const Token& other, uint64_t other_key) {
      if (other_key > last) return;
      const uint64_t counted = by_mass ? other.mass() : 1;
      all += counted;
      if (other_key < key) better += counted;
    });
    better = sum(better);
    all = sum(all);
    core::Workspace& work = context_.shared.work;
    if (context_.lane == 0) work.masses[context_.warp] = {better, all};
    if (!tools_.consumers.meet()) return false;
    better = all = 0;
    for (uint32_t warp = 0; warp < spec::kConsumerWarps; ++warp) {
      better += work.masses[warp].x;
      all += work.masses[warp].y;
    }
    wanted = static_cast<uint64_t>(ceil(static_cast<double>(top_p_) * static_cast<double>(all)));
    const bool fits = by_mass ? better < wanted : better < top_k_;
    token = is_kept(candidate) && key <= last && fits ? drawn : ~0u;
    return true;
  }

  // Lowers `last` to the key at which the tokens, or their mass, from the best on, reach `wanted`.
  template <bool kByMass>
  __device__ __forceinline__ bool search(uint64_t wanted, uint64_t& last) {
    core::Bins& bins = context_.shared.work.bins;
    const uint32_t thread = context_.warp * spec::kWarpThreads + context_.lane;
    // The first cut is by distance, a power of two for a bin: an eighth to a sixteenth of the temperature.
    const uint32_t exponent = __float_as_uint(8.0f * fmaxf(inverse_, 1.0f / (1 << 20))) & 0x7f800000u;
    const float scale = __uint_as_float(exponent);
    uint64_t begin = 0;
    uint64_t end = static_cast<uint64_t>(__float_as_uint(ptx::kInfinity) + 1) << 32;
    uint32_t shift = ~0u;
#pragma unroll 1
    for (;;) {
      for (uint32_t bin = thread; bin < core::kBins; bin += spec::kConsumerThreads) {
        bins.tokens[bin] = 0;
        bins.masses[bin] = 0;
      }
      if (!tools_.consumers.meet()) return false;
      walk<2>([&](const Token& token, uint64_t key) {
        if (key > last || key < begin || key >= end) return;
        const uint32_t bin = shift == ~0u ? min(static_cast<uint32_t>(token.distance * scale), core::kBins - 1)
                                          : static_cast<uint32_t>((key - begin) >> shift);
        ptx::add_relaxed_shared(bins.tokens[bin], 1);
        if constexpr (kByMass) ptx::add_relaxed_shared(bins.masses[bin], token.mass());
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
    walk<2>([&](const Token& other, uint64_t key) {
      if (key > last) return;
      const uint32_t id = static_cast<uint32_t>(key);
      keep_better(best.value, best.token, -other.distance * inverse_ + gumbel(noise, id), id);
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

  __device__ static __forceinline__ uint64_t sum(uint64_t value) {
#pragma unroll 1
    for (uint32_t step = 16; step > 0; step /= 2) value += __shfl_xor_sync(core::kAllLanes, value, step);
    return value;
  }

  const core::Context& context_;
  Tools& tools_;
  const uint4* logits_;
  const float peak_;     // best logit
  const float inverse_;  // of the temperature
  const float top_p_;
  const float min_p_;
  uint32_t top_k_;
};

}  // namespace mk::tasks
