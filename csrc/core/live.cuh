// Live state that loads depend on: rows' positions and routed experts, read once and kept in shared memory.
//
// The planner warp calls these after the load waits of a record that reads them, so what is kept is of this step: a
// step's state changes only once every reader of it has finished. A layer's routing is kept until the layer after the
// next is routed, which happens only once all down products of this one are done.
#pragma once
#include "core/patience.cuh"
#include "core/tags.cuh"

namespace mk::core {

// Low bits of a key, which name the expert.
inline constexpr uint32_t id_mask() {
  uint32_t mask = 1;
  while (mask < spec::kMaxExperts) mask *= 2;
  return mask - 1;
}
inline constexpr uint32_t kIdMask = id_mask();

class Live {
 public:
  __device__ explicit Live(const Context& context) : context_(context) {}

  // States of all rows in `step`.
  __device__ __forceinline__ const RowAt* rows(uint32_t step) {
    if (!has_rows_ || rows_step_ != step) {
      const auto* from = at<const abi::RowState>(context_.launch().rows);
      static_assert(offsetof(abi::RowState, position) == 0 && offsetof(abi::RowState, active) == 4);
      for (uint32_t row = context_.lane; row < spec::kRows; row += spec::kWarpThreads) {
        const uint2 state = ptx::load_relaxed_gpu(reinterpret_cast<const uint2*>(from + row));
        context_.shared.rows[row] = {state.x, state.y};
      }
      __syncwarp();
      if (context_.lane == 0) context_.shared.rows_step = step;
      has_rows_ = true;
      rows_step_ = step;
    }
    return context_.shared.rows;
  }

  // Finds the experts of the active rows in a record's layer, from the router's logits; `routing` then has them. False
  // when the kernel is to be left.
  __device__ __forceinline__ bool route(const Slot& slot, uint64_t logits) {
    if (layer_ == slot.record.layer && layer_step_ == slot.step) return true;
    Routing& found = context_.shared.work.routing[slot.record.layer & 1];
    if constexpr (spec::kStreaming) {
      list_given(found, rows(slot.step), slot);
    } else {
      if (!pick(found, rows(slot.step), slot, at<const uint32_t>(logits))) return false;
    }
    layer_ = slot.record.layer;
    layer_step_ = slot.step;
    return true;
  }

 private:
  static constexpr uint32_t kMaskWords = (spec::kMaxExperts + 31) / 32;

  // Streaming mode: the host says which experts are chosen.
  __device__ __forceinline__ void list_given(Routing& found, const RowAt* rows, const Slot& slot) {
    const uint32_t* ids =
        at<const uint32_t>(context_.launch().routed) + slot.record.layer * spec::kRows * spec::kMaxTopK;
    uint32_t mask = 0;
    for (uint32_t begin = 0; begin < spec::kRows * spec::kMaxTopK; begin += spec::kWarpThreads) {
      const uint32_t pick = begin + context_.lane;
      uint32_t expert = ~0u;
      if (pick < spec::kRows * spec::kMaxTopK && pick % spec::kMaxTopK < slot.layer.top_k &&
          rows[pick / spec::kMaxTopK].active != 0) {
        expert = ptx::load_relaxed_gpu(ids + pick);
      }
      for (uint32_t word = 0; word < kMaskWords; ++word) {
        const uint32_t chosen = __reduce_or_sync(kAllLanes, expert / 32 == word ? 1u << (expert % 32) : 0);
        if (context_.lane == word) mask |= chosen;
      }
    }
    list(found, mask);
  }

