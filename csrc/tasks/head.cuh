// Logits of a stretch of the vocabulary, the best of them for every row, and the best draw: noise is added where logits
// are made, on all SMs, so that a row with a temperature costs hardly more than a greedy one.
#pragma once
#include "core/live.cuh"
#include "tasks/noise.cuh"
#include "tasks/stage.cuh"
#include "tasks/stream.cuh"

namespace mk::tasks {

struct Head {
  static constexpr Cut kCut = cut(spec::kHidden, spec::kHiddenSlice);

  __device__ static __forceinline__ bool run_of(const core::Context& context, const core::Slot& slot, uint32_t number,
                                                UnitRun& run, Cut& of) {
    of = kCut;
    run = {context.launch().head, slot.record.begin, slot.record.end, 0, 0};
    return number == 0;
  }

  __device__ static __forceinline__ void describe(const core::Context& context, const core::Slot& slot,
                                                  Product& product) {
    product.cut = kCut;
    product.units = slot.record.end - slot.record.begin;
    product.norm = context.launch().final_norm;
    product.residual = slot.inputs[0];
    product.mlp = slot.inputs[1];
    product.input = slot.record.inputs[0];
  }

  // What the rows draw with, for all warps: they meet before they finish a unit, or did when the step's first record
  // of the kind was staged.
  __device__ static __forceinline__ void stage_drawing(const core::Context& context) {
    if (context.warp + 1 != spec::kConsumerWarps || context.lane >= spec::kRows) return;
    const auto* row = core::at<const abi::RowState>(context.launch().rows) + context.lane;
    const uint32_t position = ptx::load_relaxed_gpu(&row->position);
    const float temperature = ptx::load_relaxed_gpu(&row->temperature);
    const uint32_t top_k = ptx::load_relaxed_gpu(&row->top_k);
    const uint64_t seed = ptx::load_relaxed_gpu(&row->seed);
    const float inverse = temperature == 0.0f || top_k == 1 ? 0.0f : inverse_temperature(temperature);
    context.shared.work.drawing[context.lane] = {noise_state(seed, position), inverse};
  }

  __device__ static __forceinline__ bool finish(const core::Context& context, const core::Slot& slot, Tools& tools,
                                                const Product&, uint32_t number, uint32_t, const Unit& values) {
    const uint32_t token = (slot.record.begin + number) * abi::kUnitRows + Unit::weight_row(context.lane);
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) {
      const uint32_t row = Unit::token_row(context.lane, output);
      if (row >= spec::kRows) continue;
      const float logit = values.values[output] * spec::kLogitScale;
      const float seen = logit == logit ? logit : ptx::kInfinity;  // no number wins, so that it is not overlooked
      const core::Drawing& drawing = context.shared.work.drawing[row];
      float value = seen;
      if (drawing.inverse != 0.0f) value = seen * drawing.inverse + gumbel(drawing.noise, token);
      keep_better(tools.best[output], tools.best_token[output], value, token);
      tools.peak[output] = fmaxf(tools.peak[output], seen);
      tools.written.put(core::at<uint32_t>(slot.outputs[0]) + static_cast<uint64_t>(row) * spec::kVocab + token,
                        __float_as_uint(logit));
    }
    return true;
  }

  // The best of all warps.
  __device__ static __forceinline__ bool leave_best(const core::Context& context, const core::Slot& slot,
                                                    Tools& tools) {
    core::Workspace& work = context.shared.work;
    if (!tools.consumers.meet()) return false;  // the last record's best are read
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) {
      float best = tools.best[output];
      uint32_t token = tools.best_token[output];
      float peak = tools.peak[output];
#pragma unroll
      for (uint32_t step = abi::kUnitRows / 2; step > 0; step /= 2) {
        const float other = __shfl_xor_sync(core::kAllLanes, best, step);
        keep_better(best, token, other, __shfl_xor_sync(core::kAllLanes, token, step));
        peak = fmaxf(peak, __shfl_xor_sync(core::kAllLanes, peak, step));
      }
      const uint32_t row = Unit::token_row(context.lane, output);
      if (Unit::weight_row(context.lane) == 0 && row < spec::kRows) {
        work.best[row][context.warp] = {{best, __uint_as_float(token)}, peak};
      }
    }
    if (!tools.consumers.meet()) return false;
    if (context.warp == 0 && context.lane < spec::kRows) {
      float best = -ptx::kInfinity;
      uint32_t token = ~0u;
      float peak = -ptx::kInfinity;
      for (uint32_t warp = 0; warp < spec::kConsumerWarps; ++warp) {
        const core::Best& other = work.best[context.lane][warp];
        keep_better(best, token, other.draw.x, __float_as_uint(other.draw.y));
        peak = fmaxf(peak, other.logit);
      }
      auto* to = core::at<uint4>(slot.outputs[1]) + context.lane * slot.record.shares;
      tools.written.put(to + slot.record.share, uint4{__float_as_uint(best), token, __float_as_uint(peak), 0});
    }
    return true;
  }
};

}  // namespace mk::tasks
