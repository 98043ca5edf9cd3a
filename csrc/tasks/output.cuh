// Units of the output projection, added to the residual stream.
#pragma once
#include "core/live.cuh"
#include "tasks/stage.cuh"
#include "tasks/stream.cuh"

namespace mk::tasks {

struct Output {
  static constexpr Cut kCut = cut(spec::kQSize, spec::kQSlice);

  __device__ static __forceinline__ bool run_of(const core::Context& context, const core::Slot& slot, uint32_t number,
                                                UnitRun& run, Cut& of) {
    of = kCut;
    run = {slot.layer.output, slot.record.begin, slot.record.end, 0, 0};
    return number == 0;
  }

  __device__ static __forceinline__ void describe(const core::Context& context, const core::Slot& slot,
                                                  Product& product) {
    product.cut = kCut;
    product.units = slot.record.end - slot.record.begin;
    product.rows = slot.inputs[0];
    product.row_stride = spec::kQSize;
    product.residual = slot.inputs[1];
    product.mlp = slot.inputs[2];
  }

  __device__ static __forceinline__ bool finish(const core::Context& context, const core::Slot& slot, Tools& tools,
                                                const Product& product, uint32_t number, uint32_t, const Unit& values) {
    const uint32_t column = (slot.record.begin + number) * abi::kUnitRows + Unit::weight_row(context.lane);
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) {
      const uint32_t token = Unit::token_row(context.lane, output);
      if (token < spec::kRows) {
        const float x = number == 0 ? tools.stream[output] : stream_at(product, token, column);
        tools.written.put(core::at<uint16_t>(slot.outputs[0]) + token * spec::kHidden + column,
                          ptx::narrow(x + ptx::rounded(values.values[output])));
      }
    }
    return true;
  }
};

}  // namespace mk::tasks
