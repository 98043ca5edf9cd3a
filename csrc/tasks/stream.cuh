// The run of the streaming mode, the same for all kinds: it reads every byte of every copy once, frees its stage, and
// spends the cycles that the launch asks for. It times what a table does to the ring, without arithmetic.
#pragma once
#include "tasks/tools.cuh"

namespace mk::tasks {

inline constexpr uint32_t kWarpBytes = spec::kWarpThreads * sizeof(uint4);  // read by a warp at once
inline constexpr uint32_t kReads = 8;                                       // in flight together

// Exclusive or of this lane's words of a copy.
__device__ __forceinline__ uint32_t fold_copy(const uint8_t* data, uint32_t bytes, uint32_t lane) {
  uint32_t folded = 0;
#pragma unroll
  for (uint32_t begin = 0; begin < spec::kCopyBytes; begin += kReads * kWarpBytes) {
    uint4 words[kReads];
#pragma unroll
    for (uint32_t read = 0; read < kReads; ++read) {
      const uint32_t offset = begin + read * kWarpBytes + lane * sizeof(uint4);
      words[read] = {};
      if (offset < spec::kCopyBytes) words[read] = *reinterpret_cast<const uint4*>(data + offset);
    }
#pragma unroll
    for (uint32_t read = 0; read < kReads; ++read) {
      const uint32_t offset = begin + read * kWarpBytes + lane * sizeof(uint4);
      if (offset < bytes) folded ^= words[read].x ^ words[read].y ^ words[read].z ^ words[read].w;
    }
  }
  return folded;
}

// Consumes this warp's share of copies [begin, end) into `folded`.
__device__ __forceinline__ bool consume(const core::Context& context, const core::Slot& slot, core::Reader& reader,
                                        uint32_t begin, uint32_t end, uint32_t& folded) {
  for (uint32_t copy = reader.first_own(begin); copy < end; copy += spec::kConsumerWarps) {
    reader.turn_to(copy);
    if (!reader.await_landed()) return false;
    folded ^= fold_copy(reader.data(), reader.bytes(), context.lane);
    reader.free();
  }
  return true;
}

// A warp has ended its early part of the record; the last one announces it, and knows what the others did.
__device__ __forceinline__ void announce(const core::Context& context, core::Slot& slot, core::Written& written) {
  __syncwarp();
  const uint32_t ended = written.settled();
  if (context.lane == 0 && ptx::add_shared(slot.early_warps, ended) == spec::kConsumerWarps - 1) {
    core::arrive(context.launch(), slot.record.early);
    if constexpr (spec::kTrace) slot.trace.early = core::trace_time(context);
  }
}

// The run of a record of which the first `early_copies` copies lead to the early signal.
__device__ __forceinline__ bool stream(const core::Context& context, core::Slot& slot, Tools& tools,
                                       uint32_t early_copies) {
  const abi::Launch& launch = context.launch();
  uint32_t folded = 0;
  core::spend(launch.run_cycles[slot.record.kind]);
  if (slot.record.early != abi::kNone) {
    if (!consume(context, slot, tools.reader, 0, early_copies, folded)) return false;
    core::spend(launch.early_cycles[slot.record.kind]);
    announce(context, slot, tools.written);
  } else {
    early_copies = 0;
  }
  if (!consume(context, slot, tools.reader, early_copies, slot.copies, folded)) return false;
  core::stamp(context, slot, &abi::Trace::landed);
  if constexpr (spec::kTrace) {
    folded = __reduce_xor_sync(core::kAllLanes, folded);
    if (context.lane == 0) ptx::xor_shared(slot.trace.checksum, folded);
  } else if (folded == spec::kUnlikely) {
    *core::at<uint32_t>(launch.sink) = folded;
  }
  return true;
}

}  // namespace mk::tasks
