// Norm, then router rows, published early, then units of the packed Q, K, V projection; either may be absent.
#pragma once
#include "core/live.cuh"
#include "tasks/stage.cuh"
#include "tasks/stream.cuh"

namespace mk::tasks {

struct Project {
  static constexpr uint32_t kRouterRowBytes = spec::kHidden * spec::kElementBytes;
  static constexpr uint32_t kRouterRows = spec::kCopyBytes / kRouterRowBytes;  // of one copy
  static constexpr uint32_t kColumns = spec::kQSize + 2 * spec::kKvHeads * spec::kHeadDim;
  static constexpr uint32_t kUnits = kColumns / abi::kUnitRows;  // of one K split
  static_assert(spec::kStreaming || kRouterRows > 0, "a copy holds a router row");

  // The router's rows are no units: they are copied by whole rows.
  __device__ static __forceinline__ bool router_rows(const core::Slot& slot, core::Pieces& pieces) {
    const abi::Record& record = slot.record;
    const uint32_t piece = spec::kStreaming ? spec::kCopyBytes : kRouterRows * kRouterRowBytes;
    pieces = {slot.layer.router + static_cast<uint64_t>(record.router_begin) * kRouterRowBytes,
              (record.router_end - record.router_begin) * kRouterRowBytes, piece, static_cast<int32_t>(piece),
              static_cast<int32_t>(piece)};
    pieces.slice_bytes = kRouterRowBytes;
    pieces.unit_slices = 1;
    return pieces.bytes > 0;
  }

  __device__ static __forceinline__ bool run_of(const core::Context&, const core::Slot& slot, uint32_t number,
                                                UnitRun& run, Cut& of) {
    of = cut(kSplitColumns, spec::kProjectSlice);
    run = {slot.layer.project, slot.record.begin, slot.record.end, 0, 0};
    return number == 0;
  }

  // Copies of the router's rows.
  __device__ static __forceinline__ uint32_t router_copies(const core::Slot& slot) {
    const uint32_t rows = slot.record.router_end - slot.record.router_begin;
    if constexpr (spec::kStreaming) return (rows * kRouterRowBytes + spec::kCopyBytes - 1) / spec::kCopyBytes;
    return (rows + kRouterRows - 1) / kRouterRows;
  }

  __device__ static __forceinline__ void describe(const core::Context&, const core::Slot& slot, Product& product) {
    const abi::Record& record = slot.record;
    product.cut = cut(kSplitColumns, spec::kProjectSlice);
    product.units = record.end - record.begin;
    product.first_copy = router_copies(slot);
    // Beside Q, K, V the router reads what they read; alone, in a sequential block, it reads the MLP's input.
    product.norm = record.begin < record.end ? slot.layer.input_norm : slot.layer.mlp_norm;
    product.residual = slot.inputs[0];
    product.mlp = slot.inputs[1];
    product.input = record.inputs[0];
    product.first_unit = record.begin;
    product.split_units = kUnits;
  }

  __device__ static __forceinline__ bool finish(const core::Context& context, const core::Slot& slot, Tools& tools,
                                                const Product&, uint32_t number, uint32_t, const Unit& values) {
    const uint32_t unit = slot.record.begin + number;
    const uint32_t split = spec::kProjectKSplits == 1 ? 0 : unit / kUnits;
    const uint32_t column = (unit - split * kUnits) * abi::kUnitRows + Unit::weight_row(context.lane);
#pragma unroll
    for (uint32_t output = 0; output < kOutputs; ++output) {
      const uint32_t token = Unit::token_row(context.lane, output);
      if (token < spec::kRows) {
        auto* to = core::at<uint32_t>(slot.outputs[1]) + (split * spec::kRows + token) * kColumns + column;
        tools.written.put(to, __float_as_uint(values.values[output]));
      }
    }
    return true;
  }

