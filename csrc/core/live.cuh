// Live state that loads depend on: rows' positions and routed experts, read once and kept in shared memory.
//
// The producer warp calls these after the load waits of a record that reads them, so what is kept is of this step: a
// step's state changes only once every reader of it has finished.
#pragma once
#include "core/patience.cuh"

namespace mk::core {

class Live {
 public:
  __device__ explicit Live(const Context& context) : context_(context) {}

  // States of all rows in `step`.
  __device__ __forceinline__ const abi::RowState* rows(uint32_t step) {
    if (!has_rows_ || rows_step_ != step) {
      const uint32_t* from = at<const uint32_t>(context_.launch().rows);
      uint32_t* to = reinterpret_cast<uint32_t*>(context_.shared.rows);
      for (uint32_t word = context_.lane; word < spec::kRows * kStateWords; word += spec::kWarpThreads) {
        to[word] = ptx::load_relaxed_gpu(from + word);
      }
      __syncwarp();
      has_rows_ = true;
      rows_step_ = step;
    }
    return context_.shared.rows;
  }

  // Number of distinct experts of the active rows in a layer; they stand in shared memory, ascending.
  __device__ __forceinline__ uint32_t experts(uint32_t step, uint32_t layer, uint32_t top_k) {
    if (layer_ != layer || layer_step_ != step) {
      list_experts(rows(step), layer, top_k);
      layer_ = layer;
      layer_step_ = step;
    }
    return context_.shared.num_experts;
  }

  __device__ __forceinline__ uint32_t expert(uint32_t rank) const { return context_.shared.experts[rank]; }

 private:
  static constexpr uint32_t kStateWords = sizeof(abi::RowState) / sizeof(uint32_t);
  static constexpr uint32_t kMaskWords = (spec::kMaxExperts + 31) / 32;

  __device__ __forceinline__ void list_experts(const abi::RowState* rows, uint32_t layer, uint32_t top_k) {
    const uint32_t* ids = at<const uint32_t>(context_.launch().routed) + layer * spec::kRows * spec::kMaxTopK;
    uint32_t masks[kMaskWords] = {};
    for (uint32_t pick = context_.lane; pick < spec::kRows * spec::kMaxTopK; pick += spec::kWarpThreads) {
      if (pick % spec::kMaxTopK >= top_k || rows[pick / spec::kMaxTopK].active == 0) continue;
      const uint32_t expert = ptx::load_relaxed_gpu(ids + pick);
#pragma unroll
      for (uint32_t word = 0; word < kMaskWords; ++word) {
        if (expert / 32 == word) masks[word] |= 1u << (expert % 32);
      }
    }
    __syncwarp();
    uint32_t listed = 0;
#pragma unroll
    for (uint32_t word = 0; word < kMaskWords; ++word) {
      const uint32_t mask = __reduce_or_sync(kAllLanes, masks[word]);
      if (mask >> context_.lane & 1) {
        const uint32_t rank = listed + __popc(mask & ((1u << context_.lane) - 1));
        context_.shared.experts[rank] = static_cast<uint16_t>(word * 32 + context_.lane);
      }
      listed += __popc(mask);
    }
    if (context_.lane == 0) context_.shared.num_experts = listed;
    __syncwarp();
  }

  const Context& context_;
  bool has_rows_ = false;
  uint32_t rows_step_ = 0;
  uint32_t layer_ = abi::kNone;
  uint32_t layer_step_ = 0;
};

}  // namespace mk::core