  // Top k of every row's logits: the likeliest first, of equals the lower id; each row's experts and scores in
  // ascending order of expert. Logits are compared without their last bits, which name the expert instead: one
  // reduction finds both, and logits that close differ from run to run of any other arithmetic.
  __device__ __forceinline__ bool pick(Routing& found, const RowAt* rows, const Slot& slot, const uint32_t* logits) {
    const uint32_t experts = slot.layer.num_experts;
    const uint32_t top_k = slot.layer.top_k;
    const uint32_t lane = own_lane(context_.lane);
    uint32_t all_rows[kMaskWords] = {};
    uint32_t coming[kMaskWords];
    if constexpr (spec::kLogitsAhead > 0) {
      if (!await_logits(coming, slot, reinterpret_cast<const uint64_t*>(logits))) return false;
    } else {
      ask(coming, logits, experts);
    }
#pragma unroll 1
    for (uint32_t row = 0; row < spec::kRows; ++row) {
      uint32_t keys[kMaskWords];  // in descending order
      uint32_t words[kMaskWords];
#pragma unroll
      for (uint32_t word = 0; word < kMaskWords; ++word) {
        const uint32_t expert = word * spec::kWarpThreads + lane;
        words[word] = coming[word];
        keys[word] = expert < experts ? (ordered(coming[word]) & ~kIdMask) | (kIdMask - expert) : 0;
      }
      if (row + 1 < spec::kRows) ask(coming, logits + (row + 1) * spec::kMaxExperts, experts);
      auto* slots = reinterpret_cast<uint32_t*>(found.slots[row]);
      for (uint32_t word = lane; word < (spec::kMaxExperts + 3) / 4; word += spec::kWarpThreads) slots[word] = ~0u;
      __syncwarp();
      if (rows[row].active == 0) continue;
#pragma unroll
      for (uint32_t end = kMaskWords; end > 1; --end) {
#pragma unroll
        for (uint32_t word = 0; word + 1 < end; ++word) {
          const uint32_t high = max(keys[word], keys[word + 1]);
          keys[word + 1] = min(keys[word], keys[word + 1]);
          keys[word] = high;
        }
      }
      uint32_t own = 0;  // key picked in round `lane`
#pragma unroll 1
      for (uint32_t round = 0; round < top_k; ++round) {
        const uint32_t key = __reduce_max_sync(kAllLanes, keys[0]);
        if (keys[0] == key) {
#pragma unroll
          for (uint32_t word = 0; word + 1 < kMaskWords; ++word) keys[word] = keys[word + 1];
          keys[kMaskWords - 1] = 0;
        }
        if (lane == round) own = key;
      }
      const bool is_pick = lane < top_k;
      const uint32_t expert = is_pick ? kIdMask - (own & kIdMask) : 0;
      uint32_t place = 0;
      float logit = 0.0f;
#pragma unroll
      for (uint32_t word = 0; word < kMaskWords; ++word) {
        const bool is_here = is_pick && expert / 32 == word;
        const uint32_t chosen = __reduce_or_sync(kAllLanes, is_here ? 1u << (expert % 32) : 0);
        all_rows[word] |= chosen;
        if (expert / 32 >= word) place += __popc(expert / 32 > word ? chosen : chosen & ((1u << (expert % 32)) - 1));
        const uint32_t bits = __shfl_sync(kAllLanes, words[word], expert % 32);
        if (is_here) logit = __uint_as_float(bits);
      }
      const float peak = __shfl_sync(kAllLanes, logit, 0);
      float score = spec::kSigmoid ? 1.0f / (1.0f + expf(-logit)) : expf(logit - peak);
      if constexpr (spec::kRenormalise || !spec::kSigmoid) {
        float sum = 0.0f;
        if constexpr (spec::kRenormalise) {
          sum = is_pick ? score : 0.0f;
        } else {
#pragma unroll
          for (uint32_t word = 0; word < kMaskWords; ++word) {
            if (word * spec::kWarpThreads + lane < experts) sum += expf(__uint_as_float(words[word]) - peak);
          }
        }
#pragma unroll 1
        for (uint32_t step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kAllLanes, sum, step);
        score /= sum;
      }
      if (is_pick) {
        found.scores[row][place] = score;
        found.slots[row][expert] = static_cast<uint8_t>(place);
      }
    }
    uint32_t mask = 0;
#pragma unroll
    for (uint32_t word = 0; word < kMaskWords; ++word) mask = lane == word ? all_rows[word] : mask;
    list(found, mask);
    return true;
  }

  // The logits of the one row, as they come: what has not its tag yet is asked for again. False when the kernel is to
  // be left.
  __device__ __forceinline__ bool await_logits(uint32_t (&words)[kMaskWords], const Slot& slot,
                                               const uint64_t* logits) const {
    const uint32_t tag = core::tag(slot.step, slot.record.layer);
    uint64_t coming[kMaskWords];
#pragma unroll
    for (uint32_t word = 0; word < kMaskWords; ++word) {
      // lanes without an expert have theirs
      coming[word] = word * spec::kWarpThreads + context_.lane < slot.layer.num_experts ? 0 : tagged(0, tag);
    }
    const bool are_there = await(
        context_,
        [&] {
#pragma unroll
          for (uint32_t word = 0; word < kMaskWords; ++word) {
            const uint64_t* from = logits + word * spec::kWarpThreads + context_.lane;
            if (!has_tag(coming[word], tag)) coming[word] = ptx::load_relaxed_gpu(from);
          }
          bool all = true;
#pragma unroll
          for (uint32_t word = 0; word < kMaskWords; ++word) all &= has_tag(coming[word], tag);
          return all;
        },
        [&] { return Waiting{abi::Place::kLoadWait, tag}; });
#pragma unroll
    for (uint32_t word = 0; word < kMaskWords; ++word) words[word] = static_cast<uint32_t>(coming[word]);
    return are_there;
  }

  __device__ __forceinline__ void ask(uint32_t (&words)[kMaskWords], const uint32_t* logits, uint32_t experts) const {
#pragma unroll
    for (uint32_t word = 0; word < kMaskWords; ++word) {
      const uint32_t expert = word * spec::kWarpThreads + context_.lane;
      if (expert < experts) words[word] = ptx::load_relaxed_gpu(logits + expert);
    }
  }

  // Bits of a float in an order that integers have too; 0 is below all numbers.
  __device__ static __forceinline__ uint32_t ordered(uint32_t bits) { return bits >> 31 ? ~bits : bits | 0x80000000u; }

  // The distinct experts, ascending; lane w holds word w of their mask.
  __device__ __forceinline__ void list(Routing& found, uint32_t own) {
    static_assert(kMaskWords <= spec::kWarpThreads);
    uint32_t listed = 0;
#pragma unroll
    for (uint32_t word = 0; word < kMaskWords; ++word) {
      const uint32_t mask = __shfl_sync(kAllLanes, own, word);
      if (mask >> context_.lane & 1) {
        const uint32_t rank = listed + __popc(mask & ((1u << context_.lane) - 1));
        found.experts[rank] = static_cast<uint16_t>(word * 32 + context_.lane);
      }
      listed += __popc(mask);
    }
    if (context_.lane == 0) found.num_experts = listed;
    __syncwarp();
  }

  const Context& context_;
  bool has_rows_ = false;
  uint32_t rows_step_ = 0;
  uint32_t layer_ = abi::kNone;
  uint32_t layer_step_ = 0;
};

// Experts of a record's layer, of this step.
__device__ __forceinline__ const Routing& routing(const Context& context, const Slot& slot) {
  return context.shared.work.routing[slot.record.layer & 1];
}

}  // namespace mk::core
