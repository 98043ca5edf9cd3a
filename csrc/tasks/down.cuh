// Down product by output columns: the same units of every expert that the rows chose, in ascending order of expert.
//
// A unit of an expert is finished by some warp; the sum over experts goes on in shared memory, where warps take turns
// in the order of experts, so that a row's sum is that of its own experts in ascending order, whatever the other rows
// chose.
#pragma once
#include "core/live.cuh"
#include "tasks/stage.cuh"
#include "tasks/stream.cuh"

namespace mk::tasks {

struct Down {
  static constexpr uint32_t kUnits = spec::kHidden / abi::kUnitRows;  // of one expert

  // One run an expert.
  __device__ static __forceinline__ bool run_of(const core::Context& context, const core::Slot& slot, uint32_t number,
                                                UnitRun& run, Cut& of) {
    of = cut(slot.layer.mlp_width, spec::kMlpSlice);
    const core::Routing& routing = core::routing(context, slot);
    const bool is_routed = slot.layer.num_experts != 0;
    if (number >= (is_routed ? routing.num_experts : 1)) return false;
    const uint32_t first = is_routed ? routing.experts[number] * kUnits : 0;
    const uint32_t units = slot.record.end - slot.record.begin;
    run = {slot.layer.down, first + slot.record.begin, first + slot.record.end, number * units, number};
    return true;
  }

  __device__ static __forceinline__ void describe(const core::Context& context, const core::Slot& slot,
                                                  Product& product) {
    const bool is_routed = slot.layer.num_experts != 0;
    product.cut = cut(slot.layer.mlp_width, spec::kMlpSlice);
    product.expert_units = slot.record.end - slot.record.begin;
    product.units = product.expert_units * (is_routed ? core::routing(context, slot).num_experts : 1);
    product.rank_end = product.rank_units = product.expert_units;
    product.rows = slot.inputs[0];
    product.row_stride = spec::kMaxTopK * spec::kMaxWidth;
    product.place_stride = spec::kMaxWidth;
    product.is_routed = is_routed;
    product.residual = slot.inputs[3];
  }

  __device__ static __forceinline__ bool finish(const core::Context& context, const core::Slot& slot, Tools& tools,
                                                const Product& product, uint32_t number, uint32_t rank,
                                                const Unit& values) {
    core::Workspace& work = context.shared.work;
    const core::Routing& routing = core::routing(context, slot);
    const uint32_t unit = number - rank * product.expert_units;
    const uint32_t expert = product.is_routed ? routing.experts[rank] : 0;
    const bool is_last = number + product.expert_units >= product.units;
    const uint32_t sum_slot = (tools.sums + unit) % spec::kSumSlots;
    const uint32_t row = Unit::weight_row(context.lane);
    const uint32_t column = (slot.record.begin + unit) * abi::kUnitRows + row;
    float own[kOutputs];  // what this expert adds
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) {
      const uint32_t token = Unit::token_row(context.lane, output);
      own[output] = values.values[output];
      if (product.is_routed && token < spec::kRows) {
        const uint32_t place = routing.slots[token][expert];
        // Rows that did not choose the expert are selected away: what is in their sums may be anything.
        own[output] = place == core::kNoSlot ? 0.0f : routing.scores[token][place] * own[output];
      }
    }
    const uint32_t turn = ptx::shared_address(&work.turns[sum_slot]);
    if (!core::await(
            context, [&] { return ptx::load_acquire_shared(turn) == rank; },
            [&] { return core::Waiting{abi::Place::kData, rank}; })) {
      return false;
    }
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) {
      const uint32_t token = Unit::token_row(context.lane, output);
      if (token >= spec::kRows) continue;
      const float total = rank == 0 ? own[output] : work.sums[sum_slot][token][row] + own[output];
      if (is_last) {
        float result = ptx::rounded(total);
        if (product.residual != 0) result += unit == 0 ? tools.stream[output] : stream_at(product, token, column);
        tools.written.put(core::at<uint16_t>(slot.outputs[0]) + token * spec::kHidden + column, ptx::narrow(result));
      } else {
        work.sums[sum_slot][token][row] = total;
      }
    }
    __syncwarp();
    if (context.lane == 0) ptx::store_release_shared(turn, is_last ? 0 : rank + 1);
    return true;
  }
};

}  // namespace mk::tasks
