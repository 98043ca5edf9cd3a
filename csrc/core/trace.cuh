// Timestamps of every task of one step, compiled in only where asked for: without it nothing of this is left.
#pragma once
#include "core/context.cuh"
#include "ptx/memory.cuh"

namespace mk::core {

// A tick of the card's timer, and this SM's clock then: what places all SMs' cycles on one axis.
__device__ __forceinline__ void read_tick(uint64_t& cycles, uint64_t& nanoseconds) {
  const uint64_t before = ptx::card_time();
  do {
    nanoseconds = ptx::card_time();
    cycles = ptx::clock();
  } while (nanoseconds == before);
}

__device__ __forceinline__ bool is_traced(const Context& context, uint32_t step) {
  return spec::kTrace && step == context.launch().trace_step;
}

__device__ __forceinline__ abi::Trace* trace_of(const Context& context, const Slot& slot) {
  return at<abi::Trace>(context.launch().trace) + context.begin() + slot.index;
}

__device__ __forceinline__ uint32_t trace_time(const Context& context) {
  return static_cast<uint32_t>(ptx::clock() - context.shared.begin_cycles);
}

// Stamps a member of the record's trace, in shared memory; of the consumers, the first warp does.
__device__ __forceinline__ void stamp(const Context& context, Slot& slot, uint32_t abi::Trace::* member) {
  if constexpr (spec::kTrace) {
    if (context.warp == 0 && context.lane == 0) slot.trace.*member = trace_time(context);
  }
}

// Adds the cycles since `from` to a member of the record's trace, and starts `from` anew; the first warp's.
__device__ __forceinline__ void lap(const Context& context, const Slot& slot, uint32_t abi::Trace::* member,
                                    uint32_t& from) {
  if constexpr (spec::kTrace) {
    const uint32_t now = trace_time(context);
    if (context.warp == 0 && context.lane == 0) const_cast<Slot&>(slot).trace.*member += now - from;
    from = now;
  }
}

// Writes a finished record's trace to memory, by one thread.
__device__ __forceinline__ void write_trace(const Context& context, Slot& slot) {
  if constexpr (spec::kTrace) {
    slot.trace.end = trace_time(context);
    slot.trace.copies = slot.copies;
    if (is_traced(context, slot.step)) *trace_of(context, slot) = slot.trace;
  }
}

}  // namespace mk::core
