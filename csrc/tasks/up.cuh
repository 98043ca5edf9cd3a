// Gate and up products and their activation: static units of a dense MLP, or this share's (expert, tile) units.
#pragma once
#include "core/live.cuh"
#include "tasks/stage.cuh"
#include "tasks/stream.cuh"

namespace mk::tasks {

struct Up {
  static constexpr Cut kCut = cut(spec::kHidden, spec::kHiddenSlice);

  // Units of the record: static ones, or a share of all chosen experts' units.
  __device__ static __forceinline__ void find_units(const core::Context& context, core::Slot& slot) {
    const abi::Record& record = slot.record;
    if (slot.layer.num_experts == 0) {
      slot.first_unit = record.begin;
      slot.end_unit = record.end;
    } else {
      const uint32_t total = core::routing(context, slot).num_experts * tiles(slot);
      slot.first_unit = abi::share_begin(total, record.share, record.shares);
      slot.end_unit = abi::share_begin(total, record.share + 1, record.shares);
    }
  }

  // Units of an expert.
  __device__ static __forceinline__ uint32_t tiles(const core::Slot& slot) {
    return slot.layer.mlp_width / abi::kPairedColumns;
  }

  // Run after run, the units of one expert after those of another.
  __device__ static __forceinline__ bool run_of(const core::Context& context, const core::Slot& slot, uint32_t number,
                                                UnitRun& run, Cut& of) {
    of = kCut;
    if (slot.layer.num_experts == 0) {
      run = {slot.layer.up, slot.first_unit, slot.end_unit, 0, 0};
      return number == 0;
    }
    const uint32_t of_expert = tiles(slot);
    const uint32_t rank = abi::expert_rank(slot.first_unit, of_expert) + number;
    const uint32_t begin = max(slot.first_unit, rank * of_expert);
    const uint32_t end = min(slot.end_unit, (rank + 1) * of_expert);
    if (begin >= end) return false;
    const uint32_t shift = (core::routing(context, slot).experts[rank] - rank) * of_expert;  // from ranks to experts
    run = {slot.layer.up, begin + shift, end + shift, begin - slot.first_unit, rank};
    return true;
  }

  __device__ static __forceinline__ void describe(const core::Context& context, const core::Slot& slot,
                                                  Product& product) {
    product.cut = kCut;
    product.units = slot.end_unit - slot.first_unit;
    if (slot.layer.num_experts != 0) {
      product.rank_units = tiles(slot);
      product.rank = slot.first_unit / product.rank_units;
      product.rank_end = (product.rank + 1) * product.rank_units - slot.first_unit;
    }
    product.norm = slot.layer.mlp_norm;
    product.residual = slot.inputs[0];
    product.mlp = slot.inputs[1];
    product.input = slot.record.inputs[0];
  }

  __device__ static __forceinline__ bool finish(const core::Context& context, const core::Slot& slot, Tools& tools,
                                                const Product&, uint32_t number, uint32_t rank, const Unit& values) {
    const core::Routing& routing = core::routing(context, slot);
    const bool is_routed = slot.layer.num_experts != 0;
    const uint32_t expert = is_routed ? routing.experts[rank] : 0;
    const uint32_t tile = slot.first_unit + number - rank * tiles(slot);
    const uint32_t row = Unit::weight_row(context.lane);
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) {
      const float gate = ptx::rounded(values.values[output]);
      const float up = ptx::rounded(__shfl_xor_sync(core::kAllLanes, values.values[output], abi::kPairedColumns));
      const uint32_t token = Unit::token_row(context.lane, output);
      if (row >= abi::kPairedColumns || token >= spec::kRows) continue;
      const uint32_t place = is_routed ? routing.slots[token][expert] : 0;
      if (place == core::kNoSlot) continue;
      const float silu = ptx::rounded(gate / (1.0f + expf(-gate)));
      auto* to = core::at<uint16_t>(slot.outputs[0]) + (token * spec::kMaxTopK + place) * spec::kMaxWidth;
      tools.written.put(to + tile * abi::kPairedColumns + row, ptx::narrow(silu * up));
    }
    return true;
  }
};

}  // namespace mk::tasks