  // Logits of this record's router rows, in fp32. A row is all warps', a stretch of columns each: it is what everybody
  // waits for. The early signal is left to be announced, when the logits are known to be where they should be.
  __device__ static __forceinline__ bool route(const core::Context& context, core::Slot& slot, Tools& tools) {
    core::Workspace& work = context.shared.work;
    const uint32_t copies = router_copies(slot);
#pragma unroll 1
    for (uint32_t copy = 0; copy < copies; ++copy) {
      tools.reader.turn_to(copy);
      if (!tools.reader.await_landed()) return false;
      const uint32_t rows = tools.reader.bytes() / kRouterRowBytes;
#pragma unroll 1
      for (uint32_t row = 0; row < rows; ++row) {
        dot(context, tools.reader.data() + row * kRouterRowBytes);
        if (!tools.consumers.meet()) return false;
        if (context.warp == 0 && context.lane < spec::kRows) {
          float sum = 0.0f;
#pragma unroll
          for (uint32_t warp = 0; warp < spec::kConsumerWarps; ++warp) sum += work.squares[context.lane][warp];
          const uint32_t expert = slot.record.router_begin + tools.reader.what().unit + row;
          if constexpr (spec::kLogitsAhead > 0) {
            auto* to = core::at<uint64_t>(slot.outputs[0]) + context.lane * spec::kMaxExperts + expert;
            const uint32_t tag = core::tag(slot.step, slot.record.layer);
            ptx::store_relaxed_gpu(to, core::tagged(__float_as_uint(sum), tag));  // who reads it sees it come
          } else {
            auto* to = core::at<uint32_t>(slot.outputs[0]) + context.lane * spec::kMaxExperts + expert;
            tools.written.put(to, __float_as_uint(sum));
          }
        }
        const bool goes_on = row + 1 < rows || copy + 1 < copies;
        if (goes_on && !tools.consumers.meet()) return false;  // the sums are read
      }
      if (context.warp == 0) tools.reader.free();
    }
    tools.has_news = context.warp == 0;
    if (spec::kLogitsAhead > 0 && tools.has_news) announce(context, slot, tools);
    return true;
  }

  // The early signal, by the warp that has it.
  __device__ static __forceinline__ void announce(const core::Context& context, core::Slot& slot, Tools& tools) {
    tools.has_news = false;
    const uint32_t settled = tools.written.settled();
    if (context.lane == 0) {
      slot.early_warps = settled;
      core::arrive(context.launch(), slot.record.early);
      if constexpr (spec::kTrace) slot.trace.early = core::trace_time(context);
    }
  }

 private:
  // This warp's stretch of a router row, times all token rows.
  __device__ static __forceinline__ void dot(const core::Context& context, const uint8_t* weights) {
    float sums[spec::kRows];
#pragma unroll
    for (uint32_t token = 0; token < spec::kRows; ++token) sums[token] = 0.0f;
#pragma unroll 1
    for (uint32_t at = (context.warp * spec::kWarpThreads + context.lane) * sizeof(uint4); at < kRouterRowBytes;
         at += spec::kConsumerThreads * sizeof(uint4)) {
      const uint4 weight = *reinterpret_cast<const uint4*>(weights + at);
#pragma unroll
      for (uint32_t token = 0; token < spec::kRows; ++token) {
        const uint4 x = *reinterpret_cast<const uint4*>(context.shared.work.x[token] + at);
        sums[token] += (pair(weight.x, x.x) + pair(weight.y, x.y)) + (pair(weight.z, x.z) + pair(weight.w, x.w));
      }
    }
#pragma unroll
    for (uint32_t step = 16; step > 0; step /= 2) {
#pragma unroll
      for (uint32_t token = 0; token < spec::kRows; ++token) {
        sums[token] += __shfl_xor_sync(core::kAllLanes, sums[token], step);
      }
    }
    if (context.lane == 0) {
#pragma unroll
      for (uint32_t token = 0; token < spec::kRows; ++token)
        context.shared.work.squares[token][context.warp] = sums[token];
    }
  }

  __device__ static __forceinline__ float pair(uint32_t one, uint32_t other) {
    return ptx::low(one) * ptx::low(other) + ptx::high(one) * ptx::high(other);
  }
};

}  // namespace mk::tasks
